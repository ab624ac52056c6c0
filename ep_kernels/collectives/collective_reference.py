"""The definition of the collectives: all ranks in one process, plain torch, no speed. Transports give its bits.

    outs = all_gather(xs)              # lists, one entry per rank
    outs = reduce_scatter(xs)
    outs = all_reduce(xs)

A sum is made in fp32 (of fp32 inputs, too), begins with the value of the lowest active rank, adds the others in
ascending rank, and is rounded once, to nearest even. Bitwise equal everywhere, but for the encoding of a NaN in a sum.

Inactive ranks (`set_active`): sums leave them out. Their shard of a gathered `out` is not written: an `out` that the
caller gave keeps its bytes there, one that the operation allocated has zeros. What an inactive rank gets itself is
undefined; here None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]
Results = list[torch.Tensor | None]


def all_gather(xs: Tensors, *, active: Sequence[bool] | None = None, outs: Tensors | None = None) -> Results:
    """x [n, ...] of every rank, any dtype, moved as bytes -> out [R * n, ...] on every rank.

    Args:
        xs: by rank, of one shape and dtype. A 0-d x gives [R].
        outs: what each rank's `out` holds before; None: zeros.
    """
    alive = _alive(active, len(xs))
    shards = [x.reshape(1) if x.ndim == 0 else x for x in xs]
    results: Results = []
    for rank in range(len(xs)):
        before = torch.zeros_like(torch.cat(list(shards))) if outs is None else outs[rank]
        parts = before.chunk(len(xs)) if before.shape[0] else [before] * len(xs)
        joined = torch.cat([shard if on else kept for shard, on, kept in zip(shards, alive, parts, strict=True)])
        results.append(joined if alive[rank] else None)
    return results


def all_reduce(xs: Tensors, *, active: Sequence[bool] | None = None) -> Results:
    """x of every rank, bfloat16, float16 or float32, of one shape -> their sum, in the same dtype."""
    alive = _alive(active, len(xs))
    total = _sum([x for x, on in zip(xs, alive, strict=True) if on])
    return [total.clone() if on else None for on in alive]


def reduce_scatter(xs: Tensors, *, active: Sequence[bool] | None = None) -> Results:
    """x [R * n, ...] of every rank, as `all_reduce` -> rows [rank * n, (rank + 1) * n) of the sum."""
    alive = _alive(active, len(xs))
    total = _sum([x for x, on in zip(xs, alive, strict=True) if on])
    rows = total.shape[0] // len(xs)
    return [total[r * rows : (r + 1) * rows].clone() if on else None for r, on in enumerate(alive)]


def _sum(xs: Tensors) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


def _alive(active: Sequence[bool] | None, size: int) -> tuple[bool, ...]:
    return (True,) * size if active is None else tuple(active)
