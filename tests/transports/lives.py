"""Stories of whole communicators: several at once, born and closed, refused, run for long."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import MoECommunicator
from ep_kernels.errors import ConfigError, EpError, HandleError
from ep_kernels.types import DispatchOutput, Layout, Mode
from tests.cases import RoutingCase
from tests.compare import poison
from tests.transports.steps import Inputs, Place, Store, check_combine, check_dispatch, check_step, next_case, start


def two_communicators(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, overrides: dict[str, Any]
) -> None:
    """Interleaved operations of two; a handle of one is refused by the other; closing one leaves the other."""
    place = Place(rank, size, store, transport)
    other = replace(case, hidden_size=2 * case.hidden_size)
    with place.communicator(case, "a", **overrides) as a, place.communicator(other, "b", **overrides) as b:
        for turn in range(4):
            first, inputs = start(a, next_case(case, turn))
            check_step(b, next_case(other, turn))
            out, handle = first.wait()
            expected = check_dispatch(a, inputs, out)
            check_step(b, next_case(other, turn + 10))
            check_combine(a, expected, out, handle)
            with pytest.raises(HandleError, match="another communicator"):
                b.combine(torch.empty(0), handle)
            with pytest.raises(HandleError, match="another communicator"):
                b.combine_input(handle)
            assert not b.is_current(handle)
        a.close()
        check_step(b, other)


def mismatch(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, odd_rank: int, change: dict[str, Any]
) -> str:
    """One rank is configured differently: all of them refuse, with the same words."""
    place = Place(rank, size, store, transport)
    config = place.config(case, "first", **(change if rank == odd_rank else {}))
    with pytest.raises(ConfigError) as error:
        MoECommunicator(config)
    return str(error.value)


def epoch_mismatch(rank: int, size: int, store: Store, transport: str, case: RoutingCase) -> str:
    """One rank's group is an epoch ahead."""

    class Shifted:
        def __init__(self, inner: Any) -> None:
            self.rank, self.size, self.epoch = inner.rank, inner.size, int(inner.rank == 1)
            self.all_gather = inner.all_gather

    place = Place(rank, size, store, transport)
    with pytest.raises(EpError, match="epoch") as error:
        MoECommunicator(case.config(Shifted(place.group("first")), **place.overrides()))
    return str(error.value)


def born_and_closed(rank: int, size: int, store: Store, transport: str, case: RoutingCase, times: int) -> list[str]:
    """Communicators come and go; returns what the process holds more than after the first few."""
    place = Place(rank, size, store, transport)
    before: dict[str, int] = {}
    for turn in range(times):
        with place.communicator(case, f"life-{turn}") as comm:
            check_step(comm, next_case(case, turn))
            comm.barrier()
        if turn == 4:
            before = holdings()
    return [f"{name}: {before[name]} -> {n}" for name, n in holdings().items() if n > before[name]]


def holdings() -> dict[str, int]:
    """Open files, shared mappings, names under /dev/shm, threads of this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        shared = sum(" rw-s " in line or "memfd" in line for line in maps)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": shared,
        "shm": sum("crossdock" in name for name in os.listdir("/dev/shm")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def ll_and_ht_agree(rank: int, size: int, store: Store, transport: str, case: RoutingCase, layout: Layout) -> None:
    """An AUTO communicator switching between its algorithms gives the dispatch of both, bit for bit."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, mode=Mode.AUTO, layout=layout, ll_max_tokens=0) as comm:
        assert comm.ll_max_tokens == 0
        modes = set()
        small = replace(case, tokens=(0,) * size)
        for turn in range(6):
            modes.add(check_step(comm, next_case(case, turn)).mode)
            handle = check_step(comm, small, step_tokens=0)
            modes.add(handle.mode)
        assert modes == {Mode.LL, Mode.HT}
    with place.communicator(case, "second", mode=Mode.AUTO, layout=layout, ll_max_tokens=1 << 20) as comm:
        inputs = Inputs.of(case, comm.config)
        out, handle = comm.dispatch(*inputs.arguments(rank, comm.capabilities.device_type))
        assert handle.mode is Mode.LL
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)


def counted_iterations(comm: MoECommunicator, case: RoutingCase, iterations: int = 10_000, block: int = 500) -> None:
    """Fresh routing in every iteration; rows carry (place in canonical order, iteration), so a stale or misplaced row
    shows. All numbers are small integers, so sums are exact and z is known without the reference."""
    draw = torch.Generator().manual_seed(case.seed + comm.rank)
    same = torch.Generator().manual_seed(case.seed)
    most, shape = comm.config.max_tokens_per_rank, (block, comm.config.max_tokens_per_rank, case.topk)
    device = comm.capabilities.device_type
    for first in range(0, iterations, block):
        ids = torch.randint(-1, case.num_experts, shape, generator=draw, dtype=torch.int32).to(device)
        weights = torch.randint(1, 5, shape, generator=draw).float().to(device)
        gain = torch.where(ids >= 0, weights, 0).sum(2, keepdim=True)
        x = torch.empty(block, most, case.hidden_size, device=device)
        x[:] = torch.arange(first, first + block, device=x.device)[:, None, None] % 4096
        x[:, :, 0] = comm.rank * most + torch.arange(most, device=x.device)
        steps = torch.randint(0, most + 1, (block,), generator=same).tolist()
        for i, step in enumerate(steps):
            rows = int(torch.randint(0, step + 1, (1,), generator=draw))
            z, out = counted_step(comm, x[i, :rows], ids[i, :rows], weights[i, :rows], step)
            where = f"{case}: iteration {first + i}"
            assert torch.equal(z, x[i, :rows] * gain[i, :rows]), where
            assert bool((out.tokens[:, 1:] == (first + i) % 4096).all()), f"{where}: a stale row"
            if i % 10 == 0:
                expert_of_row = torch.repeat_interleave(torch.arange(len(out.counts), device=device), out.counts)
                assert bool(((out.tokens[:, 0] + expert_of_row * 64).diff() >= 0).all()), f"{where}: rows out of order"
            poison(out.tokens)


def counted_step(
    comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step_tokens: int
) -> tuple[torch.Tensor, DispatchOutput]:
    """One step with experts that do nothing."""
    out, handle = comm.dispatch(x, ids, weights, step_tokens=step_tokens)
    return comm.combine(out.tokens, handle), out
