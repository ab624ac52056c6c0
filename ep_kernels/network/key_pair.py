"""Who a process is to those of other hosts: a key pair. Two of them share a secret that each computes from its own
private key and the public key in the other's ticket, and that no other member of their group can compute.

X25519 (RFC 7748) in plain Python: 1 to 3 ms for a pair of processes, once.
"""

from __future__ import annotations

import functools
import secrets

KEY_BYTES = 32
_PRIME, _BITS = 2**255 - 19, 255
_BASE = (9).to_bytes(KEY_BYTES, "little")
_PAIRS = 1024
"""Secrets that are kept."""


class KeyPair:
    """Made at random, for as long as the process runs.

    Attributes:
        public: key of KEY_BYTES.
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
