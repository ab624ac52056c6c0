"""One step of all ranks in loop-back, against the reference; and what a stopped one leaves."""

from __future__ import annotations

from dataclasses import replace

import torch

from ep_kernels import reference
from ep_kernels.errors import HandleError
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.types import DispatchHandle, Mode, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.compare import expert, filled_rows, packed_layout, poison, same_bits, same_dispatch
from tests.gpu.loopback import BOTH, Loopback


def check(
    loop: Loopback,
    case: RoutingCase,
    mode: Mode,
    phases: tuple[int, ...] = (BOTH,),
    backward: bool = False,
    again: RoutingCase | None = None,
    previous: list[DispatchHandle] | None = None,
) -> list[DispatchHandle]:
    """One step of all ranks is what the reference says. With `again` and the `previous` handles of the case: its
    routing with the payload and weights of `again`."""
    config, ranks, fresh = loop.configs[0], range(case.num_ranks), again or case
    xs = [fresh.x(r, config.dtype) for r in ranks]
    columns = config.scale_columns
    scales = [fresh.scales(r, columns, config.scale_dtype) for r in ranks] if columns else None
    if config.quantize == "nvfp4":
        scales = [torch.tensor([448 * 6 / 2.0**r]) for r in ranks]
    ids, weights = [case.topk_ids(r) for r in ranks], [fresh.topk_weights(r) for r in ranks]
    wanted, step = reference.dispatch(config, xs, ids, weights, scales=scales)
    looked_at = ids if previous is None else [torch.full_like(i, -1) for i in ids]
    before = [engine.tables.host.num_dropped for engine in loop.engines]
    got = loop.dispatch(xs, looked_at, weights, mode, scales, phases, previous)
    handles = [handle for _, handle in got]
    try:
        for (out, _), want in zip(got, wanted, strict=True):
            same_dispatch(out, want, filled_rows(config, mode))
            if config.scale_format is ScaleFormat.UE8M0_PACKED:
                packed_layout(out.scales)
        for engine, was, want in zip(loop.engines, before, wanted, strict=True):
            assert engine.tables.host.num_dropped == was + int(want.num_dropped)
        dtype = config.resolved_output_dtype
        numbers = home = None
        if backward:
            shape = () if config.resolved_layout.per_expert else (config.topk,)
            numbers = [torch.randn(*out.tokens.shape[:-1], *shape) for out, _ in got]
        zs, home = reference.combine(
            step, [expert(out, dtype) for out in wanted], row_weights=numbers, apply_weights=not backward
        )
        ys = [expert(out, dtype) for out, _ in got]
        sent = None if numbers is None else [loop.put(n) for n in numbers]
        back = loop.combine(ys, handles, sent, not backward, phases)
        for r, (z, carried) in enumerate(back):
            same_bits(z, zs[r], f"z of rank {r}")
            if home is not None:
                assert carried is not None
                same_bits(carried, home[r], f"weights of rank {r}")
    except AssertionError as error:
        raise AssertionError(f"{case} {mode}: {error}") from error
    for out, _ in got:
        poison(out.tokens)
    return handles


def combine_of(loop: Loopback, handles: list[DispatchHandle], numbers: list[torch.Tensor] | None = None) -> list[Call]:
    """All ranks' combine of rows of ones, and of `numbers` beside them, ready to be launched; zeros lie where its
    results will."""
    calls = []
    for rank, (config, engine, handle) in enumerate(zip(loop.configs, loop.engines, handles, strict=True)):
        y = loop.put(torch.ones(*handle.rows_shape, config.hidden_size, dtype=torch.bfloat16))
        call, receive = engine.combine(CombineArgs(y, handle, None if numbers is None else numbers[rank], True))
        receive(None)[0].zero_()
        calls.append(call)
    return calls


def check_what_a_stop_left(
    loop: Loopback, case: RoutingCase, mode: Mode, left: int | None, phases: tuple[int, ...]
) -> None:
    """Handles whose memory holds `left` in each byte (None: noise), as after a dispatch that was stopped before it
    wrote, brought again while the abort word is set: nothing is delivered, nothing but outputs is written."""
    ranks = range(case.num_ranks)
    handles = check(loop, case, mode)
    for engine, handle in zip(loop.engines, handles, strict=True):
        for memory in (handle.state.routing.bytes(), handle.state.carried.bytes()):
            memory.copy_(torch.randint(256, memory.shape) if left is None else torch.full(memory.shape, left))
        engine.tables.stop()
    before = [_whole(loop, rank) for rank in ranks]
    xs = [case.x(r, torch.bfloat16) for r in ranks]
    ids, weights = [case.topk_ids(r) for r in ranks], [case.topk_weights(r) for r in ranks]
    steps = loop.begin(xs, ids, weights, mode, previous=handles)
    for engine, step in zip(loop.engines, steps, strict=True):
        for name in ("counts", "num_rows"):
            engine.number(step, name).fill_(77)
        if filled_rows(engine.config):
            engine.number(step, "topk_ids").fill_(-5)
    calls = combine_of(loop, handles)
    for launched in ([step.call for step in steps], calls):
        for phase in phases:
            loop.launch(launched, phase)
    for engine, step in zip(loop.engines, steps, strict=True):
        assert not engine.number(step, "counts").any()
        assert int(engine.number(step, "num_rows")) == 0
        if filled_rows(engine.config):
            assert (engine.number(step, "topk_ids") == engine.config.absent_id).all()
    for rank, call in enumerate(calls):
        assert bool(call.keep[-2].isnan().all())
        for what, was, now in zip(("region", "counters"), before[rank], _whole(loop, rank), strict=True):
            same_bits(now, was, f"{what} of rank {rank}")
    loop.preset(50)
    check(loop, replace(case, seed=draw_seed()), mode)


def _whole(loop: Loopback, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of a rank's region and counters. Not of `items_taken`: warps take work before they know the abort
    word, and a rank that was stopped restarts with zeros."""
    counters = loop.engines[rank].tables.state.clone()
    begin = abi.State.items_taken.offset // counters.itemsize
    counters[begin : begin + abi.State.items_taken.size // counters.itemsize] = 0
    return loop.memory[rank].data.clone(), counters


def hear(loop: Loopback, op: str) -> None:
    """Every rank finds that its routing and that of the last rank differ, once."""
    last = loop.size - 1
    for rank, engine in enumerate(loop.engines):
        assert engine.tables.host.fault() is None
        said = engine.tables.host.finding()
        assert isinstance(said, HandleError), rank
        assert str(said).startswith(f"{op}: this rank brought the routing of dispatch ")
        assert f", rank {0 if rank == last else last} that of dispatch " in str(said)
        assert engine.tables.host.finding() is None, "told once"
