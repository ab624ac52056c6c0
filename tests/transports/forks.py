"""Stories of ranks that fork, as data loaders do: what the child may try, and how the parent's group fares."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import process
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ep_kernels import MoECommunicator
from ep_kernels.errors import ClosedError, PeerTimeout
from tests.cases import RoutingCase
from tests.transports.steps import Inputs, Place, Store, check_combine, check_dispatch, check_step, next_case, start

EXITS = ("os._exit", "multiprocessing", "Py_Exit")
FORKING, VICTIM = 1, 1
RAISING = (
    "dispatch", "combine", "wait", "barrier", "exchange", "wait_for_peer", "set_active", "check", "dispatch_input",
    "combine_input", "count_received",
)  # fmt: skip
"""What the child calls and is refused."""


class Family:
    """A forked child that answers once and then lives until told to end, or until this process dies."""

    def __init__(self, how: str, answer: Callable[[], Any]) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self._child: Any = None
        if how == "multiprocessing":
            process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # as ranks of a World are
            self._child = multiprocessing.get_context("fork").Process(target=self._live, args=(there, answer))
            self._child.start()
        else:
            self._pid = os.fork()
            if self._pid == 0:
                self._live(there, answer)
                if how == "Py_Exit":  # as after the last line of a program
                    ctypes.pythonapi.Py_Exit(0)
                os._exit(0)
        there.close()
        assert self._pipe.poll(60), "the child hangs"
        self.answer = json.loads(self._pipe.recv_bytes())

    def _live(self, pipe: Connection, answer: Callable[[], Any]) -> None:
        self._pipe.close()
        try:
            said = answer()
        except BaseException as error:
            said = repr(error)
        pipe.send_bytes(json.dumps(said).encode())
        try:
            pipe.recv_bytes()
        except BaseException:  # this process's parent is dead
            os._exit(1)

    def end(self) -> int:
        """Tell the child to end in its way; its exit status."""
        self._pipe.send_bytes(b"end")
        if self._child is None:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._child.join(30)
        return int(self._child.exitcode)


def held() -> list[str]:
    """Descriptors of this process that are parts of a group."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the listing's own
            continue
    return [name for name in names if "crossdock" in name or "pidfd" in name]


def try_everything(comm: MoECommunicator, arguments: Any, handle: Any, tokens: Any, request: Any) -> list[Any]:
    """In the child: what each call says; then calls that are not refused and do nothing, and what it still holds."""
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: comm.dispatch(*arguments),
        "combine": lambda: comm.combine(tokens, handle),
        "wait": request.wait,
        "barrier": comm.barrier,
        "exchange": lambda: comm.exchange([0] * 8),
        "wait_for_peer": lambda: comm.wait_for_peer(1.0),
        "set_active": lambda: comm.set_active([True] * comm.size, 99),
        "check": comm.check,
        "dispatch_input": lambda: comm.dispatch_input(1),
        "combine_input": lambda: comm.combine_input(handle),
        "count_received": comm.count_received,
    }
    assert tuple(calls) == RAISING
    said = []
    for call in calls.values():
        with pytest.raises(ClosedError) as error:
            call()
        said.append(str(error.value))
    comm.wake()
    comm.abort("the child's own reason")
    comm.give_up([0])
    assert comm.samples() == []
    assert comm.received() is comm.unheard() is None
    comm.close()
    gc.collect()
    return [said, held()]


def one_forks(rank: int, size: int, store: Store, transport: str, case: RoutingCase, how: str) -> tuple[Any, float]:
    """A rank forks amid a step; its child tries everything, then lives until the group is closed. (What the child
    said, seconds that the rank's close took.)"""
    place, family = Place(rank, size, store, transport), None
    comm = MoECommunicator(place.config(case))
    check_step(comm, case)
    request, inputs = start(comm, next_case(case, 1))
    if rank == FORKING:
        out, handle = comm.dispatch(*Inputs.of(case, comm.config).arguments(rank, comm.capabilities.device_type))
        given = Inputs.of(case, comm.config).arguments(rank, comm.capabilities.device_type)
        family = Family(how, lambda: try_everything(comm, given, handle, out.tokens, request))
    else:
        out, handle = comm.dispatch(*Inputs.of(case, comm.config).arguments(rank, comm.capabilities.device_type))
    check_combine(comm, check_dispatch(comm, Inputs.of(case, comm.config), out), out, handle)
    out, handle = request.wait()
    check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
    for turn in range(4):
        check_step(comm, next_case(case, turn))
    assert comm.exchange([rank] * 8) == [(r,) * 8 for r in range(size)]
    comm.barrier()
    begun = time.monotonic()
    comm.close()
    took = time.monotonic() - begun
    if family is None:
        return None, took
    assert family.end() == 0
    return family.answer, took


def parent_dies(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> float:
    """A rank is killed whose child lives on: its peers hear of it as if there were no child. Seconds waited."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, timeout_s=30.0) as comm:
        check_step(comm, case)
        if rank == VICTIM:
            family = Family("os._exit", held)
            assert family.answer == []
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerTimeout) as error:
            comm.barrier()
        assert (error.value.peer, error.value.gone) == (VICTIM, True)
        return error.value.waited_s


def another_generation(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> list[Any]:
    """A child of a child of every rank is refused too, and that of a closed communicator hears whose it was."""
    place = Place(rank, size, store, transport)
    with place.communicator(case) as comm:
        check_step(comm, case)

        def grandchild() -> Any:
            return Family("os._exit", lambda: said_by(comm)).answer

        answer = [Family("os._exit", grandchild).answer]
        check_step(comm, next_case(case, 1))
    answer.append(Family("os._exit", lambda: said_by(comm)).answer)
    return [os.getpid(), *answer]


def said_by(comm: MoECommunicator) -> str:
    """How `barrier` is refused."""
    with pytest.raises(ClosedError) as error:
        comm.barrier()
    return str(error.value)
