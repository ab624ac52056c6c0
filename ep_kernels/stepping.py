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

from ep_kernels.config import MoEConfig
from ep_kernels.errors import HandleError
from ep_kernels.in_flight import InFlight
from ep_kernels.lazy_output import written
from ep_kernels.membership import GroupMember
from ep_kernels.transports import base
from ep_kernels.types import KeptStep


class SteppingMember(GroupMember[MoEConfig, base.Transport]):
    """What a MoECommunicator does in steps."""

    _quick: base.QuickCalls | None = None
    _dispatches: InFlight
    _combines: InFlight
    _received: torch.Tensor | None
    _step_number: int = -1
    """Of the dispatch of the step that was begun last."""

    def begin_step(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, step_tokens: int
    ) -> KeptStep | None:
        """`dispatch`, with GROUPED rows; `end_step` is the next operation. Its tensors are valid until then, but
        `counts`, which is until the next step. None: nothing has begun, and `dispatch` serves this call (on GPUs; with
        several hosts, scales, `validate`, rows that may overflow, gradients; where an argument is wrong). Collective.

        Args: as `dispatch`.
        Raises: PeerTimeout, AbortedError, ClosedError.
        """
        quick = self._quick
        if quick is None or self._received is not None or self._fault is not None or self._closed:
            return None
        try:
            step = quick.begin_step(x, topk_ids, topk_weights, step_tokens)
        except BaseException as error:
            self._broken(error)
            raise
        if step is not None:
            self._dispatches.num_begun = self._step_number = self._dispatches.num_begun + 1
        return step

    def end_step(self, step: KeptStep, out: torch.Tensor) -> torch.Tensor:
        """`combine` of the rows in `step.y` into out [T, H], contiguous, of the output dtype or a float `config.dtype`.
        Collective.

        Raises: ArgumentError, HandleError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        if self._fault is not None or self._closed:
            self._ready("combine")
        if self._quick is None:
            raise HandleError("step: made by another communicator")
        if self._dispatches.num_begun != self._step_number:
            raise HandleError("step: expected end_step before the next dispatch, whose rows take its memory")
        written(out)
        try:
            self._quick.end_step(step, out)
        except BaseException as error:
            self._broken(error)
            raise
        self._combines.num_begun += 1
        return out

    def _leave(self) -> None:
        super()._leave()
        if self._quick is not None:
            self._quick.close()

    def _is_free(self, kind: InFlight) -> bool:
        """Whether nothing of this rank's own stands against an operation."""
        return self._fault is None and not self._closed and kind.has_room()
