"""Whether all ranks of a group read one checkpoint, to the byte, though each reads only its experts. Pure.

The digest of an expert covers every byte that is stored of it (`Checkpoint.digest`). With its region a rank publishes
the sum of the digests of its experts. Rank 0 reads the rest of its checkpoint while the group serves. It then knows the
sum that each rank would have with its files, and ends the epoch if one has another; in the epochs that follow it
publishes these sums beside its own, so that a rank with other weights is refused before the group serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

KIND = "crc32"
"""Of the digests. Workers of another kind, or of a version without, are refused when they register."""
_MASK = (1 << 64) - 1


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """What a rank publishes for one epoch.

    Attributes:
        region: of its communicator.
        sum: of the digests of its experts.
        expected: the sums of all ranks with the files of this rank, if it has read all of them.
    """

    region: bytes
    sum: int
    expected: list[int] = []


def sum_of(digests: Iterable[int]) -> int:
    """In 64 bits, whatever the order."""
    return sum(digests) & _MASK


def differences(expected: Sequence[int], parcels: Sequence[Parcel]) -> dict[int, str]:
    """The ranks whose sum is not the one with rank 0's files, and words about each."""
    sums = [parcel.sum for parcel in parcels]
    return {
        rank: f"weights of rank {rank}: expected {wanted:016x} as rank 0's files give, got {got:016x}: are its files "
        "damaged, or of another checkpoint?"
        for rank, (wanted, got) in enumerate(zip(expected, sums, strict=False))
        if wanted != got
    }
