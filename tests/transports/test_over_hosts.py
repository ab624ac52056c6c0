"""A short form of the contract over several hosts, part of every run; `make test-hosts` has all of it.

Most of it over two hosts with a network that delays and reorders, the rest over plain TCP with a host for each rank.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_kernels.errors import AbortedError, PeerTimeout
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.cpu import transport as cpu_transport
from ep_kernels.transports.cpu.native import SENT_KINDS, Sent
from ep_kernels.types import Layout, Mode, ScaleFormat
from tests.cases import RoutingCase, cases, draw_seed
from tests.hosts import SHORT
from tests.transports import calls, deep_ep_steps, faults, forks, gradients, lives, sleepers
from tests.transports.faults import SLACK_S, silent_case
from tests.transports.steps import (
    Place,
    check_combine,
    check_dispatch,
    check_step,
    next_case,
    run_cases,
    run_story,
    start,
)
from tests.transports.test_contract_calls import case_of
from tests.worlds import RankDied, World

Worlds = Callable[[int], World]
(SHUFFLE,) = SHORT
TCP = "cpu-tcp-each"
FP8 = torch.float8_e4m3fn
MODES: dict[str, dict[str, Any]] = {
    "ll": {"mode": Mode.LL},
    "ht": {"mode": Mode.HT},
    "auto": {"mode": Mode.AUTO, "ll_max_tokens": 4},
}
PAYLOADS: list[dict[str, Any]] = [
    {"quantize": True, "combine_dtype": FP8},
    {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    {"quantize": "mxfp8"},
    {"quantize": "nvfp4"},
    {"exact_combine": True},
    {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_routing(world: Worlds, mode: str, layout: Layout) -> None:
    turns = (0, 9, None, 3) if mode == "auto" else (None,)
    steps = cases(4, 9, hidden_size=136, num_experts=9, topk=3)
    world(4).run(run_cases, SHUFFLE, steps, {"layout": layout, **MODES[mode]}, turns)


@pytest.mark.parametrize("payload", PAYLOADS, ids="-".join)
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_payloads(world: Worlds, mode: Mode, payload: dict[str, Any]) -> None:
    kinds = ("uniform", "single_none", "one_expert")
    hidden = 2880 if payload.get("quantize") == "nvfp4" else 272
    steps = [RoutingCase(7, 3, hidden, (5, 0, 6), kind, draw_seed(), max_tokens=6) for kind in kinds]
    overrides = {"mode": mode, "layout": Layout.GROUPED, **payload}
    world(3).run(run_cases, SHUFFLE, steps, overrides)
    world(3).run(run_cases, TCP, steps, overrides)


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.RANK_MAJOR])
def test_runs_that_take_several_lanes(world: Worlds, layout: Layout) -> None:
    """Rows of 28 KB, so that a run of tokens, and of partials, is cut at stripes and travels on all lanes."""
    steps = [RoutingCase(8, 4, 7168, (40, 7, 33), kind, draw_seed(), max_tokens=40) for kind in ("uniform", "zipf")]
    overrides = {"mode": Mode.HT, "layout": layout, "dtype": torch.float32}
    world(3).run(run_cases, "cpu-lanes-halves", steps, overrides)


MANY = (
    {"layout": Layout.GROUPED, "quantize": True},
    {"layout": Layout.FLAT, "combine_dtype": FP8},
    {"layout": Layout.GROUPED, "exact_combine": True},
)
"""What differs in chunks of rows."""


def many_chunks(hidden_size: int = 2064) -> list[RoutingCase]:
    """Rows whose bytes are no multiple of 64; of 4112 columns, more than go through the caches."""
    return [RoutingCase(7, 4, hidden_size, (700, 0, 640), kind, draw_seed()) for kind in ("uniform", "zipf")]


@pytest.mark.parametrize("fields", MANY)
def test_rows_of_many_chunks(world: Worlds, fields: dict[str, Any]) -> None:
    """Chunks of a source, and of the partials for it, come in any order."""
    steps = many_chunks(2064 if "quantize" in fields else 4112)
    world(3).run(run_cases, SHUFFLE, steps, {"mode": Mode.HT, **fields})
    world(3).run(run_cases, "cpu", steps[1:], {"mode": Mode.HT, **fields})


@pytest.mark.parametrize("zero_copy", [False, True])
def test_partials_leave_chunk_by_chunk(world: Worlds, zero_copy: bool) -> None:
    """Tokens are 700, 0 and 640; 64 rows are 256 KiB."""
    overrides = {"mode": Mode.HT, "layout": Layout.FLAT}
    sent = world(3).run(messages_of_combine, TCP, many_chunks()[0], overrides, zero_copy)
    assert sent == [10, 11 + 10, 11], "one for each chunk of the others' tokens"


def messages_of_combine(
    rank: int, size: int, store: Any, transport: str, case: RoutingCase, overrides: dict[str, Any], zero_copy: bool
) -> int:
    """Messages with rows that this rank sends for one combine."""

    def story(comm: Any, of: RoutingCase) -> int:
        counts = [(Sent * len(SENT_KINDS))() for _ in range(2)]
        request, inputs = start(comm, of)
        out, handle = request.wait()
        comm._transport.lib.cd_sent(comm._transport.comm.pointer, counts[0])
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle, zero_copy)
        comm._transport.lib.cd_sent(comm._transport.comm.pointer, counts[1])
        rows = SENT_KINDS.index("rows")
        return int(counts[1][rows].messages - counts[0][rows].messages)

    return run_story(rank, size, store, transport, story, case, overrides)  # type: ignore[no-any-return]


@pytest.mark.parametrize("over", [SHUFFLE, TCP])
def test_a_helper_thread(world: Worlds, over: str) -> None:
    """Where processors are plenty, another thread places rows of the own host."""
    for alive, gone in world(3).run(run_with_hand, over, many_chunks(), {"mode": Mode.HT, "layout": Layout.FLAT}):
        assert (alive, gone) == (1, 0)


def run_with_hand(
    rank: int, size: int, store: Any, transport: str, steps: list[RoutingCase], overrides: dict[str, Any]
) -> tuple[int, int]:
    """`run_cases`; how many helper threads there were in it, and after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_transport, "THREADS", 0)
        with Place(rank, size, store, transport).communicator(steps[0], **overrides) as comm:
            for case in steps:
                check_step(comm, case)
            alive = helpers()
        del comm
    return alive, helpers()


def test_a_helper_stops_with_its_operation(world: Worlds) -> None:
    """Connections are dropped while rows are under way."""
    assert world(3).run(run_until_dropped, many_chunks()[0]) == [0, 0, 0]


def run_until_dropped(rank: int, size: int, store: Any, case: RoutingCase) -> int:
    """Steps until one fails; how many helper threads there are after it."""
    network = NetworkConfig(
        provider="shuffle(tcp)", listen="127.0.0.1:0", domain=f"{rank}", seed=draw_seed(), drop_after=60
    )
    options = {"mode": Mode.HT, "layout": Layout.FLAT, "network": network, "timeout_s": 3.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_transport, "THREADS", 0)
        faults.lose(lambda: steps_with_hand(Place(rank, size, store, "cpu"), case, options))
    return helpers()


def steps_with_hand(place: Place, case: RoutingCase, options: dict[str, Any]) -> None:
    with place.communicator(case, **options) as comm:
        assert helpers() == 1
        for turn in range(100):
            check_step(comm, next_case(case, turn))


def helpers() -> int:
    """Threads of this process that are the helper of a rank that lives."""
    gc.collect()
    return sum(path.read_text() == "crossdock-help\n" for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.parametrize(
    "story",
    [
        calls.previous_handle,
        calls.two_in_flight,
        calls.dual_batch,
        calls.expired_views,
        gradients.backward_matches_reference,
    ],
)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_stories(world: Worlds, story: Any, layout: Layout) -> None:
    world(3).run(run_story, SHUFFLE, story, case_of(3, "single_none"), {"mode": Mode.LL, "layout": layout})


def test_zero_copy_combine(world: Worlds) -> None:
    steps = cases(3, 6, hidden_size=144, num_experts=5, topk=3)
    world(3).run(run_cases, SHUFFLE, steps, {"mode": Mode.HT}, (None,), True)


@pytest.mark.parametrize("over", [SHUFFLE, TCP])
def test_exchange_and_doorbell(world: Worlds, over: str) -> None:
    world(4).run(run_story, over, calls.meetings, case_of(4), {})


def test_gradients(world: Worlds) -> None:
    case = case_of(3, hidden_size=16)
    overrides = {"mode": Mode.HT, "layout": Layout.GROUPED, "dtype": torch.float32}
    world(3).run(run_story, SHUFFLE, gradients.differentiable, case, overrides)


def test_several_communicators_and_lives(world: Worlds) -> None:
    world(3).run(lives.two_communicators, SHUFFLE, case_of(3), {"mode": Mode.LL})
    assert world(3).run(lives.born_and_closed, TCP, case_of(3), 12) == [[], [], []]


@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_killed_rank(when: str) -> None:
    results = World(3).run(faults.one_dies, SHUFFLE, silent_case(3, draw_seed()), 2, when, {}, may_die=(2,))
    assert isinstance(results[2], RankDied)
    for loss, _ in results[:2]:
        assert (loss.peer, loss.gone) == (2, True)
        assert loss.waited_s < SLACK_S


def test_given_up_and_planned_leave(world: Worlds) -> None:
    for loss in faults.losses(world(3).run(faults.one_is_given_up, SHUFFLE, silent_case(3, draw_seed()), 1, "combine")):
        assert (loss.peer, loss.gone) == (1, False)
    world(3).run(faults.planned_leave, TCP, silent_case(3, draw_seed()))


@pytest.mark.parametrize("how", ["abort", "give_up"])
@pytest.mark.parametrize("victim", [0, 1], ids=["who dials", "who is dialled"])
def test_a_set_active_that_connects_is_ended(victim: int, how: str) -> None:
    results = World(2).run(set_active_with_the_dead, silent_case(2, draw_seed()), victim, how, may_die=(victim,))
    assert results[1 - victim] < SLACK_S


def set_active_with_the_dead(rank: int, size: int, store: Any, case: RoutingCase, victim: int, how: str) -> float:
    """A host dies, and the other one would go on with it: seconds until that ends."""
    with Place(rank, size, store, TCP).communicator(case, timeout_s=60.0) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank == victim:
            faults.kill_self(TCP)
        faults.lose(comm.barrier)
        gives_up = how == "give_up"
        threading.Timer(0.3, comm.give_up if gives_up else comm.abort, ([victim] if gives_up else "enough",)).start()
        begun = time.monotonic()
        with pytest.raises(PeerTimeout if gives_up else AbortedError) as raised:
            comm.set_active([True] * size, 1)
        assert not gives_up or raised.value.given_up
        return time.monotonic() - begun


def test_sleeper(world: Worlds) -> None:
    case = silent_case(3, draw_seed())
    said = world(3).run(sleepers.one_sleeps_through_a_regroup, SHUFFLE, case, {"mode": Mode.HT}, "give_up")[0]
    assert said.endswith("has gone on in epoch 1 without this rank")


def test_fork() -> None:
    case = RoutingCase(5, 3, 64, (4, 0, 6), "uniform", draw_seed(), max_tokens=6)
    pool = World(3)
    results = pool.run(forks.one_forks, SHUFFLE, case, "os._exit")
    pool.close()
    assert results[forks.FORKING][0][1] == [], "the child holds nothing"
    assert max(took for _, took in results) < SLACK_S


@pytest.mark.parametrize(("over", "number"), [(SHUFFLE, 600), (TCP, 2000)])
def test_iterations(world: Worlds, over: str, number: int) -> None:
    case = replace(case_of(4, hidden_size=16), topk=3, tokens=(0,) * 4, num_experts=6)
    overrides = {"mode": Mode.AUTO, "layout": Layout.GROUPED, "dtype": torch.float32, "ll_max_tokens": 3}
    world(4).run(run_counted, over, case, overrides, number)


def run_counted(
    rank: int, size: int, store: Any, transport: str, case: RoutingCase, overrides: dict[str, Any], number: int
) -> None:
    """`counted_iterations`, so many."""

    def story(comm: Any, of: RoutingCase) -> None:
        lives.counted_iterations(comm, of, number, 200)

    run_story(rank, size, store, transport, story, case, overrides)


@pytest.mark.parametrize(("story", "rest"), [(deep_ep_steps.ll_steps, (None, True)), (deep_ep_steps.ht_steps, (True,))])
def test_deep_ep_reaches_ranks_of_other_hosts(world: Worlds, story: Callable[..., Any], rest: tuple[Any, ...]) -> None:
    case = RoutingCase(8, 3, 128, (6, 2, 0, 5), "single_none", draw_seed(), max_tokens=8)
    world(4).run(deep_ep_steps.run, story, case, SHUFFLE, *rest)
