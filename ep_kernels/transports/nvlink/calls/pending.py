"""Operations whose send phase is done, or left for `wait` to do with the other."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ep_kernels.transports.nvlink.calls.engine import Call, Dispatch
from ep_kernels.types import DispatchHandle, DispatchOutput


class Finisher(Protocol):
    """Second halves of operations, which the transport carries out."""

    def finish(self, step: Dispatch, phases: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Receive half of a dispatch."""

    def buffers(self, step: Dispatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""

    def receive(self, call: Call, phases: int) -> None:
        """Receive half of a combine."""


class NvlinkDispatch:
    """See `base.PendingDispatch`.

    Args:
        transport: whose it is.
        step: what has been prepared, and sent unless both phases are left.
        phases: RECEIVE or BOTH.
    """

    def __init__(self, transport: Finisher, step: Dispatch, phases: int) -> None:
        self._transport, self._step, self._phases = transport, step, phases
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        """See `base.PendingDispatch`."""
        if self._result is None:
            self._result = self._transport.finish(self._step, self._phases)
        return self._result

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        return self._transport.buffers(self._step)


class NvlinkCombine:
    """See `base.PendingCombine`. `receive(out)` completes the arguments of `call`."""

    def __init__(self, transport: Finisher, call: Call, receive: Any, phases: int) -> None:
        self._transport, self._call, self._receive, self._phases = transport, call, receive, phases
        self._result: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `base.PendingCombine`."""
        if self._result is None:
            z, weights = self._receive(out)
            self._transport.receive(self._call, self._phases)
            if out is not None and z is not out:
                z = out.copy_(z)
            self._result = z, weights
        return self._result
