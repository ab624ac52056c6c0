"""What ranks must have in common in one operation: a word that peers compare (kernels/collectives/operation.cuh)."""

from __future__ import annotations

import zlib

import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp

_OPS, _ALGORITHMS = tuple(CollectiveOp), tuple(Algorithm)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Others have the number behind: what is gathered may be of any."""
_BYTES, _HASH = 40, 12
_BYTES_MASK, _HASH_MASK = (1 << _BYTES) - 1, (1 << _HASH) - 1


def signature(op: CollectiveOp, algorithm: Algorithm, dtype: torch.dtype, num_bytes: int, more: object) -> int:
    """A number that is not 0.

    Args:
        num_bytes: of one rank's x.
        more: what else must be equal: sizes of parts, offsets of registered tensors, blocks.
    """
    number = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
    word = zlib.crc32(repr((dtype, more)).encode()) & _HASH_MASK
    word = word << _BYTES | num_bytes & _BYTES_MASK
    word = word << 2 | number
    return (word << 4 | _ALGORITHMS.index(algorithm)) << 3 | _OPS.index(op) + 1


def describe(word: int) -> str:
    """The same in words."""
    op, algorithm, number = _OPS[(word & 7) - 1], _ALGORITHMS[word >> 3 & 15], word >> 7 & 3
    num_bytes, more = word >> 9 & _BYTES_MASK, word >> (9 + _BYTES)
    name = str(_DTYPES[number]).removeprefix("torch.") if number < len(_DTYPES) else "another dtype"
    return f"{op.value} of {num_bytes} bytes as {name} by {algorithm.value} (places and parts: {more:03x})"
