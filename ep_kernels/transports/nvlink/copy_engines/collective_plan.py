"""Pure arithmetic of the collectives: sizes of the region, rounds, grid and shared memory of every launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ep_kernels import jit
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.kernels.collective_abi import MAX_BLOCKS, MAX_PARTS, CollectiveSizes
from ep_kernels.transports.nvlink.calls.plan import CPP_TYPES, Launch

ONE_SHOT, TWO_SHOT = 0, 1
"""KIND of the all-reduce kernel."""
ONE_SHOT_MAX_BYTES = {1: 4 << 20, 3: 256 << 10, 5: 128 << 10, 9: 64 << 10, 17: 32 << 10, 33: 16 << 10}
"""Most bytes of x that one-shot all-reduce has lines for, by fewest ranks: each rank sends (R - 1) x, two-shot about
2 x, in two steps. Of two ranks measured: 9 us against 14 at 1 MiB, 26 against 30 at 4, equal at 8. The others are
computed from 1.6 us a step and 300 GB/s."""
READ_MAX_BYTES = 8 << 20
"""Most bytes of a two-shot all-reduce in place in a registered tensor whose terms are read where they lie, instead of
sent: one exchange less. Two H200: 39.1 us against 40.7 at 8 MiB, 64.3 against 62.7 at 16."""
GATHER_BLOCKS, REDUCE_BLOCKS = 32, MAX_BLOCKS
"""Most blocks of an all-gather, and of a reduction, where the caller does not say: a gather keeps the links busy with
these, by the copy bandwidth of a block that plan.py has (COMBINE_GBPS); a sum, which reads what arrives and adds, takes
0.95 of the time of 64 blocks with twice as many, from 2 MiB on."""
BLOCK_BYTES = 16 << 10
"""Fewest bytes, over all peers, that are worth another block."""
ONE_SHOT_BLOCK_BYTES = 4 * abi.PACKET_DATA
"""Fewest bytes that are worth another block of a one-shot all-reduce: a packet for each of four warps.
On two H200 8 KiB took 3.5 us with these, 3.9 with 16 KiB a block; 64 KiB 3.9, 5.7; 256 KiB 4.4, 6.1; 1 MiB 6.8, 8.3."""
_STAGE_BYTES = 16 * 3 * 4096  # kernels/collectives/all_gather.cuh: warps, stages of a warp, bytes of a stage
_HEAD_BYTES = 512  # common/block.cuh: mbarriers


def one_shot_max_bytes(size: int) -> int:
    """Most bytes of x of a one-shot all-reduce among `size` ranks."""
    return next(most for fewest, most in reversed(ONE_SHOT_MAX_BYTES.items()) if fewest <= size)


def sizes_of(size: int, pool_bytes: int, staging_bytes: int) -> CollectiveSizes:
    """What the region of one of `size` ranks is made of."""
    packets = -(-one_shot_max_bytes(size) // abi.PACKET_DATA)
    return CollectiveSizes(size, packets, staging_bytes, pool_bytes)


def num_blocks(num_bytes: int, most: int, num_sms: int | None, available: int, block_bytes: int | None = None) -> int:
    """Blocks of a launch that moves `num_bytes`: equal on all ranks, because each argument is.

    Args:
        num_bytes: sent by a rank, over all peers.
        most: where `num_sms` is None.
        num_sms: as the caller said; 0 = no kernel was wanted, but one is needed: as few as do it.
        available: fewest multiprocessors of any rank's GPU.
        block_bytes: that are worth a block; None: BLOCK_BYTES.
    """
    limit = min(most if num_sms is None else max(1, num_sms), available, MAX_BLOCKS)
    return max(1, min(limit, -(-num_bytes // (block_bytes or BLOCK_BYTES))))


def gather_launch(blocks: int, size: int) -> Launch:
    """Launch of the all-gather kernel. Pull needs no stages, but a kernel is loaded once, with one size."""
    return Launch(blocks, _HEAD_BYTES + (size + 1) // 2 * 16 + _STAGE_BYTES + 128, 0, 0)


def reduce_launch(blocks: int, size: int) -> Launch:
    return Launch(blocks, _HEAD_BYTES + (size + 1) // 2 * 16, 0, 0)


def add_launch(blocks: int, size: int) -> Launch:
    """Launch of the kernel that sums what copy engines have brought: it starts when they are done."""
    return replace(reduce_launch(blocks, size), overlapped=False)


def gather_variant() -> jit.Variant:
    return jit.Variant("all_gather")


def reduce_variant(kernel: str, dtype: torch.dtype, kind: int | None = None) -> jit.Variant:
    """kernel: reduce_scatter | add_terms | all_reduce, which has a `kind`."""
    kinds = () if kind is None else (("KIND", str(kind)),)
    return jit.Variant(kernel, (*kinds, ("X", CPP_TYPES[dtype])))


@dataclass(frozen=True, slots=True)
class PartRange:
    """Bytes [begin, begin + num_bytes) of the shard of part `index`; begin is a multiple of 16."""

    index: int
    begin: int
    num_bytes: int


def gather_rounds(num_bytes: Sequence[int], slot_bytes: int | None) -> Iterator[list[PartRange]]:
    """Launches of an all-gather of parts with shards of `num_bytes`; empty parts move nothing.

    Args:
        slot_bytes: pull: what the shards of a launch, each rounded up to 16 bytes, fit into. None: no limit.
    """
    open_: list[PartRange] = []
    left = slot_bytes
    for index, total in enumerate(num_bytes):
        begin = 0
        while begin < total:
            if len(open_) == MAX_PARTS or left == 0:
                yield open_
                open_, left = [], slot_bytes
            size = total - begin if left is None else min(total - begin, left)
            open_.append(PartRange(index, begin, size))
            begin += size
            left = None if left is None else left - -(-size // 16) * 16
    if open_:
        yield open_


def reduce_rounds(num_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """(begin, bytes) of the launches of a reduction; `most` is a multiple of 16."""
    for begin in range(0, num_bytes, most):
        yield begin, min(most, num_bytes - begin)


def slot_bytes(sizes: CollectiveSizes) -> int:
    return int(collective_abi.collective_map(sizes).slot_stride)


def copy_wait_variant() -> jit.Variant:
    """What waits between copies in a CUDA graph."""
    return jit.Variant("copy_wait")


def barrier_variant() -> jit.Variant:
    return jit.Variant("barrier")


def launch_of(variant: jit.Variant, size: int) -> Launch:
    """Launch of one block of a variant. Loading needs its shared memory, which no operation changes."""
    if variant.kernel == "copy_wait":
        return Launch(1, 0, 0, 0, overlapped=False)
    return gather_launch(1, size) if variant.kernel == "all_gather" else reduce_launch(1, size)
