"""Plans of operations that repeat, by all that was looked at when their arguments were checked."""

from __future__ import annotations

from typing import Any

import torch

from ep_kernels.collectives.collective_types import CollectiveOp
from ep_kernels.transports.collective_base import CollectivePlan, GatherArgs, Planner, ReduceArgs

Key = tuple[Any, ...]
Found = tuple[CollectivePlan, torch.Size, int, int]
"""A plan, the shape of out, the addresses of x and out; 0 where there is no out."""
_NONE: Key = ()
MAX_PLANS = 512
"""A model repeats far fewer; a program that does not would fill memory with them."""


class Repeats:
    """Plans by key."""

    def __init__(self, size: int, planner: Planner) -> None:
        pool, self._planner = planner.pool(), planner
        self._size, self._first, self._last = size, pool.start, pool.stop
        self._plans: dict[Key, tuple[CollectivePlan, torch.Size]] = {}
        self._missed: Key | None = None

    def find(self, op: str, x: Any, out: Any, num_sms: int | None, beside: object = False) -> Found | None:
        """None: there is no plan, or the arguments need another look; the next `keep` is of them."""
        self._missed = None
        if type(x) is not torch.Tensor or (num_sms is not None and type(num_sms) is not int):
            return None
        if type(beside) is not bool:
            return None
        if x.layout is not torch.strided or x.requires_grad or not x.is_contiguous():
            return None
        at = x.data_ptr()
        if not at or x.is_neg():
            return None
        place = at - self._first if self._first <= at < self._last else None
        if out is x:
            there, out_key = at, None
        elif out is None:
            there, out_key = 0, _NONE
        else:
            if type(out) is not torch.Tensor or out.layout is not torch.strided or out.requires_grad:
                return None
            if not out.is_contiguous():
                return None
            there = out.data_ptr()
            if not there or out.is_neg():
                return None
            out_key = self._out_key(x, out, at, there)
        key = op, num_sms, beside, x.shape, x.dtype, x.device, place, out_key
        found = self._plans.get(key)
        if found is None:
            self._missed = None if x.dtype.is_complex else key  # which may be conjugated
            return None
        return *found, at, there

    def _out_key(self, x: torch.Tensor, out: torch.Tensor, at: int, there: int) -> Key:
        """What decides whether an out at `there` is good for an x at `at`."""
        place = there - self._first if self._first <= there < self._last else None
        near = self._size * x.nbytes
        distance = there - at if -near < there - at < near else None
        return out.shape, out.dtype, out.device, place, distance

    def keep(self, args: GatherArgs | ReduceArgs, op: CollectiveOp, out: torch.Tensor) -> None:
        """Plan for the next operation like this one, which has begun: `find` returns the plan for the arguments of its
        last, unsuccessful call."""
        key, self._missed = self._missed, None
        plan = None if key is None else self._planner.plan_for(args, op)
        if key is None or plan is None:
            return
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan, out.shape

    def clear(self) -> None:
        self._plans.clear()
        self._missed = None
