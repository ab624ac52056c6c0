"""Handshake of a data connection: mutual authentication of two ranks before the first row. Pure, no sockets.

A connection belongs to a pair of ranks of one group. Its role is control connection or data lane.

    dialer                                                      listener
    hello (token, ranks, role, lanes, nonce, public key) ─────▶
                                                       ◀─────── challenge: 16 random bytes
    proof = HMAC(secret, challenge + hello),                    checks that the dialer is a member of the group,
            HMAC(pair, challenge + hello)      ───────────────▶ and the owner of that key
    checks that the listener is its peer       ◀─────────────── answer = HMAC(pair, hello + challenge)
                                                                the key is that rank's: joined, or closed

The secret is part of the listener's ticket, which only members of the group receive. Every member has every ticket, so
it proves membership alone; who a rank is, its key proves: `pair` is what the two share (`KeyPair`), and which key is
whose, tickets say. Neither secret is ever sent over the data port. The bytes after the handshake are neither encrypted
nor authenticated.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

WIRE = 3
"""Version of all that crosses hosts: the handshake, frames, control messages, cards, immediates, and what bytes of a
mirror mean. Raise it when one of them changes (tests/unit/test_handshake.py); tickets and hellos carry it."""
MAGIC = b"CDNET\x00\x00" + bytes([WIRE])
CONTROL_ROLE = 0xFFFF
"""Role of the control connection; lane i has role i."""
SECRET_BYTES, CHALLENGE_BYTES, MAC_BYTES, NONCE_BYTES = 32, 16, 32, 16
PROOF_BYTES = 2 * MAC_BYTES
KEY_BYTES = 32
_PRIME, _BITS = 2**255 - 19, 255
_BASE = (9).to_bytes(KEY_BYTES, "little")
_PAIRS = 1024
"""Secrets that are kept."""


class KeyPair:
    """Who a process is to those of other hosts. Two of them share a secret that each computes from its own private key
    and the public key in the other's ticket, and that no other member of their group can compute. Made at random, for
    as long as the process runs.

    X25519 (RFC 7748) in plain Python: 1 to 3 ms for a pair of processes, once.
    """

    def __init__(self) -> None:
        self._private = secrets.token_bytes(KEY_BYTES)
        self.public = x25519(self._private, _BASE)
        self.pair = functools.lru_cache(_PAIRS)(functools.partial(x25519, self._private))
        """The secret that is shared with the owner of a public key. Any thread."""


def x25519(private: bytes, public: bytes) -> bytes:
    """Function X25519 of RFC 7748, section 5: a Montgomery ladder over the bits of the private key."""
    scalar = int.from_bytes(private, "little") & ((1 << 254) - 8) | 1 << 254
    base = int.from_bytes(public, "little") & ((1 << _BITS) - 1)
    x2, z2, x3, z3 = 1, 0, base, 1
    for bit in reversed(range(_BITS)):
        if scalar >> bit & 1:
            x3, z3, x2, z2 = _step(base, x3, z3, x2, z2)
        else:
            x2, z2, x3, z3 = _step(base, x2, z2, x3, z3)
    return (x2 * pow(z2, -1, _PRIME) % _PRIME).to_bytes(KEY_BYTES, "little") if z2 else bytes(KEY_BYTES)


def _step(base: int, x2: int, z2: int, x3: int, z3: int) -> tuple[int, int, int, int]:
    """Double the first point, add the second one to it."""
    plus, minus = (x2 + z2) ** 2 % _PRIME, (x2 - z2) ** 2 % _PRIME
    one, other = (x3 - z3) * (x2 + z2) % _PRIME, (x3 + z3) * (x2 - z2) % _PRIME
    both = plus - minus
    x3, z3 = (one + other) ** 2 % _PRIME, base * ((one - other) ** 2 % _PRIME) % _PRIME
    return plus * minus % _PRIME, both * (plus + 121665 * both) % _PRIME, x3, z3


_HELLO = struct.Struct(f"!8sQHHHH{NONCE_BYTES}s{KEY_BYTES}s")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class Greeting:
    """The hello: first message of the dialer.

    Attributes:
        token: identifies the communicator in the process of the listener.
        role: CONTROL_ROLE, or number of the lane.
        nonce: 16 random bytes, so that no proof can be replayed.
    """

    token: int
    rank: int
    peer: int
    role: int
    lanes: int
    nonce: bytes
    key: bytes

    def encode(self) -> bytes:
        return _HELLO.pack(MAGIC, self.token, self.rank, self.peer, self.role, self.lanes, self.nonce, self.key)


def hello(token: int, rank: int, peer: int, role: int, lanes: int, key: bytes) -> Greeting:
    return Greeting(token, rank, peer, role, lanes, secrets.token_bytes(NONCE_BYTES), key)


def decode(raw: bytes) -> Greeting:
    """Decode HELLO_BYTES bytes. Raises ValueError: another protocol or another version."""
    magic, *fields = _HELLO.unpack(raw)
    if magic[:5] != MAGIC[:5]:
        raise ValueError(f"expected a hello of Crossdock's data port, got {raw[:8]!r}")
    if magic != MAGIC:
        raise ValueError(f"expected version {WIRE} of the data port, got {magic[-1]}")
    return Greeting(*fields)


def membership(secret: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """First half of the dialer's proof: it knows the listener's secret."""
    return hmac.digest(secret, b"member" + challenge + raw_hello, hashlib.sha256)


def ownership(pair: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """Second half: the key of its hello is its own."""
    return hmac.digest(pair, b"dialer" + challenge + raw_hello, hashlib.sha256)


def answer(pair: bytes, raw_hello: bytes, challenge: bytes) -> bytes:
    """The listener's proof, MAC_BYTES long, that the key of its ticket is its own."""
    return hmac.digest(pair, b"listener" + raw_hello + challenge, hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)
