"""Records and states of the `cpu` transport, which are written as words: each word is where its field is."""

from __future__ import annotations

import ctypes
from dataclasses import fields

import pytest
import torch

from ep_kernels import MoECommunicator
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.cpu_routing import FreshState, RoutingState, StatePlaces
from ep_kernels.types import CombineOrder, Layout
from tests.cases import RoutingCase
from tests.groups import LonelyGroup

ROUTING = ("dest", "weights", "rows", "row_weights", "source_tokens", "source_dest", "origin", "tokens", "mode")


def words(record: ctypes.Structure, names: tuple[str, ...]) -> list[int]:
    return [getattr(record, name) for name in names]


def test_a_dispatch_has_each_word_in_its_place() -> None:
    op = native.dispatch_op(range(1, 8), (8, 1), range(9, 13), (1, 0, 1), range(13, 20), (21, 22, 23))
    assert words(op.routing, ROUTING) == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    given = ("x", "scales", "ids", "weights", "fresh", "exact_shapes", "wide_ids", "pad")
    assert words(op, given) == [9, 10, 11, 12, 1, 0, 1, 0]
    outs = ("valid", "tokens", "out_scales", "out_ids", "out_weights", "counts", "offsets")
    assert words(op, outs) == list(range(13, 20))
    assert words(op, ("num_rows", "num_dropped", "num_invalid", "packed_stride")) == [21, 22, 23, 0]
    assert not any(words(op, ("seq", "start_ns", "send_ns", "receive_ns")))
    assert native.DispatchOp.packed_stride.offset + 4 == ctypes.sizeof(op) == native._OF_DISPATCH.size


def test_a_combine_has_each_word_in_its_place() -> None:
    op = native.combine_op(range(1, 8), (8, 1), (9, 10), (-1, 1), (12, 13, 2))
    assert words(op.routing, ROUTING) == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert words(op, ("y", "row_weights", "outputs_slot", "apply_weights")) == [9, 10, -1, 1]
    assert words(op, ("z", "z_weights", "z_type")) == [12, 13, 2]
    assert (op.to_collect, native.CombineOp.to_collect.offset + 4) == (0, ctypes.sizeof(op))
    assert ctypes.sizeof(op) == native._OF_COMBINE.size


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_state_in_one_allocation_is_as_one_in_nine(layout: Layout, tokens: int, collects: bool) -> None:
    """The same shapes and dtypes, addresses of its tensors, and no word twice."""
    case = RoutingCase(6, 3, 64, (5,), max_tokens=5)
    over_hosts = {"network": NetworkConfig(listen="127.0.0.1:0"), "combine_order": CombineOrder.DOMAIN}
    options = over_hosts if collects else {}
    with MoECommunicator(case.config(LonelyGroup(), transport="cpu", layout=layout, **options)) as comm:
        geometry = comm._transport.geometry  # type: ignore[attr-defined]
        places = StatePlaces(geometry)
        state, other = FreshState(places, tokens), places.apart(tokens)
        names = [f.name for f in fields(RoutingState) if f.name not in ("totals", "origin")]
        state.block.zero_()
        for number, name in enumerate(names, 1):
            mine, theirs = getattr(state, name), getattr(other, name)
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
            mine.fill_(number)
        for number, name in enumerate(names, 1):
            mine = getattr(state, name)
            assert bool((mine == torch.tensor(number, dtype=mine.dtype)).all()), name
        order = ["dest", "weights", "rows", "row_weights", "source_tokens", "source_dest", "counts", "offsets", "valid"]
        filled = [(name, at) for name, at in zip(order, state.addresses(), strict=True) if getattr(state, name).numel()]
        assert all(getattr(state, name).data_ptr() == at for name, at in filled)
        assert (state.totals, state.origin) == (other.totals, other.origin)
