"""Offsets of registered tensors, equal on all ranks, without a leader.

A tensor dies on each rank when the garbage collector says so, at another moment on each. So an allocation is
collective: in one exchange the ranks tell each other which blocks they have dropped, and free those that all of them
dropped. Every rank then has the same free list, and first fit gives the same offset. Pure: the caller does the
exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from ep_kernels.errors import ArgumentError, TransportError

ALIGN_BYTES = 256
"""Alignment of every block, bytes: a cache line pair, and what vector and bulk copies want."""
_SIZE_BITS = 46
_TOO_MANY = (1 << _SIZE_BITS) - 1
"""Bytes that stand for more than any pool has: what would not fit the bits of a word."""
_BITS = 63
_BITMAPS = 7
MAX_BLOCKS = _BITS * _BITMAPS
"""Blocks that may live at once: their bitmap travels in one exchange."""


class SymmetricPool:
    """The blocks of one rank's pool; `drop` may be called from any thread, the rest from that of the operations.

    Args:
        num_bytes: size of the pool, equal on all ranks.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._blocks: dict[int, tuple[int, int]] = {}  # number -> (offset, bytes)
        self._dropped: set[int] = set()

    def request(self, num_bytes: int) -> list[int]:
        """This rank's words (EXCHANGE_WORDS int64) for the exchange that precedes an allocation of `num_bytes`."""
        words, size = [0] * _BITMAPS, min(num_bytes, _TOO_MANY)
        for block in list(self._dropped):
            words[block // _BITS] |= 1 << block % _BITS
        return [size | self._state() << _SIZE_BITS, *words]

    def _state(self) -> int:
        """17 bits of a hash of the blocks."""
        return zlib.crc32(repr(sorted(self._blocks.items())).encode()) >> 15

    def allocate(self, answers: Sequence[tuple[int, ...] | None]) -> tuple[int, int]:
        """(number, offset) of a new block, equal on all ranks.

        Args:
            answers: every rank's words; None for inactive ranks.

        Raises:
            ArgumentError: ranks ask for different sizes, or the pool is full; on all ranks alike, nothing is allocated.
            TransportError: the pools differ: a rank was lost in the middle of an allocation that some ranks finished.
        """
        told = {rank: words for rank, words in enumerate(answers) if words is not None}
        num_bytes = self._agree(told)
        bitmaps = [_common(words[1 + i] for words in told.values()) for i in range(_BITMAPS)]
        for block in [b for b in self._blocks if bitmaps[b // _BITS] >> b % _BITS & 1]:
            del self._blocks[block]
            self._dropped.discard(block)
        size = max(-(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES, ALIGN_BYTES)
        offset = None if num_bytes == _TOO_MANY else self._fit(size)
        number = next((b for b in range(MAX_BLOCKS) if b not in self._blocks), None)
        if offset is None or number is None:
            used = sum(length for _, length in self._blocks.values())
            got = f"{size} bytes with {used} of {self.num_bytes} in use by {len(self._blocks)} tensors"
            raise ArgumentError("shape", f"room in the pool (pool_bytes, {MAX_BLOCKS} tensors)", got)
        self._blocks[number] = offset, size
        return number, offset

    def drop(self, block: int) -> None:
        """The last view of a block has died on this rank. Any thread."""
        self._dropped.add(block)

    def _agree(self, told: dict[int, tuple[int, ...]]) -> int:
        first = min(told)
        num_bytes, state = told[first][0] & _TOO_MANY, told[first][0] >> _SIZE_BITS
        for rank, words in told.items():
            if words[0] >> _SIZE_BITS != state:
                raise TransportError(
                    f"empty: the registered tensors of rank {rank} differ from those of rank {first}; "
                    "a rank was lost while they were allocated: close this object and make another"
                )
            if words[0] & _TOO_MANY != num_bytes:
                got = f"{words[0] & _TOO_MANY} on rank {rank}"
                raise ArgumentError("shape", f"{num_bytes} bytes as on rank {first}", got)
        return num_bytes

    def _fit(self, size: int) -> int | None:
        at = 0
        for offset, length in sorted(self._blocks.values()):
            if offset - at >= size:
                break
            at = offset + length
        return at if at + size <= self.num_bytes else None


def _common(words: Iterable[int]) -> int:
    result = -1
    for word in words:
        result &= word
    return result
