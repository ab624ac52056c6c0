"""Combine in two hops: a host sends one row per token. The contract, the bytes, and what a dead or late rank does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_kernels import ConfigError, MoECommunicator
from ep_kernels.routing import Route, route
from ep_kernels.transports.cpu.geometry import two_hop_tokens
from ep_kernels.transports.cpu.native import SENT_KINDS, Sent
from ep_kernels.types import CombineOrder, Layout, Mode, Overflow
from tests.cases import RoutingCase, cases, draw_seed, replicated, routing_cases
from tests.groups import LonelyGroup
from tests.transports import calls, faults, gradients, sleepers
from tests.transports.faults import SLACK_S, lose, meet, silent_case
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
from tests.worlds import RankDied, World

Worlds = Callable[[int], World]
HALVES, ODD, FIRST, TCP = "cpu-shuffle-halves", "cpu-shuffle-odd", "cpu-shuffle-first", "cpu-tcp-halves"
"""Hosts of equal sizes; ranks that alternate; one rank alone on its host."""
FP8 = torch.float8_e4m3fn
TWO_HOPS: dict[str, Any] = {"combine_order": CombineOrder.DOMAIN, "two_hop_tokens": 0}
PAYLOADS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32 partials": {"output_dtype": torch.float32},
    "fp8 combine": {"combine_dtype": FP8},
    "fp8 combine of fp32": {"dtype": torch.float32, "combine_dtype": FP8},
    "fp8 both ways": {"quantize": True, "combine_dtype": FP8},
    "bytes with scales": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
    "exact": {"exact_combine": True},
}


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("over", [HALVES, ODD, FIRST])
def test_every_kind_of_routing(world: Worlds, over: str, layout: Layout) -> None:
    steps = cases(4, 9, hidden_size=136, num_experts=9, topk=5)
    world(4).run(run_cases, over, steps, {"mode": Mode.LL, "layout": layout, **TWO_HOPS})


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_payloads(world: Worlds, mode: Mode, payload: str) -> None:
    kinds = ("uniform", "single_none", "one_expert", "k_hot")
    steps = [RoutingCase(7, 5, 272, (5, 0, 6, 3), kind, draw_seed(), max_tokens=6) for kind in kinds]
    overrides = {"mode": mode, "layout": Layout.GROUPED, **TWO_HOPS, **PAYLOADS[payload]}
    world(4).run(run_cases, HALVES, steps, overrides)
    world(4).run(run_cases, FIRST, steps, overrides)


@pytest.mark.parametrize("over", [HALVES, FIRST])
def test_eight_ranks_and_replicas(world: Worlds, over: str) -> None:
    """Partials in fp32, so that another order of the four of a host is another sum."""
    tokens = (3, 0, 5, 1, 2, 8, 4, 6)
    placed = replicated(8, 20, 12, draw_seed())
    steps = [RoutingCase(20, 8, 2064, tokens, kind, draw_seed(), placed, 8) for kind in ("uniform", "zipf", "k_hot")]
    overrides = {"mode": Mode.HT, "layout": Layout.GROUPED, "output_dtype": torch.float32, **TWO_HOPS}
    world(8).run(run_cases, over, steps, overrides)


@pytest.mark.parametrize("payload", ["bf16", "fp8 combine"])
@pytest.mark.parametrize("layout", list(Layout))
def test_rows_that_are_dropped_count_as_zeros(world: Worlds, layout: Layout, payload: str) -> None:
    few: dict[str, Any] = {} if layout is Layout.RANK_MAJOR else {"max_recv_rows": 4, "overflow": Overflow.DROP}
    kinds = ("uniform", "k_hot", "one_expert", "zipf")
    steps = [RoutingCase(5, 4, 144, (6, 1, 6, 6), kind, draw_seed(), max_tokens=6) for kind in kinds]
    overrides = {"mode": Mode.HT, "layout": layout, **few, **TWO_HOPS, **PAYLOADS[payload]}
    world(4).run(run_cases, HALVES, steps, overrides)


@pytest.mark.parametrize("fields", [{"layout": Layout.GROUPED}, {"layout": Layout.FLAT, "combine_dtype": FP8}])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_rows_of_many_chunks(world: Worlds, fields: dict[str, Any], zero_copy: bool) -> None:
    steps = [RoutingCase(7, 4, 2064, (330, 0, 300, 140), kind, draw_seed()) for kind in ("uniform", "zipf")]
    overrides = {"mode": Mode.HT, **fields, **TWO_HOPS}
    world(4).run(run_cases, HALVES, steps, overrides, (None,), zero_copy)


STORIES = [
    calls.previous_handle,
    calls.two_in_flight,
    calls.dual_batch,
    calls.dropped_requests,
    calls.handles_of_different_steps,
    gradients.backward_matches_reference,
]


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_stories(world: Worlds, story: Any, layout: Layout) -> None:
    case = RoutingCase(9, 4, 64, (5, 3, 0, 4), "single_none", draw_seed(), max_tokens=6)
    world(4).run(run_story, HALVES, story, case, {"mode": Mode.LL, "layout": layout, **TWO_HOPS})


CONFIGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from([Mode.LL, Mode.HT, Mode.AUTO]),
        "layout": st.sampled_from(list(Layout)),
        "combine_dtype": st.sampled_from([None, FP8]),
        "overflow": st.just(Overflow.DROP),
        "combine_order": st.just(CombineOrder.DOMAIN),
        "two_hop_tokens": st.sampled_from([0, 1, 3, None]),
        "max_in_flight": st.integers(1, 3),
    }
)


def test_anything(world: Worlds) -> None:
    """One hop or two, step by step: the same bits."""

    @settings(max_examples=25)
    @given(st.lists(routing_cases(num_ranks=4), min_size=1, max_size=3), CONFIGS, st.sampled_from([HALVES, FIRST, ODD]))
    def check(drawn: list[RoutingCase], overrides: dict[str, Any], over: str) -> None:
        same = [replace(drawn[0], kind=c.kind, seed=c.seed, tokens=c.tokens, max_tokens=6) for c in drawn]
        world(4).run(run_cases, over, same, overrides)

    check()


@pytest.mark.parametrize("over", [TCP, "cpu-tcp-first", "cpu-tcp-odd"])
@pytest.mark.parametrize("payload", ["bf16", "fp8 combine"])
def test_a_host_sends_a_row_for_each_token_once(world: Worlds, over: str, payload: str) -> None:
    """Counted bytes of rows are those of the theory, to the byte, both ways; and less than a row per rank."""
    case = RoutingCase(16, 8, 256, (30, 7, 0, 41), "uniform", draw_seed())
    overrides = {"mode": Mode.HT, "layout": Layout.GROUPED, **TWO_HOPS, **PAYLOADS[payload]}
    counted = world(4).run(rows_sent, over, case, overrides)
    hosts = counted[0][2]
    partial = 256 * 2 if payload == "bf16" else 256 + 2 * 4
    routes = [route(case.expert_map, case.topk_ids(source), source, (True,) * 4) for source in range(4)]
    by_host = sum(tokens_to_other_hosts(one, source, hosts) for source, one in enumerate(routes))
    by_rank = sum(tokens_to_ranks_of_other_hosts(one, source, hosts) for source, one in enumerate(routes))
    assert by_host < by_rank
    assert sum(out for out, _, _ in counted) == by_host * 256 * 2
    assert sum(home for _, home, _ in counted) == by_host * partial
    direct = world(4).run(rows_sent, over, case, {**overrides, "two_hop_tokens": 42})
    assert sum(home for _, home, _ in direct) == by_rank * partial
    assert world(4).run(rows_sent, over, case, {**overrides, "two_hop_tokens": 41}) == counted


def tokens_to_other_hosts(one: Route, source: int, hosts: tuple[int, ...]) -> int:
    """(token, other host) pairs of a source."""
    at = torch.where(one.rank >= 0, torch.tensor(hosts)[one.rank], -1)
    return sum(int((at == host).any(1).sum()) for host in set(hosts) - {hosts[source]})


def tokens_to_ranks_of_other_hosts(one: Route, source: int, hosts: tuple[int, ...]) -> int:
    """(token, rank of another host) pairs of a source."""
    away = [rank for rank, host in enumerate(hosts) if host != hosts[source]]
    return sum(int((one.rank == rank).any(1).sum()) for rank in away)


def rows_sent(
    rank: int, size: int, store: Any, transport: str, case: RoutingCase, overrides: dict[str, Any]
) -> tuple[int, int, tuple[int, ...]]:
    """(bytes of rows that this rank sends in a dispatch, in its combine; hosts of the ranks)."""

    def story(comm: Any, of: RoutingCase) -> tuple[int, int, tuple[int, ...]]:
        request, inputs = start(comm, of)
        out, handle = request.wait()
        dispatched = row_bytes(comm)
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
        return dispatched, row_bytes(comm) - dispatched, comm.domains

    return run_story(rank, size, store, transport, story, case, overrides)  # type: ignore[no-any-return]


def row_bytes(comm: Any) -> int:
    """Of rows that this rank has sent so far."""
    return row_counts(comm)[1]


def row_counts(comm: Any) -> tuple[int, int]:
    """(messages, bytes) of rows that this rank has sent so far."""
    counts = (Sent * len(SENT_KINDS))()
    comm._transport.lib.cd_sent(comm._transport.comm.pointer, counts)
    rows = counts[SENT_KINDS.index("rows")]
    return rows.messages, rows.bytes


@pytest.mark.parametrize(
    ("fields", "least"),
    [({}, 1024), ({"hidden_size": 7168}, 19), ({"two_hop_tokens": 7}, 7), ({"combine_dtype": FP8}, 1986)],
)
def test_where_two_hops_begin(fields: dict[str, Any], least: int) -> None:
    """From 256 KiB of one rank's partials on, or as it is said."""
    case = RoutingCase(4, 2, 128, (1, 1))
    assert two_hop_tokens(case.config(LonelyGroup(0, 2), combine_order=CombineOrder.DOMAIN, **fields)) == least


@pytest.mark.parametrize("wrong", [-1, 1.5, "few", 1 << 31])
def test_a_number_of_tokens_that_is_none(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="two_hop_tokens"):
        RoutingCase(4, 2, 128, (1, 1)).config(LonelyGroup(0, 2), two_hop_tokens=wrong)


def test_ranks_agree_where_two_hops_begin(world: Worlds) -> None:
    said = world(2).run(begins_by_rank, TCP, RoutingCase(4, 2, 128, (1, 1)))
    assert all("two_hop_tokens" in words for words in said)


def begins_by_rank(rank: int, size: int, store: Any, transport: str, case: RoutingCase) -> str:
    with pytest.raises(ConfigError) as error:
        MoECommunicator(Place(rank, size, store, transport).config(case, **{**TWO_HOPS, "two_hop_tokens": rank}))
    return str(error.value)


# Faults.


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_killed_rank_and_rails_anew(when: str, victim: int) -> None:
    """A rank of either role dies; the others name it, choose other rails, and go on with right bits."""
    case = silent_case(4, draw_seed())
    results = World(4).run(faults.one_dies, HALVES, case, victim, when, TWO_HOPS, may_die=(victim,))
    assert isinstance(results[victim], RankDied)
    for rank, found in enumerate(results):
        if rank != victim:
            assert (found[0].peer, found[0].gone) == (victim, True), rank
            assert found[0].waited_s < SLACK_S


@pytest.mark.parametrize("how", ["give_up", "deadline"])
def test_late_rows_of_a_rank_that_was_left_out_never_land(world: Worlds, how: str) -> None:
    """Rank 0, which collects for rank 2, sleeps while the others go on without it, and wakes."""
    overrides = {"mode": Mode.HT, **TWO_HOPS}
    said = world(4).run(sleepers.one_sleeps_through_a_regroup, HALVES, silent_case(4, draw_seed()), overrides, how)[0]
    assert said.endswith("has gone on in epoch 1 without this rank")


@pytest.mark.parametrize("over", [TCP, HALVES])
def test_late_sums_of_a_collector_that_was_left_out_never_land(world: Worlds, over: str) -> None:
    case = RoutingCase(8, 4, 7168, (40, 30, 40, 20), "uniform", draw_seed(), max_tokens=40)
    said = world(4).run(collector_sleeps, over, case)[0]
    assert "without this rank" in said


def collector_sleeps(rank: int, size: int, store: Any, transport: str, case: RoutingCase) -> str:
    """Rank 0 has staged its partials when it stops, and has sums to send when it wakes, long after the others have gone
    on without it. All they get is right."""
    place, said = Place(rank, size, store, transport), ""
    with place.communicator(case, timeout_s=30.0, mode=Mode.HT, layout=Layout.GROUPED, **TWO_HOPS) as comm:
        check_step(comm, case)
        request, _ = start(comm, next_case(case, 1))
        out, handle = request.wait()
        y = torch.zeros(*handle.rows_shape, case.hidden_size, dtype=torch.bfloat16)
        comm.barrier()
        if rank == 0:
            combining = comm.combine_async(y, handle)
            store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(Exception, match="without this rank") as error:
                combining.wait()
            said = str(error.value)
            store.set("awake", b"1")
        else:
            store.wait(["sleeper"])
            combining = comm.combine_async(y, handle)
            comm.give_up([0])
            assert lose(combining.wait).peer == 0
            comm.set_active([False, True, True, True], 1)
            for number in range(3):
                check_step(comm, next_case(case, number))
            request, inputs = start(comm, next_case(case, 10))
            out, handle = request.wait()
            expected = check_dispatch(comm, inputs, out)
            sleepers.meet_others(store, rank, size, "holding")
            if rank == 1:
                os.kill(int(store.get("sleeper")), signal.SIGCONT)
            store.wait(["awake"])
            check_combine(comm, expected, out, handle)
            for number in range(4):
                check_step(comm, next_case(case, number))
            comm.barrier()
        meet(store, rank, size, "gone on")
    return said


@pytest.mark.parametrize("slow", [0, 1])
def test_a_late_rank_is_shown_and_not_its_collector(world: Worlds, slow: int) -> None:
    """Ranks 0 and 1 collect for 2 and 3, so rows of both are late when one of them is."""
    case = silent_case(4, draw_seed())
    shown = [world(4).run(late_to_combine, TCP, case, slow) for _ in range(3)]
    for rank in (2, 3):
        waits = min((found[rank] for found in shown), key=lambda waits: waits[1 - slow])
        assert waits[slow] > LATE_S / 2
        assert waits[1 - slow] < LATE_S / 4
    assert max(found[1 - slow][slow] for found in shown) > LATE_S / 2, "its collector sees it, too"


LATE_S = 0.4


def late_to_combine(rank: int, size: int, store: Any, transport: str, case: RoutingCase, slow: int) -> list[float]:
    """Seconds that this rank's combine has waited for each."""

    def story(comm: Any, of: RoutingCase) -> list[float]:
        request, inputs = start(comm, of)
        out, handle = request.wait()
        expected = check_dispatch(comm, inputs, out)
        comm.barrier()
        comm.samples()
        if rank == slow:
            time.sleep(LATE_S)
        check_combine(comm, expected, out, handle)
        return [ns / 1e9 for ns in faults.next_sample(comm).peer_wait_ns]

    return run_story(rank, size, store, transport, story, case, TWO_HOPS)  # type: ignore[no-any-return]


def test_a_dead_rail_is_named_not_the_source() -> None:
    """Rank 1 gets rank 3's rows for host 0. It dies when it has published its own: rank 0 waits for rank 3 alone, names
    rank 1, and at once."""
    results = World(4).run(rail_dies, TCP, silent_case(4, draw_seed()), may_die=(1,))
    loss = results[0]
    assert (loss.peer, loss.gone) == (1, True)
    assert loss.waited_s < SLACK_S


def test_a_rail_that_stands_still_is_named_not_the_source(world: Worlds) -> None:
    """Rank 3 gets rank 1's rows for rank 2, which waits for both."""
    assert world(4).run(rail_stops, TCP, silent_case(4, draw_seed()))[:3] == [3, 3, 3]


def rail_stops(rank: int, size: int, store: Any, transport: str, case: RoutingCase) -> int:
    place, named = Place(rank, size, store, transport), -1
    with place.communicator(case, timeout_s=faults.PATIENCE_S) as comm:
        check_step(comm, case)
        meet(store, rank, size, "begun")
        if rank == 3:
            store.set("stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            store.wait(["stopped"])
            named = lose(lambda: check_step(comm, case)).peer
            sleepers.meet_others(store, (rank + 1) % size, size, "seen")
        if rank == 0:
            os.kill(int(store.get("stopped")), signal.SIGCONT)
        meet(store, rank, size, "over")
        comm.abort("the story has ended")
    return named


def rail_dies(rank: int, size: int, store: Any, transport: str, case: RoutingCase) -> Any:
    place, seen = Place(rank, size, store, transport), None
    with place.communicator(case, timeout_s=60.0) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank == 1:
            start(comm, case)
            faults.kill_self(transport)
        if rank == 0:
            request, _ = start(comm, case)
            seen = lose(request.wait)
            store.set("seen", b"1")
        if rank == 2:
            start(comm, case)
        store.wait(["seen"])  # rank 3 never comes
        comm.abort("the story has ended")
    return seen
