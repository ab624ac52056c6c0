"""The pure parts of the collectives: configuration, definition, choice of algorithm, offsets of registered memory."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from ep_kernels.collectives import Algorithm, CollectiveCapabilities, CollectiveConfig, Collectives
from ep_kernels.collectives import collective_checks as checks
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.choose import CollectiveShape, choose
from ep_kernels.collectives.collective_types import CollectiveOp
from ep_kernels.collectives.fallback import why_not_reduced
from ep_kernels.collectives.fsdp import AllGather
from ep_kernels.collectives.pool import ALIGN_BYTES, MAX_BLOCKS, SymmetricPool
from ep_kernels.errors import ArgumentError, ConfigError, TransportError
from ep_kernels.transports import collective_base
from ep_kernels.transports.cpu import native
from tests.groups import LonelyGroup

GATHER, SCATTER, REDUCE = CollectiveOp
PUSH_AND_PULL = (Algorithm.COPY_PUSH, Algorithm.COPY_PULL, Algorithm.KERNEL_PUSH, Algorithm.KERNEL_PULL)
SHOTS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)


# Configuration.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", 3), ("group", LonelyGroup(2, 2)), ("transport", 1), ("pool_bytes", -1), ("pool_bytes", 1.5),
        ("staging_bytes", 4095), ("max_in_flight", 0), ("max_in_flight", 17), ("timeout_s", 0), ("timeout_s", "1"),
        ("num_sms", -1), ("num_sms", True), ("fallback", 1), ("kernel_cache_dir", 1),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected") as error:
        CollectiveConfig(**{"group": LonelyGroup(), field: value})
    assert error.value.field == field


def test_fields_that_ranks_share() -> None:
    fields = CollectiveConfig(group=LonelyGroup(), kernel_cache_dir="x").shared_fields()
    assert set(fields) == set(CollectiveConfig.__struct_fields__) - {"group", "kernel_cache_dir"}


def test_transports_are_found_by_folder() -> None:
    with pytest.raises(ConfigError, match=r"transport: expected one of"):
        collective_base.create(CollectiveConfig(group=LonelyGroup(), transport="none"))


# The definition.


def test_sums_are_made_in_fp32_in_ascending_rank_and_rounded_once() -> None:
    half = [torch.tensor([v], dtype=torch.bfloat16) for v in (1.0, 2**-8, 2**-8)]
    assert reference.all_reduce(half)[0] == 1 + 2**-7  # in bf16, each addition would round to 1
    single = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    assert reference.all_reduce(single)[0] == 0.0
    assert reference.all_reduce(single[::-1])[0] == 0.0
    assert reference.all_reduce([single[0], single[2], single[1]])[0] == 1.0
    minus = [torch.tensor([-0.0])] * 2
    total = reference.all_reduce(minus)[0]
    assert total is not None
    assert bool(total.signbit())


def test_inactive_ranks_are_left_out() -> None:
    xs = [torch.full((2,), float(2**r)) for r in range(3)]
    alive = [True, False, True]
    assert [None if t is None else t.tolist() for t in reference.all_reduce(xs, active=alive)] == [[5, 5], None, [5, 5]]
    gathered = reference.all_gather(xs, active=alive, outs=[torch.full((6,), -1.0)] * 3)
    assert [None if t is None else t.tolist() for t in gathered] == [[1, 1, -1, -1, 4, 4], None, [1, 1, -1, -1, 4, 4]]
    fresh = reference.all_gather(xs, active=alive)[0]
    assert fresh is not None
    assert fresh.tolist() == [1, 1, 0, 0, 4, 4]
    wide = [x.repeat(3) for x in xs]
    assert [None if t is None else t.tolist() for t in reference.reduce_scatter(wide, active=alive)] == [
        [5, 5], None, [5, 5],
    ]  # fmt: skip


# The choice.


def can(**fields: Any) -> CollectiveCapabilities:
    every = {GATHER: PUSH_AND_PULL, SCATTER: (Algorithm.KERNEL_PULL,), REDUCE: SHOTS}
    usual: dict[str, Any] = {"device_type": "cuda", "cross_host": False, "graphs": True, "abi": "a"}
    usual |= {"algorithms": every, "copy_min_bytes": 3000, "beside_min_bytes": 40}
    usual |= {"one_shot_max_bytes": {2: 500, 8: 100}}
    return CollectiveCapabilities(**(usual | fields))


def chosen(op: CollectiveOp, num_bytes: int, able: CollectiveCapabilities | None = None, **fields: Any) -> Algorithm:
    usual: dict[str, Any] = {"num_ranks": 4, "num_sms": None, "registered": False}
    return choose(CollectiveShape(op, num_bytes, **(usual | fields)), able or can()).algorithm


@pytest.mark.parametrize(
    ("num_bytes", "num_sms", "registered", "algorithm"),
    [
        (999, None, False, Algorithm.KERNEL_PULL),
        (999, None, True, Algorithm.KERNEL_PUSH),
        (1000, None, False, Algorithm.COPY_PULL),
        (1000, None, True, Algorithm.COPY_PUSH),
        (1, 0, True, Algorithm.COPY_PUSH),
        (1, 0, False, Algorithm.COPY_PULL),
        (1 << 30, 8, True, Algorithm.KERNEL_PUSH),
        (1 << 30, 8, False, Algorithm.KERNEL_PULL),
    ],
)
def test_all_gather(num_bytes: int, num_sms: int | None, registered: bool, algorithm: Algorithm) -> None:
    assert chosen(GATHER, num_bytes, num_sms=num_sms, registered=registered) is algorithm


def test_all_gather_beside_a_product() -> None:
    """By what goes to one peer."""
    there: dict[str, Any] = {"beside": True, "registered": True}
    assert chosen(GATHER, 39, **there) is Algorithm.KERNEL_PUSH
    assert chosen(GATHER, 40, **there) is Algorithm.COPY_PUSH
    assert chosen(GATHER, 40, **there, num_sms=8) is Algorithm.KERNEL_PUSH
    assert chosen(GATHER, 1, **there, num_sms=0) is Algorithm.COPY_PUSH
    assert chosen(GATHER, 39, beside=True) is Algorithm.KERNEL_PULL
    assert chosen(GATHER, 40, beside=True) is Algorithm.COPY_PULL


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "algorithm"),
    [
        (500, 2, Algorithm.ONE_SHOT),
        (501, 2, Algorithm.TWO_SHOT),
        (500, 7, Algorithm.ONE_SHOT),
        (100, 8, Algorithm.ONE_SHOT),
        (101, 9, Algorithm.TWO_SHOT),
        (1, 1, Algorithm.TWO_SHOT),
    ],
)
def test_all_reduce(num_bytes: int, ranks: int, algorithm: Algorithm) -> None:
    assert chosen(REDUCE, num_bytes, num_ranks=ranks) is algorithm


def test_what_a_library_does_faster() -> None:
    """By the bytes of a rank's result, and only where it may."""
    able = can(library_min_bytes={SCATTER: {4: 100}})
    assert chosen(SCATTER, 400, able, library=True) is Algorithm.TORCH
    assert chosen(SCATTER, 399, able, library=True) is Algorithm.KERNEL_PULL
    assert chosen(SCATTER, 400, able) is Algorithm.KERNEL_PULL
    assert chosen(SCATTER, 300, able, library=True, num_ranks=3) is Algorithm.KERNEL_PULL
    assert chosen(SCATTER, 800, able, library=True, num_ranks=8) is Algorithm.TORCH
    assert chosen(SCATTER, 400, able, library=True, num_sms=8) is Algorithm.KERNEL_PULL, "the caller named them"
    assert chosen(REDUCE, 900, able, library=True) is Algorithm.TWO_SHOT


def test_what_a_transport_lacks() -> None:
    only = can(algorithms={GATHER: (Algorithm.PULL,), REDUCE: (Algorithm.TWO_SHOT,)}, max_bytes={REDUCE: 1000})
    assert chosen(GATHER, 5, only, num_sms=0, registered=True) is Algorithm.PULL
    assert chosen(REDUCE, 5, only, num_ranks=2) is Algorithm.TWO_SHOT
    assert chosen(REDUCE, 1000, only) is Algorithm.TWO_SHOT
    shape = CollectiveShape(REDUCE, 1001, 4, None, False)
    assert choose(shape, only).reason == "all_reduce of 1001 bytes; at most 1000 here"
    assert chosen(SCATTER, 5, only) is Algorithm.TORCH
    assert choose(shape, can(reason="no driver")).reason == "no driver"


# Offsets of registered memory.


def words_of(pools: list[SymmetricPool], sizes: list[int]) -> list[tuple[int, ...] | None]:
    return [tuple(pool.request(size)) for pool, size in zip(pools, sizes, strict=True)]


def take(pools: list[SymmetricPool], size: int) -> tuple[int, int]:
    answers = words_of(pools, [size] * len(pools))
    first, *others = [pool.allocate(answers) for pool in pools]
    assert all(other == first for other in others)
    return first


def test_a_block_is_free_when_all_ranks_have_dropped_it() -> None:
    pools = [SymmetricPool(4 * ALIGN_BYTES) for _ in range(3)]
    first, second = take(pools, 1), take(pools, 2 * ALIGN_BYTES)
    assert (first[1], second[1]) == (0, ALIGN_BYTES)
    pools[0].drop(first[0])
    pools[1].drop(first[0])
    assert take(pools, ALIGN_BYTES)[1] == 3 * ALIGN_BYTES
    with pytest.raises(ArgumentError, match="room in the pool"):
        take(pools, 1)
    pools[2].drop(first[0])
    assert take(pools, 1)[1] == 0


def test_ranks_that_drop_at_random_agree_for_ever() -> None:
    draw = random.Random(1)
    pools = [SymmetricPool(64 * ALIGN_BYTES) for _ in range(3)]
    alive: list[set[int]] = [set() for _ in pools]
    spans: dict[int, tuple[int, int]] = {}
    for _ in range(3000):
        size = draw.randint(0, 5 * ALIGN_BYTES)
        try:
            block, offset = take(pools, size)
        except ArgumentError:
            block = -1
        else:
            held = {b: spans[b] for b in set().union(*alive)}
            assert all(offset + size <= at or at + length <= offset for at, length in held.values()), "in use"
            spans[block] = offset, size
            for mine in alive:
                mine.add(block)
        for mine, pool in zip(alive, pools, strict=True):
            for gone in [b for b in mine if draw.random() < (0.3 if block >= 0 else 0.8)]:
                mine.remove(gone)
                pool.drop(gone)


def test_the_number_of_blocks_is_bounded() -> None:
    pools = [SymmetricPool(2 * MAX_BLOCKS * ALIGN_BYTES)]
    for _ in range(MAX_BLOCKS):
        take(pools, 1)
    with pytest.raises(ArgumentError, match=f"{MAX_BLOCKS} tensors"):
        take(pools, 1)
    pools[0].drop(MAX_BLOCKS - 1)
    assert take(pools, 1)[0] == MAX_BLOCKS - 1


@pytest.mark.parametrize("size", [(1 << 46) - 1, 1 << 46, 1 << 50, (1 << 50) + 1, 1 << 100])
def test_sizes_that_no_pool_has(size: int) -> None:
    """And whose bits do not fit the word of the exchange: a tensor of a petabyte would lie over a block of a few."""
    pools = [SymmetricPool(1 << 20), SymmetricPool(1 << 20)]
    with pytest.raises(ArgumentError, match="room in the pool"):
        take(pools, size)
    with pytest.raises(ArgumentError, match="on rank 1"):
        pools[0].allocate(words_of(pools, [8, size]))
    assert take(pools, 8) == (0, 0), "nothing was allocated"


def test_sizes_and_pools_that_differ() -> None:
    pools = [SymmetricPool(1 << 20), SymmetricPool(1 << 20)]
    with pytest.raises(ArgumentError, match="shape: expected 8 bytes as on rank 0, got 9 on rank 1"):
        pools[0].allocate(words_of(pools, [8, 9]))
    pools[0].allocate(words_of(pools, [8, 8]))  # rank 1 was lost in this one
    with pytest.raises(TransportError, match="registered tensors of rank 1 differ from those of rank 0"):
        pools[0].allocate(words_of(pools, [8, 8]))
    answers = words_of(pools, [8, 8])
    assert pools[0].allocate([answers[0], None])[1] == ALIGN_BYTES


def test_an_operation_has_the_bytes_that_the_native_half_expects() -> None:
    assert ctypes.sizeof(native.Collective) == native.load().cd_collective_bytes()


# Compiled code.


@pytest.mark.parametrize("out", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.float64)])
def test_an_out_of_compiled_code_is_checked(out: torch.Tensor) -> None:
    """As in the call that is not compiled; a copy would repeat rows and convert."""
    torch._dynamo.reset()
    with Collectives(CollectiveConfig(group=LonelyGroup(), pool_bytes=1 << 16)) as coll:
        x, good = torch.arange(4.0), torch.zeros(4)
        run = torch.compile(lambda x, out: coll.all_reduce(x, out=out).wait(), backend="eager")
        with pytest.raises(ArgumentError, match="out: expected"):
            run(x, out)
        assert not out.any()
        assert torch.equal(run(x, good), x)
        assert torch.equal(good, x)


@pytest.mark.parametrize(
    ("backend", "reduction", "dtype", "why"),
    [
        ("gloo", "sum", torch.bfloat16, ""),
        ("gloo", "sum", torch.int16, "gloo reduces torch.bfloat16, torch.bool"),
        ("gloo", "avg", torch.int32, "gloo averages"),
        ("gloo", "avg", torch.complex64, ""),
        ("gloo", "max", torch.complex64, "no 'max'"),
        ("nccl", "avg", torch.int32, ""),
        ("nccl", "sum", torch.float8_e4m3fn, ""),
        ("nccl", "sum", torch.uint16, "nccl reduces"),
        ("its own", "sum", torch.uint16, ""),
    ],
)
def test_what_torch_does_not_reduce(backend: str, reduction: str, dtype: torch.dtype, why: str) -> None:
    found = why_not_reduced(backend, reduction, dtype)
    assert why in found
    assert bool(why) == bool(found)


def test_gathers_at_once_lie_apart() -> None:
    """In place is no overlap; empty parts lie nowhere; any other byte in common is named."""
    memory = torch.zeros(64, dtype=torch.uint8)

    def pair(first: int, length: int, x: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return memory[first if x is None else x :][: length // 2], memory[first : first + length]

    checks.disjoint([pair(0, 8), pair(16, 8), pair(8, 8), pair(3, 0), (torch.ones(4), memory[40:48])])
    for bad, said in (
        ([pair(0, 9), pair(16, 8), pair(8, 8)], r"outs\[2\]: expected memory apart from outs\[0\], got 1 bytes"),
        ([pair(0, 8), pair(8, 8, x=7)], r"outs\[0\]: expected memory apart from xs\[1\]"),
        ([pair(32, 8, x=0), pair(0, 2), pair(2, 8)], r"outs\[1\]: expected memory apart from xs\[0\]"),
        ([pair(32, 8, x=0), pair(48, 2), pair(2, 8)], r"outs\[2\]: expected memory apart from xs\[0\]"),
    ):
        with pytest.raises(ArgumentError, match=said):
            checks.disjoint(bad)


def test_a_full_pool_is_asked_once_for_each_size() -> None:
    """Hosts meet for each answer; ranks that differed in who is asked would wait for each other."""
    asked: list[int] = []

    class Full:
        rank, size = 0, 2

        def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            asked.append(shape[0])
            if shape[0] > 64 or asked.count(shape[0]) > 2:
                raise ArgumentError("shape", "room in the pool", shape)
            return torch.empty(*shape, dtype=dtype)

    gather = AllGather(cast(Any, Full()))
    make = functools.partial(gather.allocate, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="no room in the pool for a buffer of") as told:
        held = [make((16,)) for _ in range(4)] + [make((32,))]
    assert [str(one.message).split(" bytes")[0].split()[-1] for one in told] == ["64", "128"]
    assert asked == [64, 64, 64, 64, 128, 128]
    held += [make((16,)), make((32,))]
    assert len(asked) == 6
    place = held.pop(0).data_ptr()
    assert make((16,)).data_ptr() == place, "what was dropped is used again"
