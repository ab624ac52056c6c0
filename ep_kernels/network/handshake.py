"""What two ranks say on a new connection before bytes of rows pass: pure, no sockets.

A connection belongs to a pair of ranks of one group; its role is the control connection, or one of the data lanes.

    dialer                                  listener
    hello (who, whom, role, nonce) ──────▶
           ◀────── challenge: 16 random bytes
    proof: HMAC(secret, challenge + hello) ▶  is it a member?
           ◀────── answer: HMAC(secret, hello + challenge), proof that the listener is the right one

The secret is in the listener's ticket, which members of the group get from the control plane; it never crosses the data
port. What follows on the connection is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

MAGIC = b"CDNET\x00\x00\x01"
"""Ends with the version of the handshake."""
CONTROL_ROLE = 0xFFFF
"""Role of the control connection; lane i has role i."""
SECRET_BYTES, CHALLENGE_BYTES, PROOF_BYTES, NONCE_BYTES = 32, 16, 32, 16
_HELLO = struct.Struct("!8sQHHHH16s")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class Greeting:
    """First words of the dialer.

    Attributes:
        token: which communicator of the listener is meant.
        rank: of the dialer.
        peer: rank of the listener.
        role: CONTROL_ROLE, or number of the lane.
        lanes: how many lanes the dialer makes.
        nonce: random; so that no proof fits twice.
    """

    token: int
    rank: int
    peer: int
    role: int
    lanes: int
    nonce: bytes

    def encode(self) -> bytes:
        """HELLO_BYTES."""
        return _HELLO.pack(MAGIC, self.token, self.rank, self.peer, self.role, self.lanes, self.nonce)


def hello(token: int, rank: int, peer: int, role: int, lanes: int) -> Greeting:
    """A fresh one."""
    return Greeting(token, rank, peer, role, lanes, secrets.token_bytes(NONCE_BYTES))


def decode(raw: bytes) -> Greeting:
    """Raises ValueError: these are no words of this protocol and version."""
    magic, *fields = _HELLO.unpack(raw)
    if magic[:5] != MAGIC[:5]:
        raise ValueError(f"expected a hello of Crossdock's data port, got {raw[:8]!r}")
    if magic != MAGIC:
        raise ValueError(f"expected version {MAGIC[-1]} of the handshake, got {magic[-1]}")
    return Greeting(*fields)


def proof(secret: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """Of the dialer: it knows the listener's secret."""
    return hmac.digest(secret, b"dialer" + challenge + raw_hello, hashlib.sha256)


def answer(secret: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """Of the listener: it knows its own secret, so it is the process of the ticket."""
    return hmac.digest(secret, b"listener" + raw_hello + challenge, hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    """In a time that tells nothing."""
    return hmac.compare_digest(given, expected)
