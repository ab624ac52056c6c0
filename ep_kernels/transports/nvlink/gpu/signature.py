"""What ranks must have in common in one operation: a word that peers compare (kernels/collectives/operation.cuh)."""

from __future__ import annotations

import zlib

import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp

_OPS, _ALGORITHMS = tuple(CollectiveOp), tuple(Algorithm)
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_BITS = {"op": 2, "algorithm": 4, "dtype": 6, "bytes": 40, "more": 11}
"""Fields of a word, the lowest first. `op` counts from 1, so that no word is 0."""


def signature(op: CollectiveOp, algorithm: Algorithm, dtype: torch.dtype, num_bytes: int, more: object) -> int:
    """A number of 63 bits that is not 0.

    Args:
        num_bytes: of one rank's x.
        more: what else must be equal: sizes of parts, offsets of registered tensors, blocks of kernels (a block waits
            for the same block of every peer alone).
    """
    rest = zlib.crc32(repr(more).encode())
    values = _OPS.index(op) + 1, _ALGORITHMS.index(algorithm), _DTYPES.index(dtype), num_bytes, rest
    word, at = 0, 0
    for value, bits in zip(values, _BITS.values(), strict=True):
        word |= (value & (1 << bits) - 1) << at
        at += bits
    return word


def difference(mine: int, theirs: int) -> str:
    """The first thing in which two signatures differ: "bytes 16, this rank 32"."""
    for name, one, other in zip(_BITS, _fields(theirs), _fields(mine), strict=True):
        if one != other:
            return f"{_NAMES[name]} {_value_name(name, one)}, this rank {_value_name(name, other)}"
    return "nothing else"


_NAMES = {"op": "operation", "algorithm": "algorithm", "dtype": "dtype", "bytes": "bytes"}
_NAMES["more"] = "sizes of parts, places of registered tensors or multiprocessors"


def _fields(word: int) -> list[int]:
    found = []
    for bits in _BITS.values():
        found.append(word & (1 << bits) - 1)
        word >>= bits
    return found


def _value_name(name: str, value: int) -> str:
    if name == "op":
        return _OPS[value - 1].value if 0 < value <= len(_OPS) else "unknown"
    if name == "algorithm":
        return _ALGORITHMS[value].value if value < len(_ALGORITHMS) else "unknown"
    if name == "dtype":
        return str(_DTYPES[value]) if value < len(_DTYPES) else "unknown"
    return str(value) if name == "bytes" else f"{value:03x}"
