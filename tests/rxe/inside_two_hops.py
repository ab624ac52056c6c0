"""In the guest, with torch: two hosts of four ranks, a Soft-RoCE device each, and a combine in two hops over the cable
between them: right bits, the bytes and messages of the theory, and what a cut cable is called.

An emulated processor imports torch in a minute or more; the ranks are forked from a server that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ep_kernels.network import NetworkConfig
from ep_kernels.routing import route
from ep_kernels.types import CombineOrder, Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.rxe.inside_faults import netem
from tests.transports.faults import Loss, lose, meet
from tests.transports.steps import Place, check_combine, check_dispatch, check_step, next_case, start
from tests.transports.test_two_hops import row_counts, tokens_to_other_hosts, tokens_to_ranks_of_other_hosts
from tests.worlds import World

RANKS, HOSTS = 8, (0, 0, 0, 0, 1, 1, 1, 1)
HIDDEN, ROW_BYTES = 512, 1024
PATIENCE_S, WAIT_S = 60.0, 500.0
"""Of a rank's waits; of the test's: emulated processors, two for eight ranks."""
CUT_S = 15.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(RANKS)
    yield made
    made.close()


def two_hops(rank: int, begin: int, **more: Any) -> dict[str, Any]:
    """Fields of the configuration; two hops from `begin` tokens on."""
    host = HOSTS[rank]
    network = NetworkConfig(
        provider="verbs", listen=f"10.77.0.{host + 1}:0", devices=(f"rxe{host}",), domain=f"host {host}"
    )
    fields = {"transport": "cpu", "network": network, "mode": Mode.HT, "layout": Layout.GROUPED}
    return {**fields, "combine_order": CombineOrder.DOMAIN, "two_hop_tokens": begin, "timeout_s": PATIENCE_S, **more}


def sent_home(rank: int, size: int, store: Any, case: RoutingCase, begin: int) -> tuple[int, int, int]:
    """(messages of a combine, its bytes, bytes of the dispatch before it); results are the reference's."""
    place = Place(rank, size, store, "cpu")
    with place.communicator(case, f"from {begin}", **two_hops(rank, begin)) as comm:
        request, inputs = start(comm, case)
        out, handle = request.wait()
        dispatched = row_counts(comm)
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
        after = row_counts(comm)
        for number in range(3):
            check_step(comm, next_case(case, number))
    return after[0] - dispatched[0], after[1] - dispatched[1], dispatched[1]


def test_a_host_sends_a_row_for_each_token_once(world: World) -> None:
    case = RoutingCase(16, 8, HIDDEN, (30, 7, 0, 41, 12, 41, 3, 20), "uniform", draw_seed(), max_tokens=41)
    once = world.run(sent_home, case, 0, timeout_s=WAIT_S)
    each = world.run(sent_home, case, 42, timeout_s=WAIT_S)
    routes = [route(case.expert_map, case.topk_ids(source), source, (True,) * RANKS) for source in range(RANKS)]
    by_host = sum(tokens_to_other_hosts(one, source, HOSTS) for source, one in enumerate(routes))
    by_rank = sum(tokens_to_ranks_of_other_hosts(one, source, HOSTS) for source, one in enumerate(routes))
    assert sum(num_bytes for _, num_bytes, _ in once) == by_host * ROW_BYTES
    assert sum(num_bytes for _, num_bytes, _ in each) == by_rank * ROW_BYTES
    assert sum(dispatched for *_, dispatched in once) == by_host * ROW_BYTES
    messages = [sum(count for count, *_ in sent) for sent in (once, each)]
    print(f"TWO HOPS {by_host} rows in {messages[0]} messages, one hop {by_rank} rows in {messages[1]} messages")
    assert 2 * messages[0] <= messages[1]


def cable_is_cut(rank: int, size: int, store: Any, case: RoutingCase) -> Loss:
    """Nothing passes from before a combine on: what this rank calls it. Then the cable is whole, and all go on."""
    place = Place(rank, size, store, "cpu")
    with place.communicator(case, "cut", **two_hops(rank, 0, timeout_s=CUT_S)) as comm:
        check_step(comm, case)
        request, inputs = start(comm, next_case(case, 1))
        out, handle = request.wait()
        meet(store, rank, size, "dispatched")
        if rank == 0:
            netem("loss", "100%")
        meet(store, rank, size, "cut")
        seen = lose(lambda: check_combine(comm, check_dispatch(comm, inputs, out), out, handle))
        meet(store, rank, size, "seen")
        if rank == 0:
            netem()
        meet(store, rank, size, "whole")
        comm.set_active([True] * size, 1)
        check_step(comm, next_case(case, 2))
    return seen


def test_a_cut_cable_is_a_rank_of_the_other_host(world: World) -> None:
    case = RoutingCase(16, 8, HIDDEN, (9,) * RANKS, "uniform", draw_seed(), max_tokens=9)
    seen = world.run(cable_is_cut, case, timeout_s=WAIT_S)
    for rank, loss in enumerate(seen):
        assert (loss.op, HOSTS[loss.peer]) == ("combine", 1 - HOSTS[rank]), (rank, loss)
    print("CUT", *(f"{rank}: {loss.peer} in {loss.phase};" for rank, loss in enumerate(seen)))
