"""One step of all ranks in loop-back, against the reference."""

from __future__ import annotations

import torch

from ep_kernels import reference
from ep_kernels.types import DispatchHandle, Mode, ScaleFormat
from tests.cases import RoutingCase
from tests.compare import expert, packed_layout, poison, same_bits, same_dispatch
from tests.gpu.loopback import BOTH, Loopback


def check(
    loop: Loopback,
    case: RoutingCase,
    mode: Mode,
    halves: tuple[int, ...] = (BOTH,),
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
    ids, weights = [case.topk_ids(r) for r in ranks], [fresh.topk_weights(r) for r in ranks]
    wanted, step = reference.dispatch(config, xs, ids, weights, scales=scales)
    looked_at = ids if previous is None else [torch.full_like(i, -1) for i in ids]
    got = loop.dispatch(xs, looked_at, weights, mode, scales, halves, previous)
    handles = [handle for _, handle in got]
    try:
        for (out, _), want in zip(got, wanted, strict=True):
            same_dispatch(out, want)
            if config.scale_format is ScaleFormat.UE8M0_PACKED:
                packed_layout(out.scales)
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
        back = loop.combine(ys, handles, sent, not backward, halves)
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
