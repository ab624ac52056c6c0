"""Two hosts of two ranks on one GPU, real proxies and TCP between them: every layout and payload against the reference,
graphs, faults, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import reference
from ep_kernels.transports.base import CombineArgs
from ep_kernels.types import Layout, Mode, Overflow, ScaleFormat
from tests.cases import RoutingCase, cases, draw_seed, replicated
from tests.compare import expert, same_bits
from tests.gpu import loopback_network as network
from tests.gpu.loopback import BOTH, Gpu
from tests.gpu.loopback_check import check
from tests.gpu.loopback_network import SHUFFLED, TCP, Joined

pytestmark = pytest.mark.gpu(1)
SPLIT = (1, 2)
FP8 = torch.float8_e4m3fn
MODES = [Mode.LL, Mode.HT]
WAYS = [(layout, False) for layout in Layout] + [(Layout.EXPERT_MAJOR, True), (Layout.GROUPED, True)]
"""Layouts, and whether combine is exact."""


@pytest.fixture
def join() -> Iterator[Joined]:
    joined = Joined()
    yield joined
    joined.close()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [*MODES, Mode.AUTO])
@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (3, 3), (5, 2), (2, 1)])
def test_routing(size: int, nodes: int, mode: Mode, layout: Layout, join: Joined) -> None:
    """Hosts of equal size, of one rank each, of unequal size; a network that nobody needs."""
    steps = cases(size, 9, hidden_size=136, num_experts=2 * size + 1, topk=3)
    loop = join(steps[0], nodes, mode=mode, layout=layout)
    for number, case in enumerate(steps):
        check(loop, case, mode if mode is not Mode.AUTO else MODES[number % 2])


@pytest.mark.parametrize("phases", [(BOTH,), SPLIT])
@pytest.mark.parametrize("layout", list(Layout))
def test_messages_in_any_order(layout: Layout, phases: tuple[int, ...], join: Joined) -> None:
    """A provider that delays and reorders, two lanes, launches in two halves, weights of the backward pass."""
    steps = cases(4, 6, hidden_size=64, num_experts=7, topk=4)
    loop = join(steps[0], mode=Mode.LL, layout=layout, network=SHUFFLED)
    for case in steps:
        check(loop, case, Mode.LL, phases=phases)
        check(loop, case, Mode.LL, phases=phases, backward=True)


PAYLOADS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "fp8": {"quantize": True},
    "fp8 packed": {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "given fp8": {"dtype": FP8, "scale_columns": 3},
    "given mxfp8": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
    "fp8 both ways": {"quantize": True, "combine_dtype": FP8},
    "mxfp8": {"quantize": "mxfp8"},
    "nvfp4": {"quantize": "nvfp4"},
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", MODES)
def test_payloads(mode: Mode, layout: Layout, payload: str, join: Joined) -> None:
    kinds = ("uniform", "single_none", "one_expert")
    hidden = 2880 if payload == "nvfp4" else 272
    steps = [RoutingCase(7, 3, hidden, (5, 0, 6, 1), kind, draw_seed(), max_tokens=6) for kind in kinds]
    loop = join(steps[0], mode=mode, layout=layout, **PAYLOADS[payload])
    for case in steps:
        check(loop, case, mode)


@pytest.mark.parametrize("hidden", [2056, 2880, 7168])
def test_many_wide_rows(hidden: int, join: Joined) -> None:
    """HT's steps; boxes of many stripes on several lanes."""
    case = RoutingCase(16, 8, hidden, (700, 0, 513, 1), "uniform", draw_seed(), max_tokens=700)
    for config in (TCP, replace_lanes(4)):
        loop = join(case, mode=Mode.HT, layout=Layout.GROUPED, network=config)
        for _ in range(3):
            check(loop, replace(case, seed=draw_seed()), Mode.HT)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.GROUPED])
def test_an_exact_combine(layout: Layout, lanes: int, join: Joined) -> None:
    network.exact_rows(layout, join, network=replace_lanes(lanes))
    network.exact_rows(layout, join, network=SHUFFLED, overflow=Overflow.DROP, max_recv_rows=4)


@pytest.mark.parametrize("payload", [{}, {"quantize": True}, {"dtype": torch.float32}])
def test_many_rows_of_an_exact_combine(payload: dict[str, Any], join: Joined) -> None:
    """In slices."""
    case = RoutingCase(16, 8, 2048, (128, 0, 97, 1), "uniform", draw_seed(), max_tokens=128)
    loop = join(case, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True, **payload)
    assert loop.remotes[0].record().slice_rows[1]
    for kind in ("uniform", "repeated"):
        check(loop, replace(case, kind=kind, seed=draw_seed()), Mode.LL)


def replace_lanes(lanes: int) -> Any:
    return type(TCP)(listen=TCP.listen, advertise=TCP.advertise, lanes=lanes)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.FLAT])
def test_replicas_and_overflow(layout: Layout, join: Joined) -> None:
    for plain in cases(4, 7, hidden_size=64, num_experts=6, topk=4)[:3]:
        case = replace(plain, experts=replicated(4, 6, 5, draw_seed()))
        check(join(case, mode=Mode.LL, layout=layout), case, Mode.LL)
    case = RoutingCase(4, 3, 64, (6, 1, 6, 2), "uniform", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=layout, overflow=Overflow.DROP, max_recv_rows=4)
    check(loop, case, Mode.LL)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", list(Layout))
def test_handles_are_used_again(layout: Layout, mode: Mode, join: Joined) -> None:
    network.handles_are_used_again(layout, mode, join)


@pytest.mark.parametrize(("layout", "exact"), WAYS)
def test_different_routings_break_nothing(layout: Layout, exact: bool, join: Joined) -> None:
    network.different_routings_break_nothing(layout, Mode.LL, join, exact)


@pytest.mark.parametrize("op", ["dispatch", "combine", "barrier", "credit"])
def test_silence_is_named(op: str, join: Joined) -> None:
    network.silence_is_named(op, join)


def test_a_full_ring_is_survived(join: Joined) -> None:
    network.a_full_ring_is_survived(join)


def test_ends_of_a_connection(join: Joined) -> None:
    network.ends_of_a_connection(join)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_wakes(op: str, layout: Layout) -> None:
    network.a_rank_wakes(op, layout, None)


@pytest.mark.parametrize(("layout", "exact"), WAYS)
def test_bytes_are_those_of_theory(layout: Layout, exact: bool, join: Joined) -> None:
    network.bytes_are_those_of_theory(layout, join, exact)


def test_many_steps(join: Joined) -> None:
    """More descriptors than the ring has, so that laps end; the low bits of seq wrap."""
    case = RoutingCase(9, 3, 64, (5, 0, 6, 2), "uniform", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=Layout.RANK_MAJOR)
    loop.preset((1 << 18) - 100)
    for _ in range(400):
        check(loop, replace(case, seed=draw_seed()), Mode.LL)


@pytest.mark.parametrize(
    ("layout", "exact"), [(Layout.EXPERT_MAJOR, False), (Layout.RANK_MAJOR, False), (Layout.EXPERT_MAJOR, True)]
)
def test_replayed_graphs(layout: Layout, exact: bool, join: Joined) -> None:
    """Kernels push by themselves: a replay needs nothing of the host. New rows in the same places each time."""
    case = RoutingCase(9, 3, 272, (5, 0, 6, 2), "uniform", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=layout, exact_combine=exact)
    check(loop, case, Mode.LL)  # compiled and loaded
    machine = loop._machine
    assert isinstance(machine, Gpu)
    ranks = range(4)
    xs = [loop.put(case.x(r, torch.bfloat16)) for r in ranks]
    ids, weights = [case.topk_ids(r) for r in ranks], [case.topk_weights(r) for r in ranks]
    steps = loop.begin(xs, ids, weights, Mode.LL)
    for step, x in zip(steps, xs, strict=True):
        step.call.args.x = x.data_ptr()
    results = loop.finish(steps)
    ys = [torch.zeros_like(out.tokens) for out, _ in results]
    calls, zs = [], []
    for rank, engine in enumerate(loop.engines):
        call, receive = engine.combine(CombineArgs(ys[rank], results[rank][1], None, True))
        zs.append(receive(None)[0])
        calls.append(call)
    packed = [loop.pack([s.call for s in steps]), loop.pack(calls)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        machine.enqueue(steps[0].call, *packed[0])
        for (out, _), y in zip(results, ys, strict=True):
            y.copy_(expert(out, torch.bfloat16))
        machine.enqueue(calls[0], *packed[1])
    for _ in range(20):
        fresh = replace(case, seed=draw_seed())
        for r in ranks:
            xs[r].copy_(fresh.x(r, torch.bfloat16))
        graph.replay()
        torch.cuda.synchronize()
        loop.check()
        wanted, routed = reference.dispatch(loop.configs[0], [x.cpu() for x in xs], ids, weights)
        want = reference.combine(routed, [expert(out, torch.bfloat16) for out in wanted])[0]
        for r in ranks:
            same_bits(zs[r], want[r], f"z of rank {r}")
