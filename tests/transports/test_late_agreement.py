"""A rank that sleeps in `set_active` and wakes when the others have gone on without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from ep_kernels import MoECommunicator, StoreGroup, TransportError
from ep_kernels.config import MoEConfig
from tests.worlds import World

DEADLINE_S = 1.0


def wakes_late(rank: int, size: int, store: Any, alone: bool) -> str:
    """Ranks 0 and 1 enter epoch 1; 0 is stopped before 2 does. The others go on without it, 1 at last `alone`, which
    overwrites what 0 has seen of it."""
    group = StoreGroup(store, rank, size)
    shape = {"num_experts": 3, "topk": 1, "hidden_size": 64, "max_tokens_per_rank": 8}
    comm = MoECommunicator(MoEConfig(group=group, transport="cpu", timeout_s=DEADLINE_S, **shape))
    if rank == 0:
        store.set("pid", str(os.getpid()))
    sleeper = int(store.get("pid"))
    said = "ok"
    try:
        if rank == 2:
            time.sleep(DEADLINE_S / 3)  # the others are in epoch 1 by then
            os.kill(sleeper, signal.SIGSTOP)
        comm.set_active([True] * 3, 1)
    except TransportError as error:
        said = str(error)
    if rank:
        comm.set_active([False, True, True], 2)
        comm.barrier()
        if rank == 1 and alone:
            comm.set_active([False, True, False], 3)
        if rank == 1:
            os.kill(sleeper, signal.SIGCONT)
    comm.close()
    return said


@pytest.mark.parametrize("alone", [False, True])
def test_it_is_left_out(world: Callable[[int], World], alone: bool) -> None:
    said, *_ = world(3).run(wakes_late, alone)
    assert said.startswith("set_active: rank "), said
