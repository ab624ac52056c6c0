"""What kernels say when something is wrong, many ranks on one GPU: silent peers by phase, ranks that were left out,
ranks that mean different routings, latency records."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.engine import BOTH, RECEIVE, SEND, Call
from ep_kernels.types import DispatchHandle, Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.gpu.loopback import Loopback
from tests.gpu.loopback_check import check, check_what_a_stop_left, combine_of, hear

pytestmark = pytest.mark.gpu(1)
PATIENCE_S = 0.2
LL_HT = [Mode.LL, Mode.HT]
SKEW_NS = 100_000
"""Blocks of one launch do not begin at the same moment: a record's start is one block's, its waits are another's."""


def pair(mode: Mode, layout: Layout | None = None, **overrides: object) -> tuple[Loopback, RoutingCase]:
    """Two ranks that send to each other, with a short deadline."""
    case = RoutingCase(4, 4, 64, (4, 3), "uniform", draw_seed(), max_tokens=4)
    fields = {"mode": mode, "layout": layout, "timeout_s": PATIENCE_S, **overrides}
    return Loopback(lambda group: case.config(group, **fields), 2, 4), case


def dispatch_of(
    loop: Loopback, case: RoutingCase, mode: Mode, previous: list[DispatchHandle] | None = None
) -> list[Call]:
    ranks = range(loop.size)
    xs = [case.x(r, torch.bfloat16) for r in ranks]
    ids, weights = [case.topk_ids(r) for r in ranks], [case.topk_weights(r) for r in ranks]
    return [step.call for step in loop.begin(xs, ids, weights, mode, previous=previous)]


def payload_of_a_dispatch(mode: Mode) -> Loopback:
    """Both have sent, but of the peer's rows the last to come never does."""
    loop, case = pair(mode)
    calls = dispatch_of(loop, case, mode)
    loop.launch(calls, SEND)
    engine, region = loop.engines[0], loop.memory[0].data
    if mode is Mode.HT:
        region[: engine.tables.world.map.counts].view(torch.int64).view(-1, 2)[abi.FLAGS.index("PAYLOAD"), 1] = 0
    else:
        shape, lines = engine.sizes.shape, int(engine.tables.world.map.row_lines)
        row = (shape.ll_tokens + case.tokens[1] - 1) * shape.row_packets
        region[lines + row * abi.PACKET_BYTES :][: abi.PACKET_BYTES] = 0
    loop.launch(calls[:1], RECEIVE)
    return loop


def counts_of_a_dispatch(mode: Mode) -> Loopback:
    loop, case = pair(mode)
    loop.launch(dispatch_of(loop, case, mode)[:1])
    return loop


def credit_of_a_dispatch(mode: Mode) -> Loopback:
    """The peer has gone on for one operation and no further: its slot may still be read."""
    loop, case = pair(mode, max_in_flight=1)
    handles = check(loop, case, mode)
    if mode is Mode.HT:  # with counts to await, these come first; a routing used again has none
        loop.launch(dispatch_of(loop, case, mode, handles)[:1], SEND)
    for _ in range(2 if mode is Mode.LL else 0):
        loop.launch(dispatch_of(loop, case, mode)[:1], SEND)
    return loop


def payload_of_a_combine(mode: Mode) -> Loopback:
    loop, case = pair(mode)
    loop.launch(combine_of(loop, check(loop, case, mode))[:1])
    return loop


def credit_of_a_combine(mode: Mode) -> Loopback:
    loop, case = pair(mode, max_in_flight=1)
    handles = check(loop, case, mode)
    for _ in range(3):
        loop.launch(combine_of(loop, handles)[:1], SEND)
    return loop


def barrier(mode: Mode) -> Loopback:
    loop, _ = pair(mode)
    loop.launch([loop.engines[0].barrier()])
    return loop


def blocks_of_a_dispatch(mode: Mode) -> Loopback:
    loop, case = pair(Mode.HT)
    loop.launch(dispatch_of(loop, case, Mode.HT)[:1], missing_blocks=1)
    return loop


STORIES: dict[str, Callable[[Mode], Loopback]] = {
    "dispatch payload": payload_of_a_dispatch,
    "dispatch counts": counts_of_a_dispatch,
    "dispatch credit": credit_of_a_dispatch,
    "combine payload": payload_of_a_combine,
    "combine credit": credit_of_a_combine,
    "barrier barrier": barrier,
    "dispatch blocks": blocks_of_a_dispatch,
}


@pytest.mark.parametrize("mode", LL_HT)
@pytest.mark.parametrize("what", STORIES)
def test_silence_is_named(what: str, mode: Mode) -> None:
    """Operation, phase and peer of the wait that passed its deadline; later operations end at once."""
    loop = STORIES[what](mode)
    found = loop.engines[0].tables.host.fault()
    assert isinstance(found, PeerTimeout), found
    assert f"{found.op} {found.phase}" == what
    assert found.peer == (0 if found.phase == "blocks" else 1)
    assert not found.gone
    assert found.block is not None
    assert found.seen < found.expected < 10, "in operations"
    assert PATIENCE_S <= found.waited_s < 2 * PATIENCE_S
    loop.launch([loop.engines[0].barrier()])  # compiled and loaded
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    loop.launch([loop.engines[0].barrier()])
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) < PATIENCE_S * 500
    assert str(loop.engines[0].tables.host.fault()) == str(found), "the first one stays"


@pytest.mark.parametrize("mode", LL_HT)
def test_host_and_dead_peers_end_a_wait(mode: Mode) -> None:
    loop, case = pair(mode, timeout_s=20.0)
    host = loop.engines[0].tables.host
    host.give_up(1)
    loop.launch(dispatch_of(loop, case, mode)[:1])
    for gone in (False, True):
        found = host.fault()
        assert isinstance(found, PeerTimeout)
        assert (found.peer, found.gone, found.given_up) == (1, gone, not gone)
        host.mark_gone(1)
    loop, case = pair(mode, timeout_s=20.0)
    loop.engines[0].tables.host.abort("for a test")
    loop.launch(dispatch_of(loop, case, mode)[:1])
    assert isinstance(loop.engines[0].tables.host.fault(), AbortedError)


@pytest.mark.parametrize("mode", LL_HT)
def test_left_out_ranks_hear_of_it(mode: Mode) -> None:
    """Long before the deadline, by name and epoch; after a restart all go on together."""
    loop, case = pair(mode, timeout_s=20.0)
    handles = check(loop, case, mode)
    other = loop.engines[1]
    other.tables.set_active([False, True])
    loop.launch([other.barrier(left_out_epoch=7)])
    for calls, op in (
        (dispatch_of(loop, case, mode), "dispatch"),
        (combine_of(loop, handles), "combine"),
        ([e.barrier() for e in loop.engines], "barrier"),
    ):
        loop.launch(calls[:1])
        said = loop.engines[0].tables.host.fault()
        assert type(said) is TransportError
        assert str(said) == f"{op}: rank 1 has gone on in epoch 7 without this rank"
        loop.engines[0].tables.restart(*loop.engines[0].tables.sequence())
    other.tables.set_active([True, True])
    loop.preset(50)
    check(loop, case, mode)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", LL_HT)
@pytest.mark.parametrize("size", [2, 3, 40])
@pytest.mark.parametrize("odd", ["another handle", "no handle"])
def test_different_routings_break_nothing(odd: str, size: int, mode: Mode, layout: Layout) -> None:
    """Every rank hears who brought what; nothing looks delivered; old handles stay good."""
    tokens = tuple((5 * r + 3) % 8 for r in range(size))
    case = RoutingCase(2 * size + 1, 4, 64, tokens, "uniform", draw_seed(), max_tokens=8)
    loop = Loopback(lambda group: case.config(group, mode=Mode.AUTO, layout=layout), size, 3)
    rest = replace(case, seed=draw_seed())
    mine, theirs = check(loop, case, mode), check(loop, rest, mode)
    brought: list[DispatchHandle | None] = [*mine[:-1], None if odd == "no handle" else theirs[-1]]
    xs = [case.x(r, torch.bfloat16) for r in range(size)]
    ids, weights = [case.topk_ids(r) for r in range(size)], [case.topk_weights(r) for r in range(size)]
    steps = loop.begin(xs, ids, weights, mode, previous=brought)
    loop.launch([s.call for s in steps])
    hear(loop, "dispatch")
    for engine, step in zip(loop.engines, steps, strict=True):
        assert not engine.number(step, "counts").any()
        assert int(engine.number(step, "num_rows")) == 0
    calls = combine_of(loop, [*mine[:-1], theirs[-1]])
    loop.launch(calls)
    hear(loop, "combine")
    for call in calls:
        z = call.keep[-2]
        assert bool(z.isnan().all())
    for number in range(4):
        check(loop, replace(case, seed=draw_seed()), LL_HT[number % 2])
    check(loop, case, mode, again=replace(case, seed=draw_seed()), previous=mine)


@pytest.mark.parametrize("left", [0x7F, 0x00, None])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", LL_HT)
@pytest.mark.parametrize(("size", "phases"), [(2, (BOTH,)), (2, (SEND, RECEIVE)), (40, (BOTH,))])
def test_what_a_stopped_dispatch_left_is_not_believed(
    size: int, mode: Mode, layout: Layout, left: int | None, phases: tuple[int, ...]
) -> None:
    """Its routing was never written, and its memory holds anything (`left` in each byte; None: noise). Brought again by
    ranks whose abort word is set, it delivers nothing, and nothing is written but the operation's own outputs."""
    tokens = tuple((5 * r + 3) % 8 for r in range(size))
    case = RoutingCase(2 * size + 1, 4, 64, tokens, "uniform", draw_seed(), max_tokens=8)
    loop = Loopback(lambda group: case.config(group, mode=mode, layout=layout, timeout_s=PATIENCE_S), size, 3)
    begin = time.monotonic()
    check_what_a_stop_left(loop, case, mode, left, phases)
    assert time.monotonic() - begin < 10.0, "counts of rows that cannot be are not counted up to"


@pytest.mark.parametrize("phases", [(BOTH,), (1, 2)])
@pytest.mark.parametrize("mode", LL_HT)
def test_records_cover_the_operation(mode: Mode, phases: tuple[int, ...]) -> None:
    """One record per operation and rank, whatever the number of blocks; its parts lie within its whole."""
    case = RoutingCase(9, 4, 2048, (40, 3, 0), "uniform", draw_seed(), max_tokens=40)
    loop = Loopback(lambda group: case.config(group, mode=mode), 3, 20)
    for engine in loop.engines:
        engine.tables.samples()
    for number in range(5):
        check(loop, replace(case, seed=draw_seed()), mode, phases)
        for rank, engine in enumerate(loop.engines):
            samples = engine.tables.samples()
            assert [s.op for s in samples] == ["dispatch", "combine"]
            for s in samples:
                assert s.seq == number + 1
                assert s.tokens == case.tokens[rank]
                assert 0 <= s.send_ns <= s.total_ns < 1e9
                assert s.peer_wait_ns[rank] == 0
                if phases == (BOTH,):
                    assert max(s.peer_wait_ns) <= s.total_ns + SKEW_NS


@pytest.mark.parametrize("mode", LL_HT)
def test_records_go_on_after_a_loss(mode: Mode) -> None:
    """What was broken off may have a record, as far as its blocks came; what follows the restart has its own."""
    loop, case = pair(mode)
    check(loop, case, mode)
    for engine in loop.engines:
        assert [(s.op, s.seq) for s in engine.tables.samples()] == [("dispatch", 1), ("combine", 1)]
    loop.launch(dispatch_of(loop, case, mode)[:1])
    assert isinstance(loop.engines[0].tables.host.fault(), PeerTimeout)
    loop.preset(50)
    check(loop, replace(case, seed=draw_seed()), mode)
    for rank, engine in enumerate(loop.engines):
        told = [(s.op, s.seq) for s in engine.tables.samples()]
        assert told[-2:] == [("dispatch", 51), ("combine", 51)], rank
        assert told[:-2] in (([], [("dispatch", 2)]) if rank == 0 else ([],)), rank


AGES = 2_000_000_000
"""Clock cycles: a second or more."""


@pytest.mark.parametrize("mode", LL_HT)
def test_records_are_read_beside_whatever_runs(mode: Mode) -> None:
    """The stream of the operations is busy, any other may be; from any thread."""
    loop, case = pair(mode)
    check(loop, case, mode)
    done, another = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(another):
        torch.cuda._sleep(AGES)
    torch.cuda._sleep(AGES)
    done.record()
    here = loop.engines[0].tables.samples()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(loop.engines[1].tables.samples).result()
    assert not done.query()
    assert [[s.op for s in found] for found in (here, there)] == [["dispatch", "combine"]] * 2
    torch.cuda.synchronize()
    assert loop.engines[0].tables.samples() == []


def test_records_are_read_while_a_graph_is_captured() -> None:
    """By the thread that captures and by another; the capture is none the worse."""
    loop, case = pair(Mode.LL)
    check(loop, case, Mode.LL)
    x, graph = torch.zeros(5, device="cuda"), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        x += 1
        here = loop.engines[0].tables.samples()
        there = pool.submit(loop.engines[1].tables.samples).result()
        x += 1
    assert len(here) == len(there) == 2
    graph.replay()
    assert bool((x == 2).all())
