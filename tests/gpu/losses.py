"""What ranks do in test_losses.py: one is killed or stopped from outside while its kernel runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from ep_kernels import MoECommunicator
from tests.cases import RoutingCase
from tests.compare import expert, same_bits
from tests.transports.faults import PATIENCE_S, Loss, kill_self, lose, meet, refuses_at_once
from tests.transports.steps import Inputs, Place, Store, check_dispatch, check_step, next_case

SPINNING, QUEUED = "its kernel spins", "its kernel is queued"
BEFORE_DISPATCH, BEFORE_COMBINE = "before dispatch", "before combine"
AGES = 60_000_000_000
"""Clock cycles: half a minute."""


def step(comm: MoECommunicator, case: RoutingCase) -> Callable[[], None]:
    """A whole step, and a look at what the device met."""

    def run() -> None:
        out, handle = comm.dispatch(*Inputs.of(case, comm.config).arguments(comm.rank, "cuda"))
        comm.combine(expert(out, comm.config.resolved_output_dtype), handle)
        torch.cuda.synchronize()
        comm.check()

    return run


def killed(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, victim: int, when: str, overrides: Any
) -> tuple[Loss, list[bool]]:
    """`victim` has launched its dispatch and gets SIGKILL; the others then begin theirs. They see the loss long before
    the deadline, re-form and go on, bitwise right."""
    with Place(rank, size, store, transport).communicator(case, timeout_s=30.0, **overrides) as comm:
        for number in range(3):
            check_step(comm, next_case(case, number))
        comm.barrier()
        if rank == victim:
            launch_and_wait_for_death(comm, case, store, when)
        store.wait(["victim"])
        if rank == (victim + 1) % size:
            os.kill(int(store.get("victim")), signal.SIGKILL)
        seen = lose(step(comm, case))
        refuses_at_once(comm, case, seen.peer)
        alive = [r != victim for r in range(size)]
        comm.set_active(alive, 1)
        assert comm.active == tuple(alive)
        valid: list[bool] = []
        for number in range(6):
            check_step(comm, next_case(case, number))
            out, handle = comm.dispatch(*Inputs.of(next_case(case, number), comm.config).arguments(rank, "cuda"))
            valid += out.valid.tolist()
            comm.combine(expert(out, comm.config.resolved_output_dtype), handle)
        comm.barrier()
    return seen, valid


def launch_and_wait_for_death(comm: MoECommunicator, case: RoutingCase, store: Store, when: str) -> None:
    """SPINNING: the kernel runs and waits for peers that have not begun. QUEUED: it lies behind a busy stream."""
    arguments = Inputs.of(case, comm.config).arguments(comm.rank, "cuda")
    begun, done = torch.cuda.Event(), torch.cuda.Event()
    begun.record()
    if when == QUEUED:
        torch.cuda._sleep(AGES)
    comm.dispatch(*arguments)
    done.record()
    begun.synchronize()
    assert not done.query()
    store.set("victim", str(os.getpid()))
    time.sleep(60)


def stopped(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, victim: int, when: str, overrides: Any
) -> Loss | None:
    """`victim` gets SIGSTOP: all of its threads stand still, its GPU does not. The others hear of it at the deadline;
    when it goes on, set_active of all heals the group."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, timeout_s=PATIENCE_S, **overrides) as comm:
        for number in range(3):
            check_step(comm, next_case(case, number))
        comm.barrier()
        store.set(f"pid/{rank}", str(os.getpid()))
        seen = None
        if rank == victim:
            if when == BEFORE_COMBINE:
                comm.dispatch(*Inputs.of(case, comm.config).arguments(rank, "cuda"))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            seen = lose(step(comm, case))
            refuses_at_once(comm, case, seen.peer)
            others = [r for r in range(size) if r != victim]
            store.set(f"seen/{rank}", b"1")
            store.wait([f"seen/{r}" for r in others])
            if rank == others[0]:
                os.kill(int(store.get(f"pid/{victim}")), signal.SIGCONT)
        meet(store, rank, size, "awake")
        comm.set_active([True] * size, 1)
        for number in range(4):
            check_step(comm, next_case(case, number))
        comm.barrier()
    return seen


def graph_outlives_a_rank(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, victim: int, overrides: Any
) -> Loss:
    """A graph captured by all is replayed after one is dead: the loss shows at check(), and after set_active the same
    graph goes on without the dead rank, bitwise right."""
    with Place(rank, size, store, transport).communicator(case, timeout_s=30.0, **overrides) as comm:
        check_step(comm, case)
        static = Inputs.of(case, comm.config).arguments(rank, "cuda")
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, handle = comm.dispatch(*static)
            z = comm.combine(expert(out, comm.config.resolved_output_dtype), handle)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()
            comm.check()

        replay()
        comm.barrier()
        if rank == victim:
            kill_self()
        seen = lose(replay)
        comm.set_active([r != victim for r in range(size)], 1)
        for number in range(5):
            inputs = Inputs.of(next_case(case, number), comm.config)
            for kept, fresh in zip(static, inputs.arguments(rank, "cuda"), strict=True):
                kept.copy_(fresh)
            replay()
            same_bits(z, check_dispatch(comm, inputs, out).combined(rank), f"z of replay {number}")
            check_step(comm, next_case(case, 100 + number))
        comm.barrier()
    return seen
