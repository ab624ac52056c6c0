"""Dispatch and combine as differentiable functions: each is the other's backward, gradients of the weights included.

    out, handle = autograd.dispatch(comm, x, topk_ids, topk_weights)
    y = experts(out.tokens, ...)                       # rank-wise layouts: weight with out.topk_weights here
    z = autograd.combine(comm, y, handle, out.topk_weights)

Per-expert layouts: z_t = sum_k w_tk y_tk, so a row's gradient is w_tk dz_t (one dispatch of dz over the same routing),
and the gradient of w_tk is <dz_t, y_tk>, computed where the row is and returned beside dx by dispatch's backward.
Rank-wise layouts: the caller's own graph weights the rows; only the sum over ranks is ours.

Backward is collective too: every rank must run it, in the same order. One operation each way, no extra one for weights.

While `torch.compile` traces, the same formulas are recorded as operators (`ops.py`): the two classes at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ep_kernels import ops
from ep_kernels.communicator import MoECommunicator
from ep_kernels.errors import ArgumentError
from ep_kernels.routing import delivered
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout


def dispatch(
    comm: MoECommunicator,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    step_tokens: int | None = None,
) -> tuple[DispatchOutput, DispatchHandle]:
    """As `MoECommunicator.dispatch`, differentiable in x and topk_weights.

    `out.tokens` is a copy (it does not expire) whose undelivered rows are 0; `out.topk_weights` is, for per-expert
    layouts too, the weight of every row (float32 [L, slots] | [N]): the gradient of topk_weights flows through it.

    Raises ArgumentError where rows are not plain floating point of one dtype both ways.
    """
    if torch.compiler.is_compiling():
        return _trace_dispatch(comm, x, topk_ids, topk_weights, step_tokens)
    config = comm.config
    if config.quantize or config.scale_columns or config.dtype != config.resolved_output_dtype:
        raise ArgumentError("comm", "an unquantised communicator whose output_dtype is its dtype", config.dtype)
    tokens, weights, out, handle = _Dispatch.apply(x, topk_weights, comm, topk_ids, step_tokens)
    return replace(out, tokens=tokens, topk_weights=weights), handle


def combine(
    comm: MoECommunicator, y: torch.Tensor, handle: DispatchHandle, row_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """As `MoECommunicator.combine`, differentiable in y and, per-expert layouts, in the weights.

    Args:
        row_weights: `out.topk_weights` of `dispatch` above. Needed by per-expert layouts, not looked at by others.
    """
    per_expert = comm._site.layout.per_expert
    if per_expert and row_weights is None:
        raise ArgumentError("row_weights", "out.topk_weights of autograd.dispatch", None)
    if torch.compiler.is_compiling():
        return _trace_combine(comm, y, handle, row_weights if per_expert else None)
    z: torch.Tensor = _Combine.apply(y, row_weights if per_expert else None, comm, handle)
    return z


def _copy(out: DispatchOutput) -> torch.Tensor:
    return torch.where(delivered(out)[..., None], out.tokens, 0)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, comm: MoECommunicator, ids: torch.Tensor, tokens: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchOutput, DispatchHandle]:
        out, handle = comm.dispatch(x, ids, weights.detach().clone(), step_tokens=tokens)
        ctx.comm, ctx.handle = comm, handle
        rows = out.topk_weights.clone() if out.topk_weights is not None else comm.row_weights(handle)
        return _copy(out), rows, out, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, grad_rows: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        request = ctx.comm.combine_async(
            grad_tokens.contiguous(), ctx.handle, row_weights=grad_rows.contiguous(), apply_weights=False
        )
        return request.wait(), request.weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, rows: torch.Tensor | None, comm: MoECommunicator, handle: DispatchHandle
    ) -> torch.Tensor:
        ctx.comm, ctx.handle = comm, handle
        ctx.save_for_backward(y, rows)
        return comm.combine(y.contiguous(), handle)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: torch.Tensor) -> tuple[Any, ...]:
        y, rows = ctx.saved_tensors
        out, _ = ctx.comm.dispatch(grad_z.contiguous(), None, None, previous_handle=ctx.handle)
        return *_row_gradients(out, y, rows), None, None


def _row_gradients(
    out: DispatchOutput, y: torch.Tensor, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dy, d rows) of combine, from dz as it was dispatched."""
    grad = _copy(out)
    if rows is None:
        return grad, None
    wide = grad.float()
    held = delivered(out)[..., None]
    grad_rows = torch.where(held, wide * y.float(), 0.0).sum(-1)
    return (wide * rows[..., None]).to(y.dtype), grad_rows


# Under torch.compile: tensors and plain values only, since that is what it can follow through a Function.


def _trace_dispatch(
    comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step_tokens: int | None
) -> tuple[DispatchOutput, DispatchHandle]:
    site = comm._site
    if site.scales or site.dtype != site.output_dtype:
        raise ArgumentError("comm", "an unquantised communicator whose output_dtype is its dtype", site.dtype)
    mode, kept = ops.mode_of(site, step_tokens), weights.detach().clone()
    results = _TracedDispatch.apply(
        x, weights, kept, ids, site.order, site.backward_order, site.comm, step_tokens, site.owner, comm._epoch,
        mode.value, site.layout,
    )  # fmt: skip
    out = ops.output_of(site.layout, site.num_groups, results)
    handle = ops.handle_of(comm, out, mode, results[:-1], ids, kept)
    return replace(out, tokens=_copy(out), topk_weights=results[-1]), handle


def _trace_combine(
    comm: MoECommunicator, y: torch.Tensor, handle: DispatchHandle, rows: torch.Tensor | None
) -> torch.Tensor:
    site = comm._site
    owner, epoch, num_tokens, algorithm, _, routing = ops.carried(handle)
    z: torch.Tensor = _TracedCombine.apply(
        y, rows, handle.topk_ids, handle.topk_weights, site.order, site.backward_order, site.comm, owner, epoch,
        num_tokens, algorithm, site.layout, site.num_groups, *routing,
    )  # fmt: skip
    return z


class _TracedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor, order: torch.Tensor,
        backward_order: torch.Tensor, comm: str, step_tokens: int | None, owner: int, epoch: int, algorithm: str,
        layout: Layout,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """The operator's outputs without the stamp, and the weight of every row."""
        stamp, *results = torch.ops.crossdock.dispatch(order, comm, x, None, ids, kept, step_tokens, *ops.FRESH)
        order.copy_(stamp)
        routing = results[ops.OUTPUTS :]
        rows = results[4]
        if layout.per_expert:
            lead = list(results[0].shape[:-1])
            rows = torch.ops.crossdock.row_weights(comm, owner, epoch, ids.shape[0], algorithm, lead, routing)
        else:
            rows = rows.clone()
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(ids, *routing)
        ctx.order = backward_order  # not saved: other backward passes write it, which autograd need not mind
        ctx.plain = comm, owner, epoch, algorithm
        return *results, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor, *rest: torch.Tensor) -> tuple[Any, ...]:
        ids, *routing = ctx.saved_tensors
        order = ctx.order
        comm, owner, epoch, algorithm = ctx.plain
        handle = (owner, epoch, ids.shape[0], algorithm, list(grad_tokens.shape[:-1]), routing)
        stamp, grad_x, grad_weights = torch.ops.crossdock.combine(
            order, comm, grad_tokens.contiguous(), *handle, rest[-1].contiguous(), False
        )
        order.copy_(stamp)
        return grad_x, grad_weights, *(None,) * 10


class _TracedCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, rows: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor,
        order: torch.Tensor, backward_order: torch.Tensor, comm: str, owner: int, epoch: int, num_tokens: int,
        algorithm: str, layout: Layout, groups: int, *routing: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        handle = (owner, epoch, num_tokens, algorithm, list(y.shape[:-1]), list(routing))
        stamp, z = torch.ops.crossdock.combine(order, comm, y.contiguous(), *handle, None, True)
        order.copy_(stamp)
        ctx.save_for_backward(y, rows, ids, weights, *routing)
        ctx.order = backward_order
        ctx.plain = comm, owner, epoch, algorithm, layout, groups
        return z  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: torch.Tensor) -> tuple[Any, ...]:
        y, rows, ids, weights, *routing = ctx.saved_tensors
        order = ctx.order
        comm, owner, epoch, algorithm, layout, groups = ctx.plain
        handle = (owner, epoch, ids.shape[0], algorithm, list(y.shape[:-1]), routing)
        stamp, *results = torch.ops.crossdock.dispatch(
            order, comm, grad_z.contiguous(), None, ids, weights, None, *handle
        )
        order.copy_(stamp)
        out = ops.output_of(layout, groups, results)
        return *_row_gradients(out, y, rows), *(None,) * (11 + len(routing))
