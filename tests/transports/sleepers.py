"""What ranks do in test_contract_faults.py: one stands still until the others have gone on without it, and wakes. Each
function runs on every rank."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from ep_kernels.errors import TransportError
from tests.cases import RoutingCase
from tests.transports.faults import PATIENCE_S, lose, meet, until
from tests.transports.steps import Place, Store, check_combine, check_dispatch, check_step, next_case, settled, start


def one_sleeps_through_a_regroup(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, overrides: dict[str, Any], lost_by: str
) -> str:
    """Rank 0 gets SIGSTOP before its dispatch; the others begin it, lose rank 0, go on without it, and hold the output
    of their first step when rank 0 wakes and dispatches. All they get is right."""
    place, said = Place(rank, size, store, transport), ""
    timeout_s = PATIENCE_S if lost_by == "deadline" else 30.0
    with place.communicator(case, timeout_s=timeout_s, **overrides) as comm:
        for number in range(6):  # after so many the late dispatch has the slot of the first one of the next epoch
            check_step(comm, next_case(case, number))
        comm.barrier()
        meet(store, rank, size, "begun")  # over hosts the last words of a rank that stops at once would stop with it
        if rank == 0:
            store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(TransportError) as error:
                settled(comm, until(comm, "dispatch", case))
            said = str(error.value)
            with pytest.raises(TransportError, match="without this rank"):
                comm.check()
            store.set("awake", b"1")
        else:
            store.wait(["sleeper"])
            if lost_by == "give_up":
                threading.Timer(0.2, comm.give_up, [[0]]).start()
            assert lose(until(comm, "dispatch", case)).peer == 0
            comm.set_active([False, *[True] * (size - 1)], 1)
            request, inputs = start(comm, next_case(case, 10))
            out, handle = request.wait()
            expected = check_dispatch(comm, inputs, out)
            meet_others(store, rank, size, "holding")
            if rank == 1:
                os.kill(int(store.get("sleeper")), signal.SIGCONT)
            store.wait(["awake"])
            check_dispatch(comm, inputs, out)
            check_combine(comm, expected, out, handle)
            for number in range(4):
                check_step(comm, next_case(case, number))
            comm.barrier()
        meet(store, rank, size, "gone on")
    return said


def meet_others(store: Store, rank: int, size: int, name: str) -> None:
    """`meet` of all but rank 0."""
    store.set(f"meet/{name}/{rank}", b"1")
    store.wait([f"meet/{name}/{r}" for r in range(1, size)])
