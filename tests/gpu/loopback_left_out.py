"""Rank 0 of three stalls before an operation; the others begin it, give rank 0 up and go on without it. Then rank 0
wakes and launches that operation, while the slot it would write to holds an operation of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_kernels import reference
from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls.engine import RECEIVE, SEND, Call
from ep_kernels.transports.nvlink.calls.left_out import Unsent, leave_out
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.compare import expert, same_bits, same_dispatch
from tests.gpu.loopback import Loopback, Machine
from tests.gpu.loopback_check import check, combine_of
from tests.gpu.rank_engine import Filled

SURVIVORS, EPOCH = (1, 2), 7
ALL, REST = [True] * 3, [False, True, True]
_SETTLE_S = 20.0
PATIENCE_S = 60.0
"""Never waited for: the host gives rank 0 up."""


def three(
    layout: Layout, mode: Mode, machine: Machine | None = None, nodes: int = 1, **more: Any
) -> tuple[Loopback, RoutingCase]:
    """Three ranks, and steps that AUTO would run as HT. On two nodes rank 2 has one for itself."""
    case = RoutingCase(6, 3, 64, (7, 6, 5), "uniform", draw_seed(), max_tokens=8)
    fields = {"mode": mode, "layout": layout, "timeout_s": PATIENCE_S, "ll_max_tokens": 8, **more}
    if mode is not Mode.AUTO:
        del fields["ll_max_tokens"]
    return Loopback(lambda group: case.config(group, **fields), 3, 2, machine, nodes), case


def regroup(loop: Loopback, mask: Sequence[bool] = REST, epoch: int = EPOCH) -> None:
    """What `NvlinkTransport.set_active` does, on all ranks in `mask`."""
    engines = [loop.engines[rank] for rank, active in enumerate(mask) if active]
    remotes = [remote for remote, active in zip(loop.remotes, mask, strict=False) if active]
    for remote in remotes:
        remote.settle(_SETTLE_S, mask)
    words = [engine.tables.sequence() for engine in engines]
    dispatch, combine, barrier = (1 + max(each[i] for each in words) for i in range(3))
    for engine in engines:
        engine.tables.restart(dispatch, combine, barrier)
        engine.restart_flags(dispatch, combine)
        engine.tables.set_active(mask)
        engine.restart_slots()
    up = [remote.channel.up() if active else 0 for remote, active in zip(loop.remotes, mask, strict=False)]
    for engine, remote in zip(engines, remotes, strict=False):
        remote.go_on(mask, epoch, up, _SETTLE_S)
        remote.restart(dispatch, combine, barrier)
        engine.tables.set_network(remote.record())

    def unsent() -> list[Unsent]:
        return [found for engine in engines for found in engine.unsent(mask)]

    leave_out(lambda: loop.launch([e.barrier(left_out_epoch=epoch) for e in engines]), unsent, lambda rank: True)
    loop.launch([engine.barrier() for engine in engines])


def give_up(loop: Loopback, op: str, launch: Callable[[], None], told: str) -> None:
    """Ranks 1 and 2 launch an operation and give rank 0 up, as workers do. It ends there, but rank 0 has been told that
    they are in it."""
    before = _told(loop, told)
    for rank in SURVIVORS:
        loop.engines[rank].tables.host.give_up(0)
    launch()
    for rank in SURVIVORS:
        found = loop.engines[rank].tables.host.fault()
        assert isinstance(found, PeerTimeout)
        assert (found.peer, found.op) == (0, op)
    assert all(now > was for now, was in zip(_told(loop, told), before, strict=True)), "they were in it"


def _told(loop: Loopback, kind: str) -> list[int]:
    """What rank 0 has been told by the others."""
    flags = loop.memory[0].data[: loop.engines[0].tables.world.map.counts].view(torch.int64)
    at = abi.FLAGS.index(kind) * loop.size
    told = [int(word) for word in flags[at + 1 : at + loop.size]]
    for rank in loop.remotes[0].ranks if loop.remotes else ():
        told[rank - 1] = int(loop.remotes[0].words[abi.FLAGS.index(kind), rank])
    return told


@dataclass
class Step:
    """A dispatch of the survivors, right as it came."""

    steps: dict[int, Filled]
    outs: dict[int, DispatchOutput]
    handles: dict[int, DispatchHandle]
    wanted: list[DispatchOutput]
    routing: reference.ReferenceStep

    def check(self) -> None:
        """It is what it was, under the survivors' hands."""
        for rank, out in self.outs.items():
            same_dispatch(out, self.wanted[rank])

    def combine(self, loop: Loopback) -> tuple[list[Call], Callable[[], None]]:
        """Its combine by the survivors, and the check of what it brings."""
        dtype = loop.configs[1].resolved_output_dtype
        calls: list[Call] = []
        zs: dict[int, torch.Tensor] = {}
        for rank in SURVIVORS:
            y, engine = expert(self.outs[rank], dtype), loop.engines[rank]
            call, receive = engine.combine(CombineArgs(y, self.handles[rank], None, True))
            zs[rank] = receive(None)[0].fill_(float("nan"))
            calls.append(call)
        want = reference.combine(self.routing, [expert(out, dtype) for out in self.wanted])[0]

        def check_sums() -> None:
            for rank, z in zs.items():
                assert loop.engines[rank].tables.host.fault() is None
                same_bits(z, want[rank], f"z of rank {rank}")

        return calls, check_sums


def go_on(loop: Loopback, case: RoutingCase, mode: Mode) -> Step:
    """The survivors' next dispatch is what the reference says."""
    xs = [case.x(r, loop.configs[0].dtype) for r in range(3)]
    ids, weights = [case.topk_ids(r) for r in range(3)], [case.topk_weights(r) for r in range(3)]
    steps: dict[int, Filled] = {}
    outs: dict[int, DispatchOutput] = {}
    handles: dict[int, DispatchHandle] = {}
    for r in SURVIVORS:
        args = DispatchArgs(
            x=loop.put(xs[r]), scales=None, topk_ids=loop.put(ids[r]), topk_weights=loop.put(weights[r]), mode=mode,
            previous=None,
        )  # fmt: skip
        steps[r] = loop.engines[r].dispatch(args)
    loop.launch([step.call for step in steps.values()])
    wanted, routing = reference.dispatch(loop.configs[0], xs, ids, weights, active=REST)
    for r, step in steps.items():
        config = loop.configs[r]
        compact = config.resolved_layout in (Layout.GROUPED, Layout.FLAT) and config.exact_shapes
        num_rows = int(loop.engines[r].number(step, "num_rows")) if compact else None
        out, handle = loop.engines[r].finish(step, num_rows, EPOCH)
        outs[r], handles[r] = out, handle
    result = Step(steps, outs, handles, wanted, routing)
    result.check()
    return result


def hears(loop: Loopback, op: str) -> None:
    """Rank 0 was stopped, and by one that left it out."""
    said = loop.engines[0].tables.host.fault()
    assert type(said) is TransportError, said
    assert str(said).startswith(f"{op}: rank ")
    assert str(said).endswith(f"has gone on in epoch {EPOCH} without this rank")


def wakes_in_a_dispatch(loop: Loopback, case: RoutingCase, mode: Mode, before: int, cached: bool = False) -> None:
    """After `before` steps of all; `cached`: the dispatch uses the routing of the last one again."""
    handles = None
    for _ in range(before):
        handles = check(loop, replace(case, seed=draw_seed()), mode)
    late = replace(case, seed=draw_seed())
    xs = [late.x(r, loop.configs[r].dtype) for r in range(3)]
    ids, weights = [late.topk_ids(r) for r in range(3)], [late.topk_weights(r) for r in range(3)]
    steps = loop.begin(xs, ids, weights, mode, previous=handles if cached else None)
    give_up(loop, "dispatch", lambda: loop.launch([step.call for step in steps[1:]]), "STARTED")
    regroup(loop)
    live = go_on(loop, replace(case, seed=draw_seed()), mode)
    while live.steps[1].slot != steps[0].slot:
        live = go_on(loop, replace(case, seed=draw_seed()), mode)
    assert loop.engines[0].tables.host.fault() is None, "its host would launch"
    loop.launch([steps[0].call])
    live.check()
    calls, check_sums = live.combine(loop)
    loop.launch(calls)
    check_sums()
    hears(loop, "dispatch")


def wakes_in_a_combine(loop: Loopback, case: RoutingCase, mode: Mode) -> None:
    """The survivors have sent a combine in the slot, and not received it, when rank 0 launches its own."""
    for _ in range(3):
        check(loop, replace(case, seed=draw_seed()), mode)
    handles = check(loop, case, mode)
    slots = loop.engines[0].sizes.shape.combine_slots
    calls = combine_of(loop, handles)
    give_up(loop, "combine", lambda: loop.launch(calls[1:]), "COMBINE_STARTED")
    regroup(loop)
    for number in range(slots):
        live = go_on(loop, replace(case, seed=draw_seed()), mode)
        mine, check_sums = live.combine(loop)
        loop.launch(mine, SEND)
        if mine[0].args.slot == calls[0].args.slot:
            loop.launch(calls[:1])
        loop.launch(mine, RECEIVE)
        check_sums()
        assert number < slots
    hears(loop, "combine")
