"""The byte map and the launch plans: pure arithmetic, checked without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.device import abi
from ep_kernels.errors import ConfigError
from ep_kernels.transports.nvlink import plan
from ep_kernels.types import Layout, Mode
from tests.gpu.loopback_group import LoopGroup


def config(rank: int = 0, size: int = 8, **changes: Any) -> MoEConfig:
    fields = {"num_experts": 256, "hidden_size": 7168, "topk": 8, "max_tokens_per_rank": 128, "mode": Mode.AUTO}
    return MoEConfig(group=LoopGroup(rank, size), **(fields | changes))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("layout", list(Layout))
def test_arrays_do_not_overlap(mode: Mode, layout: Layout) -> None:
    sizes = plan.sizes_of(config(mode=mode, layout=layout, quantize=True, combine_dtype=torch.float8_e4m3fn))
    regions, shape = abi.region_map(sizes.shape), sizes.shape
    slots = {name: shape.combine_slots if name.startswith("home") else shape.dispatch_slots for name in abi.ARRAYS}
    end = len(abi.FLAGS) * shape.size * 8
    for name in abi.ARRAYS:
        first = getattr(regions, name)
        assert first >= end, name
        assert first % abi.ALIGN == 0
        end = first + slots[name] * getattr(regions, f"{name}_stride")
    assert regions.num_bytes >= end


def test_map_is_equal_on_all_ranks() -> None:
    for changes in ({"num_experts": 13, "topk": 3}, {"num_experts": 3, "topk": 2}):
        for layout in Layout:
            maps = {bytes(abi.region_map(plan.sizes_of(config(r, layout=layout, **changes)).shape)) for r in range(8)}
            assert len(maps) == 1


def test_slots_follow_what_may_be_open() -> None:
    for flight in (1, 2, 5):
        assert plan.sizes_of(config(max_in_flight=flight)).shape.dispatch_slots == flight + 1
        assert plan.sizes_of(config(max_in_flight=flight, mode=Mode.HT)).shape.dispatch_slots == flight


@pytest.mark.parametrize("tokens", [1, 8, 128, 4096])
@pytest.mark.parametrize(
    ("hidden", "quantize"),  # fp8 rows are multiples of 16 bytes, so 2056 columns are not quantised
    [(h, q) for h in (16, 2056, 2880, 7168, 16384) for q in (False, True) if not (q and h % 16)],
)
def test_launches_fit(tokens: int, hidden: int, quantize: bool) -> None:
    c = config(max_tokens_per_rank=tokens, hidden_size=hidden, quantize=quantize)
    sizes = plan.sizes_of(c)
    for mode in (Mode.LL, Mode.HT):
        for launch in (plan.dispatch_launch(c, sizes, mode, 132), plan.combine_launch(c, sizes, mode, 132)):
            assert 1 <= launch.num_blocks <= 132
            assert launch.shared_bytes <= plan.SHARED_BYTES
            assert launch.piece_bytes % plan.PIECE_UNIT == 0
            assert launch.piece_bytes <= plan.MAX_PIECE
            stages = plan.WARPS * jit.NUM_STAGES * (launch.piece_bytes + plan.STAGE_EXTRA)
            assert launch.stage_offset + stages == launch.shared_bytes
            assert launch.work(3).halves == 3


def test_crossover_is_known_for_every_layout() -> None:
    assert plan.LL_MAX_TOKENS.keys() == set(Layout)


def test_more_ranks_than_a_mask_are_refused() -> None:
    plan.sizes_of(config(size=plan.MAX_RANKS))
    with pytest.raises(ConfigError, match="group: expected at most 252 ranks"):
        plan.sizes_of(config(size=plan.MAX_RANKS + 1))


def test_too_many_experts_are_refused() -> None:
    c = config(num_experts=1 << 16)
    with pytest.raises(ConfigError, match="num_experts"):
        plan.dispatch_launch(c, plan.sizes_of(c), Mode.LL, 132)


def test_header_is_what_ctypes_says() -> None:
    text = abi.header()
    for record in (abi.State, abi.World, abi.DispatchArgs, abi.CombineArgs):
        assert f"static_assert(sizeof({record.__name__}) == {ctypes.sizeof(record)}" in text
        for field, _ in record._fields_:
            assert f" {field}" in text


def test_fingerprint_follows_sources() -> None:
    assert abi.fingerprint("a") != abi.fingerprint("b")
    assert len(abi.fingerprint("a")) == 16
