"""What ranks do in test_contract_faults.py: peers are late, silent or dead. Each function runs on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ep_kernels import MoECommunicator, PeerTimeout
from ep_kernels.errors import ArgumentError, HandleError, TransportError
from ep_kernels.types import LatencySample
from tests.cases import RoutingCase
from tests.compare import expert
from tests.hosts import is_over_hosts
from tests.transports.steps import (
    Place,
    Store,
    caught_up,
    check_combine,
    check_dispatch,
    check_step,
    next_case,
    settled,
    start,
)

PATIENCE_S = 2.5
"""Deadline of waits in these tests; a rank that lives is never late by so much."""
SLACK_S = 15.0
"""What a loaded machine may add; far below what a hang takes."""


LATE_S = 0.3
"""Long after a kernel that did not have to wait would be done."""


@dataclass(frozen=True)
class Loss:
    """What a survivor saw.

    Attributes:
        peer: rank that the error names.
        gone: whether it was seen dead.
        op: the operation that ended.
        phase: what it waited for.
        waited_s: seconds until it did.
    """

    peer: int
    gone: bool
    op: str
    phase: str
    waited_s: float


SENT_S = 0.1
"""What a rank has published is sent to other hosts within this time; what is not dies with it."""


def kill_self(transport: str = "") -> None:
    """As kill -9 from outside: no handler, no cleanup."""
    if is_over_hosts(transport):
        time.sleep(SENT_S)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def lose(call: Callable[[], Any]) -> Loss:
    """The PeerTimeout that `call` ends in."""
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as error:
        call()
    fault = error.value
    assert f"rank {fault.peer}" in str(fault)
    assert fault.phase
    return Loss(fault.peer, fault.gone, fault.op, fault.phase, time.monotonic() - begin)


def refuses_at_once(comm: MoECommunicator, case: RoutingCase, peer: int) -> None:
    """Every later call raises the same error without waiting."""
    begin = time.monotonic()
    for call in (lambda: start(comm, case), comm.barrier, comm.check, lambda: comm.exchange([0] * 8)):
        with pytest.raises(PeerTimeout) as error:
            call()
        assert error.value.peer == peer
    assert time.monotonic() - begin < PATIENCE_S


def until(comm: MoECommunicator, when: str, case: RoutingCase) -> Callable[[], Any]:
    """Go to the point `when`; returns the call at which a silent peer shows."""
    if when == "barrier":
        return comm.barrier
    if when == "exchange":
        return lambda: comm.exchange([0] * 8)
    if when == "dispatch":
        return lambda: check_step(comm, case)
    request, _ = start(comm, case)
    dtype = comm.config.resolved_output_dtype

    def rest() -> None:
        out, handle = request.wait()  # what a rank had sent before it died may still arrive
        settled(comm, lambda: comm.combine(expert(out, dtype), handle))

    if when == "dispatch sent":
        return rest
    out, handle = request.wait()
    comm.barrier()
    return lambda: settled(comm, lambda: comm.combine(expert(out, dtype), handle))


def one_goes_silent(
    rank: int,
    size: int,
    store: Store,
    transport: str,
    case: RoutingCase,
    victim: int,
    when: str,
    overrides: dict[str, Any],
) -> Loss | None:
    """`victim` stops taking part but lives on until everybody has seen it; a set_active of all heals the group."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, **{"timeout_s": PATIENCE_S, **overrides}) as comm:
        for number in range(3):
            check_step(comm, next_case(case, number))
        call = until(comm, when, case)
        seen = None
        if rank != victim:
            seen = lose(call)
            refuses_at_once(comm, case, seen.peer)
        meet(store, rank, size, "seen")
        comm.set_active([True] * size, 1)
        assert comm.epoch == 1
        for number in range(4):
            check_step(comm, next_case(case, number))
        comm.barrier()
    return seen


def one_dies(
    rank: int,
    size: int,
    store: Store,
    transport: str,
    case: RoutingCase,
    victim: int,
    when: str,
    overrides: dict[str, Any],
) -> tuple[Loss, list[bool]]:
    """`victim` is killed; the others see it long before the deadline, re-form without it and go on."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, **{"timeout_s": 30.0, **overrides}) as comm:
        for number in range(3):
            check_step(comm, next_case(case, number))
        old = check_step(comm, case)
        call = until(comm, when, case)
        if rank == victim:
            kill_self(transport)
        seen = lose(call)
        refuses_at_once(comm, case, seen.peer)
        alive = [r != victim for r in range(size)]
        comm.set_active(alive, 1)
        assert comm.active == tuple(alive)
        comm.check()
        with pytest.raises(HandleError, match="epoch 0"):
            comm.combine(torch.empty(0), old)
        valid: list[bool] = []
        for number in range(6):
            check_step(comm, next_case(case, 10 + number))
            request, _ = start(comm, next_case(case, number))
            out, handle = request.wait()
            valid += out.valid.tolist()
            comm.combine(expert(out, comm.config.resolved_output_dtype), handle)
        assert [row is None for row in comm.exchange([rank] * 8)] == [not a for a in alive]
        comm.barrier()
    return seen, valid


def one_is_given_up(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, victim: int, when: str
) -> Loss | None:
    """`victim` stands still, and lives; the others are told that it is lost, re-form without it at once and go on."""
    place, seen = Place(rank, size, store, transport), None
    alive = [r != victim for r in range(size)]
    with place.communicator(case, timeout_s=30.0) as comm:
        check_step(comm, case)
        call = until(comm, when, case)
        if rank != victim:
            threading.Timer(0.2, comm.give_up, [[victim]]).start()
            seen = lose(call)
            refuses_at_once(comm, case, victim)
            comm.set_active(alive, 1)
            for number in range(4):
                check_step(comm, next_case(case, number))
            comm.barrier()
        meet(store, rank, size, "gone on")
    return seen


def one_is_given_up_while_another_is_awaited(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase
) -> float:
    """Rank 1, which is lost, has entered an exchange that rank 2 will never enter: rank 0 need not wait for rank 2."""
    place, begin = Place(rank, size, store, transport), 0.0
    with place.communicator(case, timeout_s=30.0) as comm:
        comm.barrier()
        if rank == 1:
            others = threading.Thread(target=_abort_after, args=(comm, store, (0, 2)))
            others.start()
            with pytest.raises(TransportError):
                comm.exchange([1] * 8)
            others.join()
        else:
            assert comm.wait_for_peer(30.0)
            begin = time.monotonic()
            comm.give_up([1])
            if rank == 0:
                assert lose(lambda: comm.exchange([0] * 8)).op == "exchange"
            comm.set_active([True, False, True], 1)
            assert comm.exchange([rank] * 8) == [(0,) * 8, None, (2,) * 8]
            begin = time.monotonic() - begin
        meet(store, rank, size, "gone on")
    return begin


def _abort_after(comm: MoECommunicator, store: Store, ranks: Sequence[int]) -> None:
    """Once these have gone on, this rank, too, need not wait until its deadline."""
    store.wait([f"meet/gone on/{rank}" for rank in ranks])
    comm.abort("the others have gone on")


def two_die_in_turn(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> list[int]:
    """First rank 1, then, in the next epoch, rank 3 of 4."""
    place = Place(rank, size, store, transport)
    named = []
    with place.communicator(case, timeout_s=30.0) as comm:
        alive = [True] * size
        for epoch, victim in enumerate((1, 3), 1):
            check_step(comm, next_case(case, epoch))
            if rank == victim:
                kill_self(transport)
            named.append(lose(lambda: check_step(comm, case)).peer)
            alive[victim] = False
            comm.set_active(alive, epoch)
            for number in range(3):
                check_step(comm, next_case(case, number))
        comm.barrier()
    return named


def planned_leave(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> None:
    """A rank leaves in good order, between steps: nobody sees an error; requests over the change are void."""
    place = Place(rank, size, store, transport)
    with place.communicator(case) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank == 0:
            return
        begun, _ = start(comm, case)
        alive = [r != 0 for r in range(size)]
        comm.set_active(alive, 7)
        with pytest.raises(HandleError, match="epoch"):
            begun.wait()
        for number in range(4):
            check_step(comm, next_case(case, number))
        for mask, epoch in (([True] * (size - 1), 8), ([r == 0 for r in range(size)], 8), (alive, 7), (alive, 3)):
            with pytest.raises(ArgumentError):
                comm.set_active(mask, epoch)
        check_step(comm, case)
        comm.barrier()


def one_is_left_out(rank: int, size: int, store: Store, transport: str, case: RoutingCase, when: str) -> str:
    """Rank 0 sleeps while the others go on without it for one step or more. When it wakes it must not take what they
    publish now for what it waits for: it hears that it was left out. Then all re-form."""
    place = Place(rank, size, store, transport)
    said = ""
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        check_step(comm, case)
        comm.barrier()
        call = until(comm, when, case) if when == "combine" else None
        if rank:
            comm.set_active([False, *[True] * (size - 1)], 1)
            for number in range(1 + case.seed % 5):
                check_step(comm, next_case(case, number))
                comm.exchange([0] * 8)
                comm.barrier()
        meet(store, rank, size, "gone on")
        if rank == 0:
            with pytest.raises(TransportError) as error:
                (call or until(comm, when, case))()
            said = str(error.value)
            with pytest.raises(TransportError):
                comm.check()
        meet(store, rank, size, "noticed")
        comm.set_active([True] * size, 2)
        for number in range(4):
            check_step(comm, next_case(case, number))
        comm.barrier()
    return said


def rejoin_fails_without_everyone(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> None:
    """set_active is a collective: if a survivor does not come, the others hear its name."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank != 2:
            assert lose(lambda: comm.set_active([True] * size, 1)).peer == 2
        meet(store, rank, size, "tried")
        comm.set_active([True] * size, 2)
        check_step(comm, case)
        comm.barrier()


def dies_in_bring_up(rank: int, size: int, store: Store, transport: str, case: RoutingCase, victim: int) -> str:
    """A rank that never says hello is named."""
    place = Place(rank, size, store, transport)
    if rank == victim:
        kill_self(transport)
    with pytest.raises(TransportError) as error:
        MoECommunicator(place.config(case, timeout_s=PATIENCE_S))
    return str(error.value)


def late_but_in_time(rank: int, size: int, store: Store, transport: str, case: RoutingCase, delay_s: float) -> bool:
    """A slow rank is waited for, and is the one that the samples of the others show; True once they show how long (a
    rank that the scheduler left out meanwhile has less to wait, hence several rounds)."""
    place = Place(rank, size, store, transport)
    slow, shown = size - 1, False
    with place.communicator(case, timeout_s=20.0) as comm:
        for number in range(5):
            comm.barrier()
            comm.samples()
            if rank != slow:
                request, _ = start(comm, next_case(case, number))
            meet(store, rank, size, f"others have sent {number}")
            if rank == slow:
                time.sleep(delay_s)
                request, _ = start(comm, next_case(case, number))
            request.wait()
            dispatch = next_sample(comm)
            if rank != slow:
                assert dispatch.peer_wait_ns[slow] == max(dispatch.peer_wait_ns), dispatch
                shown |= dispatch.peer_wait_ns[slow] >= delay_s * 0.5e9
        comm.barrier()
    return shown or rank == slow


def next_sample(comm: MoECommunicator) -> LatencySample:
    """The record of an operation that has been waited for: on GPUs that wait is the stream's, so it may still run."""
    deadline = time.monotonic() + SLACK_S
    while not (found := comm.samples()):
        assert time.monotonic() < deadline, "no record"
        time.sleep(0.001)
    (sample,) = found
    return sample


def one_dies_in_inference_mode(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> Any:
    """As engines run: a communicator that is made where tensors are inference tensors, watched by a thread that is
    not."""
    with torch.inference_mode():
        return one_dies(rank, size, store, transport, case, 2, "combine", {})


def dead_before_close(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> float:
    """close() does not wait for a dead peer."""
    place = Place(rank, size, store, transport)
    with place.communicator(case) as comm:
        check_step(comm, case)
        comm.barrier()
        if rank == 0:
            kill_self(transport)
        begin = time.monotonic()
    return time.monotonic() - begin


def leaves_at_once(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, overrides: dict[str, Any]
) -> None:
    """A rank without tokens of its own, which nothing makes wait, closes right after its last combine was begun; the
    others come to theirs later, and still get its rows."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, timeout_s=SLACK_S, **overrides) as comm:
        request, inputs = start(comm, case)
        out, handle = request.wait()
        expected = check_dispatch(comm, inputs, out)
        y = expert(out, comm.config.resolved_output_dtype)
        caught_up(comm)
        meet(store, rank, size, "dispatched")
        if case.tokens[rank]:
            time.sleep(LATE_S)
            check_combine(comm, expected, out, handle)
        else:
            comm.combine(y, handle)


def meet(store: Store, rank: int, size: int, name: str) -> None:
    """A barrier that does not depend on what is under test."""
    store.set(f"meet/{name}/{rank}", b"1")
    store.wait([f"meet/{name}/{r}" for r in range(size)])


def losses(seen: Sequence[Loss | None]) -> list[Loss]:
    return [loss for loss in seen if loss is not None]


def silent_case(size: int, seed: int) -> RoutingCase:
    """Every rank sends to every other, so that silence shows everywhere."""
    return replace(RoutingCase(2 * size, 2 * size, 64, (4,) * size), seed=seed)
