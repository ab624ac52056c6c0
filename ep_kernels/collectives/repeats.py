"""Plans of operations that repeat, by all that was looked at when their arguments were checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_kernels.collectives.collective_types import CollectiveOp
from ep_kernels.transports.collective_base import CollectivePlan

Key = tuple[Any, ...]
MAX_PLANS = 512
"""A model repeats far fewer; a program that does not would fill memory with them."""


class Repeats:
    """Plans by key.

    Args:
        size: R.
        offset_of: see `CollectiveTransport.offset_of`.
    """

    def __init__(self, size: int, offset_of: Callable[[torch.Tensor], int | None]) -> None:
        self._size, self._offset_of = size, offset_of
        self._plans: dict[Key, tuple[CollectivePlan, tuple[int, ...]]] = {}

    def key(self, op: CollectiveOp, x: Any, out: Any, num_sms: int | None) -> Key | None:
        """What a plan is kept by; None for arguments that need another look."""
        first = _told(x)
        if first is None or (num_sms is not None and type(num_sms) is not int):
            return None
        if out is None:
            return op, num_sms, first, self._offset_of(x)
        second = _told(out)
        if second is None:
            return None
        apart = out.data_ptr() - x.data_ptr()
        near = self._size * x.numel() * x.element_size()
        distance = apart if -near < apart < near else None
        return op, num_sms, first, self._offset_of(x), second, self._offset_of(out), distance

    def find(self, key: Key) -> tuple[CollectivePlan, tuple[int, ...]] | None:
        """(plan, shape of out)."""
        return self._plans.get(key)

    def keep(self, key: Key, plan: CollectivePlan, out: torch.Tensor) -> None:
        """From now on `find` has it."""
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan, tuple(out.shape)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


def _told(tensor: Any) -> tuple[Any, ...] | None:
    """What decides whether a tensor is a good argument."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.requires_grad or not tensor.is_contiguous():
        return None
    return tensor.shape, tensor.dtype, tensor.device
