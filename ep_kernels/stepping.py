"""Steps of a layer in memory that is kept between them: a dispatch, the experts, a combine, again and again.

    step = comm.begin_step(x, topk_ids, topk_weights, step_tokens)
    if step is not None:                   # else dispatch and combine
        experts(step.tokens, step.offsets, step.counts, out=step.y)
        comm.end_step(step, z)

The same operations for the other ranks, who may call `dispatch` and `combine` instead. What is made anew for each of
those (a handle, a routing that lives as long as it, tensors) is made once.
"""

from __future__ import annotations

import torch

from ep_kernels import checks
from ep_kernels.config import MoEConfig
from ep_kernels.errors import ArgumentError, HandleError
from ep_kernels.in_flight import InFlight
from ep_kernels.lazy_output import written
from ep_kernels.membership import GroupMember
from ep_kernels.transports import base
from ep_kernels.types import DispatchHandle, KeptStep

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""x [T, H], or (x, scales [T, S])."""


class SteppingMember(GroupMember[MoEConfig, base.Transport]):
    """What a MoECommunicator does in steps."""

    _dispatches: InFlight
    _combines: InFlight
    _received: torch.Tensor | None
    _device: str
    _wide_ids: bool
    _z_dtypes: tuple[torch.dtype, ...]
    _ll_max_tokens: int
    _step: KeptStep | None = None
    """Begun, and not ended."""
    _step_number: int = -1
    """Of the dispatch of the step that was begun last."""

    def _dispatch_args(
        self, x: Payload, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None,
        previous: DispatchHandle | None, step_tokens: int | None, at_once: bool,
    ) -> base.DispatchArgs:  # fmt: skip
        if self._transport.checks or self._fault is not None or self._closed:
            self._ready("dispatch")
        config, device = self._config, self._device
        body, scales = checks.payload(x, config, device)
        rows = body.shape[0]
        tokens = config.max_tokens_per_rank if step_tokens is None else checks.step_tokens(step_tokens, rows, config)
        mode = checks.resolve_mode(config, tokens, self._ll_max_tokens)
        if previous is not None:
            previous = self._own(previous)
            if previous.num_tokens != rows:
                raise HandleError(f"previous_handle: made for {previous.num_tokens} tokens, x has {rows}")
            mode, topk_ids = previous.mode, previous.topk_ids
            topk_weights = previous.topk_weights if topk_weights is None else topk_weights
        ids = checks.topk_ids(topk_ids, rows, config, device, self._wide_ids)
        weights = checks.topk_weights(topk_weights, rows, config, device)
        if self._dispatches.pending:
            self._dispatches.check(self._run)
        return base.DispatchArgs(body, scales, ids, weights, mode, previous, at_once, tokens)

    def _own(self, handle: DispatchHandle) -> DispatchHandle:
        """The handle, checked, with the transport's own state (a compiled function's carries tensors instead)."""
        checks.handle(handle, self._id, self._epoch)
        return self._transport.restore(handle) if type(handle.state) is tuple else handle

    def begin_step(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, step_tokens: int
    ) -> KeptStep | None:
        """`dispatch`, with GROUPED rows; `end_step` is the next operation. Its tensors are valid until then, but
        `counts`, which is until the next step. None: nothing has begun, and `dispatch` serves this call (on GPUs; with
        several hosts, scales, `validate`, rows that may overflow, gradients, a request under way). Collective.

        Args: as `dispatch`.
        Raises: ArgumentError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        transport, dispatches = self._transport, self._dispatches
        if not transport.keeps_steps or self._received is not None or dispatches.pending or self._combines.pending:
            return None
        if torch.is_grad_enabled():  # autograd may have saved the rows that are overwritten
            return None
        args = self._dispatch_args(x, topk_ids, topk_weights, None, step_tokens, at_once=True)
        try:
            step = self._step = transport.begin_step(args)
        except BaseException as error:
            self._broken(error)
            raise
        dispatches.num_begun = self._step_number = dispatches.num_begun + 1
        return step

    def end_step(self, step: KeptStep, out: torch.Tensor) -> torch.Tensor:
        """`combine` of the rows in `step.y` into out [T, H], contiguous, of the output dtype or a float `config.dtype`.
        Collective.

        Raises: ArgumentError, HandleError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        if self._transport.checks or self._fault is not None or self._closed:
            self._ready("combine")
        if self._dispatches.num_begun != self._step_number:
            raise HandleError("step: expected end_step before the next dispatch, whose rows take its memory")
        if step is not self._step or step is None:
            raise HandleError("step: expected the one that was begun last and has not ended")
        checks.tensor("out", out, (step.num_tokens, self._config.hidden_size), self._z_dtypes, self._device)
        if checks.share_memory(step.y, out):
            raise ArgumentError("out", "memory apart from y", "bytes in common")
        written(out)
        self._step = None
        try:
            self._transport.end_step(step, out)
        except BaseException as error:
            self._broken(error)
            raise
        self._combines.num_begun += 1
        return out

    def _forget(self) -> None:
        self._step = None

    def _leave(self) -> None:
        super()._leave()
        self._step = None  # it keeps the region
