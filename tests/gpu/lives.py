"""What ranks do in test_lives.py and test_memory.py: communicators come and go, with work under way and with graphs
that outlive them."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch

from ep_kernels import MoECommunicator
from ep_kernels.errors import ClosedError
from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase
from tests.compare import expert
from tests.transports.faults import meet
from tests.transports.lives import holdings
from tests.transports.steps import Inputs, Place, Store, check_step, next_case, start

WARM_UP = 10
"""Lives before the first count: modules are loaded once, caches of torch fill."""


def born_and_closed(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, times: int
) -> tuple[list[str], int, int]:
    """Communicators of every mode and layout, every third closed with a dispatch under way, every third dropped without
    being closed; returns what the process holds more of than after the first few, and the bytes that went missing: of
    torch's, of the whole device."""
    place = Place(rank, size, store, transport)
    kinds = [(mode, layout) for mode in (Mode.LL, Mode.HT) for layout in Layout]
    before: dict[str, int] = {}
    free = held = 0
    for turn in range(times):
        mode, layout = kinds[turn % len(kinds)]
        comm = MoECommunicator(place.config(case, f"life-{turn}", mode=mode, layout=layout))
        check_step(comm, next_case(case, turn))
        comm.barrier()
        if turn % 3 == 0:
            start(comm, case)
            meet(store, rank, size, f"begun {turn}")
        if turn % 3 != 1:
            comm.close()
        del comm
        if turn == WARM_UP:
            before, free, held = holdings(), free_bytes(), torch.cuda.memory_allocated()
    more = [f"{name}: {before[name]} -> {n}" for name, n in holdings().items() if n > before[name]]
    missing = free - free_bytes()
    return more, torch.cuda.memory_allocated() - held, missing


def free_bytes() -> int:
    """Of this rank's GPU, with nothing kept back by torch."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def closed_under_a_graph(rank: int, size: int, store: Store, transport: str, case: RoutingCase, mode: Mode) -> float:
    """A graph outlives its communicator: its replay ends at once, harms nobody and nothing. Returns its seconds."""
    place = Place(rank, size, store, transport)
    overrides = {"mode": mode, "overflow": Overflow.DROP, "exact_shapes": False}
    with place.communicator(case, "first", **overrides) as comm:
        x, ids, weights = Inputs.of(case, comm.config).arguments(rank, "cuda")
        check_step(comm, case)
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(expert(out, comm.config.resolved_output_dtype), handle)
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        comm.barrier()
    with pytest.raises(ClosedError):
        comm.check()
    del out, handle, comm
    free_bytes()  # what the communicator gave back is nobody's any more
    meet(store, rank, size, "closed")
    if rank == 0:  # or is used again, by others
        filler = [torch.zeros(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    begin = time.monotonic()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    took = time.monotonic() - begin
    if rank == 0:
        assert not any(bool(block.any()) for block in filler), "a replay wrote to memory that is not its own"
    with place.communicator(replace(case, seed=case.seed + 1), "second", **overrides) as other:
        for number in range(4):
            graph.replay()
            check_step(other, next_case(case, number))
        other.barrier()
    return took


def one_closes_under_a_graph(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, timeout_s: float
) -> tuple[str, float]:
    """Only rank 0 closes; the others replay on and hear of it by the deadline, no later. Returns (error, seconds)."""
    place = Place(rank, size, store, transport)
    overrides = {"overflow": Overflow.DROP, "exact_shapes": False, "timeout_s": timeout_s}
    with place.communicator(case, **overrides) as comm:
        check_step(comm, case)
        comm.barrier()
        x, ids, weights = Inputs.of(case, comm.config).arguments(rank, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(expert(out, comm.config.resolved_output_dtype), handle)
        comm.barrier()
        if rank == 0:
            comm.close()
        meet(store, rank, size, "closed")
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        unheard = comm.unheard()
        assert (unheard is None) == (rank == 0), "the one that closed knows"
        assert rank == 0 or int(comm.failed()) != 0, "the stream knows of it"
        with pytest.raises((TimeoutError, ClosedError)) as error:
            comm.check()
        assert str(unheard) in (str(error.value), "None")
        assert comm.unheard() is None, "it has been raised"
        meet(store, rank, size, "replayed")
    return str(error.value), took
