"""Handshake of a data connection: mutual authentication of two ranks before the first row. Pure, no sockets.

A connection belongs to a pair of ranks of one group. Its role is control connection or data lane.

    dialer                                          listener
    hello (token, ranks, role, lanes, nonce) ─────▶
                                             ◀───── challenge: 16 random bytes
    proof = HMAC(secret, challenge + hello) ──────▶ checks that the dialer is a member
    checks that the listener is its peer     ◀───── answer = HMAC(secret, hello + challenge)

The secret is part of the listener's ticket, which only members of the group receive; it is never sent over the data
port. The bytes after the handshake are neither encrypted nor authenticated.
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
    """The hello: first message of the dialer.

    Attributes:
        token: identifies the communicator in the process of the listener.
        rank: of the dialer.
        peer: rank of the listener.
        role: CONTROL_ROLE, or number of the lane.
        lanes: number of lanes of the dialer.
        nonce: 16 random bytes, so that no proof can be replayed.
    """

    token: int
    rank: int
    peer: int
    role: int
    lanes: int
    nonce: bytes

    def encode(self) -> bytes:
        """The message, HELLO_BYTES long."""
        return _HELLO.pack(MAGIC, self.token, self.rank, self.peer, self.role, self.lanes, self.nonce)


def hello(token: int, rank: int, peer: int, role: int, lanes: int) -> Greeting:
    """A hello with a new nonce."""
    return Greeting(token, rank, peer, role, lanes, secrets.token_bytes(NONCE_BYTES))


def decode(raw: bytes) -> Greeting:
    """Decode HELLO_BYTES bytes. Raises ValueError: another protocol or another version of the handshake."""
    magic, *fields = _HELLO.unpack(raw)
    if magic[:5] != MAGIC[:5]:
        raise ValueError(f"expected a hello of Crossdock's data port, got {raw[:8]!r}")
    if magic != MAGIC:
        raise ValueError(f"expected version {MAGIC[-1]} of the handshake, got {magic[-1]}")
    return Greeting(*fields)


def proof(secret: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """The dialer's proof, PROOF_BYTES long, that it knows the listener's secret."""
    return hmac.digest(secret, b"dialer" + challenge + raw_hello, hashlib.sha256)


def answer(secret: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """The listener's proof, PROOF_BYTES long, that it is the process that made the ticket."""
    return hmac.digest(secret, b"listener" + raw_hello + challenge, hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected)
