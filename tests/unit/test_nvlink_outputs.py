"""What a dispatch hands out, and where the kernel is told to write it: checked on the CPU, tensors are tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from ep_kernels import reference
from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.lazy_output import lazy_output
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.outputs import Outputs
from ep_kernels.types import DispatchOutput, Layout, Mode, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.compare import packed_layout
from tests.gpu.loopback_group import LoopGroup

CPU = torch.device("cpu")
FIELDS = [field.name for field in dataclasses.fields(DispatchOutput)]
PAYLOADS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantize": True},
    "packed": {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "given": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
}


class Bytes:
    """A region in ordinary memory."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.data[offset : offset + num_bytes].view(dtype).view(shape)


def delivered(
    outputs: Outputs, block: torch.Tensor, slot: int, scales: torch.Tensor | None, num_tokens: int, num_rows: int
) -> DispatchOutput:
    """Of a dispatch of `num_tokens` tokens: `num_rows` rows (compact layouts) or all."""
    rows = outputs.slot_rows(slot)
    return lazy_output(lambda name: outputs.field(name, block, rows, scales, num_tokens, num_rows))


def config_of(case: RoutingCase, layout: Layout, **overrides: Any) -> MoEConfig:
    return case.config(LoopGroup(1, case.num_ranks), mode=Mode.AUTO, layout=layout, **overrides)


@pytest.mark.parametrize("exact_shapes", [True, False])
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("layout", list(Layout))
def test_as_the_reference_has_them(layout: Layout, payload: str, exact_shapes: bool) -> None:
    """Same fields, shapes and dtypes; every address is its tensor's; scales have the strides that were promised."""
    case = RoutingCase(7, 3, 272, (5, 0, 6), "uniform", draw_seed(), max_tokens=6)
    config = config_of(case, layout, exact_shapes=exact_shapes, **PAYLOADS[payload])
    xs = [case.x(r, config.dtype) for r in range(3)]
    scales = [case.scales(r, 9, torch.uint8) for r in range(3)] if config.scale_columns else None
    ids, weights = [case.topk_ids(r) for r in range(3)], [case.topk_weights(r) for r in range(3)]
    want = reference.dispatch(config, xs, ids, weights, scales=scales)[0][1]
    sizes = plan.sizes_of(config)
    outputs = Outputs(config, sizes, CPU)
    region = Bytes(abi.region_map(sizes.shape).num_bytes)
    outputs.attach(region)
    block = torch.zeros(outputs.num_bytes, dtype=torch.uint8)
    made, _ = outputs.scales(1, trimmed=exact_shapes)
    num_rows = want.tokens.shape[0] if outputs.compact else 0
    got = delivered(outputs, block, 1, made, case.tokens[1], num_rows)
    outputs.attach(None)  # what was handed out stays good
    for name in FIELDS:
        tensor, expected = getattr(got, name), getattr(want, name)
        assert (tensor is None) == (expected is None), name
        if isinstance(tensor, torch.Tensor):
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
            if name in outputs.places and tensor.numel():
                assert tensor.data_ptr() == block.data_ptr() + outputs.places[name].offset, name
        assert getattr(got, name) is tensor, f"{name}: made once"
    its_scales = got.scales
    if payload == "packed":
        assert its_scales is not None
        packed_layout(its_scales)


@pytest.mark.parametrize("layout", list(Layout))
def test_slots_are_apart(layout: Layout) -> None:
    case = RoutingCase(4, 2, 64, (3, 3), max_tokens=3)
    config = config_of(case, layout)
    sizes = plan.sizes_of(config)
    outputs = Outputs(config, sizes, CPU)
    region = Bytes(abi.region_map(sizes.shape).num_bytes)
    outputs.attach(region)
    slots = [outputs.slot_rows(slot) for slot in range(sizes.shape.dispatch_slots)]
    for slot, tokens in enumerate(slots):
        tokens.fill_(slot + 1)
    for slot, tokens in enumerate(slots):
        assert bool((tokens == slot + 1).all())
        assert outputs.slot_rows(slot).data_ptr() == tokens.data_ptr()
    outputs.attach(None)
    with pytest.raises(AssertionError):
        outputs.slot_rows(0)


@pytest.mark.parametrize("topk", [1, 3, 8])
@pytest.mark.parametrize("layout", list(Layout))
def test_parts_of_a_routing_do_not_overlap(layout: Layout, topk: int) -> None:
    case = RoutingCase(9, topk, 64, (5, 2, 0), max_tokens=5)
    config = config_of(case, layout)
    sizes = plan.sizes_of(config)
    where = plan.state_map(config, sizes)
    positions = 3 * 5
    ends = [
        (where.routes, 5 * topk * ctypes.sizeof(abi.Route)), (where.dst_rows, positions * topk * 4),
        (where.tokens, positions * 4), (where.source_rows, 3 * 4), (where.saved_counts, (2 * sizes.num_groups + 3) * 4),
        (where.routing_bytes, 0),
    ]  # fmt: skip
    for (start, num_bytes), (following, _) in itertools.pairwise(ends):
        assert start % 16 == 0
        assert start + num_bytes <= following
    assert where.weights == abi.OP_WORDS * 8
    assert where.carried_bytes == where.weights + positions * topk * 4


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.FLAT])
def test_packed_scales_lie_where_the_kernel_is_told(layout: Layout) -> None:
    """Exact shapes that nobody reads, as under graph capture: all rows are handed out, and the kernel packs for all."""
    config = config_of(RoutingCase(7, 3, 272, (5, 0, 6), max_tokens=6), layout, exact_shapes=True, **PAYLOADS["packed"])
    sizes = plan.sizes_of(config)
    outputs = Outputs(config, sizes, CPU)
    outputs.attach(Bytes(abi.region_map(sizes.shape).num_bytes))
    made, strides = outputs.scales(0, trimmed=False)
    scales = outputs.all_scales(made)
    assert scales is not None
    assert strides.column == scales.stride(1) > 0
    assert outputs.scales(0, trimmed=True)[1].column == 0


def test_fields_come_late_and_can_be_replaced() -> None:
    config = config_of(RoutingCase(4, 2, 64, (3, 3), max_tokens=3), Layout.FLAT)
    outputs = Outputs(config, plan.sizes_of(config), CPU)
    outputs.attach(Bytes(abi.region_map(plan.sizes_of(config).shape).num_bytes))
    block = torch.zeros(outputs.num_bytes, dtype=torch.uint8)
    out = delivered(outputs, block, 0, None, 2, 1)
    counts, weights = out.counts, torch.ones(1, 2)
    other = dataclasses.replace(out, topk_weights=weights)
    assert (other.counts is counts, other.topk_weights is weights, other.valid.shape) == (True, True, (2,))
    with pytest.raises(AttributeError):
        _ = out.no_such_field
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.counts = counts  # type: ignore[misc]


def test_numbers_lie_apart() -> None:
    for layout in Layout:
        config = config_of(RoutingCase(7, 3, 272, (5, 0, 6), max_tokens=6), layout)
        outputs = Outputs(config, plan.sizes_of(config), CPU)
        end = 0
        for place in outputs.places.values():
            assert place.offset == end
            assert place.offset % place.dtype.itemsize == 0
            end += torch.Size(place.shape).numel() * place.dtype.itemsize
        assert end <= outputs.num_bytes


def test_rows_first_seen_in_inference_mode_are_no_inference_tensors() -> None:
    """The view of a slot is kept: a program that validates before it trains gets it again outside of the mode."""
    config = config_of(RoutingCase(7, 3, 272, (5, 0, 6), "uniform", draw_seed(), max_tokens=6), Layout.FLAT)
    sizes = plan.sizes_of(config)
    outputs = Outputs(config, sizes, CPU)
    outputs.attach(Bytes(abi.region_map(sizes.shape).num_bytes))
    with torch.inference_mode():
        outputs.slot_rows(0)
    block = torch.zeros(outputs.num_bytes, dtype=torch.uint8)
    assert not delivered(outputs, block, 0, None, 5, 4).tokens.is_inference()
