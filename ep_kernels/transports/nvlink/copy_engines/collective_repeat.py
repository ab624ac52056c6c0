"""An operation like an earlier one: its records are filled but for two addresses, and one call launches it.

A plan is valid for arguments of the same shape, dtype, registered offset and options, and only as long as
the same ranks take part. A plan begins nothing where there may be something to tell, where the kernel before was on
another stream, or, for copy engines, under graph capture: it says None, and the operation takes the long way, which
sees to all of that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.copy_engines.collective_work import CopyWork, KernelWork, WorkOwner
from ep_kernels.transports.nvlink.copy_engines.copies import CopyEngines
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, KernelRepeat, PushTemplate, Quiet
from ep_kernels.transports.nvlink.gpu import launch


class PlanOwner(WorkOwner, Protocol):
    """What a plan asks of its transport."""

    def undisturbed(self) -> torch.cuda.Stream | None:
        """The current stream, where a kernel may begin on it as far as Python knows; else None."""

    def used(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """A kernel that uses these was launched on it."""

    def untroubled(self) -> int | None:
        """The current CUstream, where copies may begin behind it, whatever others are behind; else None."""

    def note_capture(self) -> None:
        """A CUDA graph has captured an operation."""


class KernelPlan:
    """One launch.

    Args:
        kernel: a `launch.Kernel`.
        addressed: what of its record has `x` and `out`: itself, or its only part.
        ranks: whose shards come, this rank first.
        quiet: what it looks at first.
    """

    def __init__(
        self, owner: PlanOwner, kernel: Any, call: Call, addressed: Any, ranks: Sequence[int], quiet: Quiet
    ) -> None:
        self._owner, self._ranks, self._epoch, how = owner, ranks, owner.epoch, call.launch
        prepared = kernel.prepared(
            how.num_blocks, call.variant.num_threads, cooperative=how.cooperative, overlapped=how.overlapped
        )
        self._library = kernel.library
        at, kind = ctypes.addressof(addressed), type(addressed)
        x, out = at + kind.x.offset, at + kind.out.offset
        self._record = KernelRepeat(quiet.address, ctypes.addressof(prepared), ctypes.addressof(call.args), x, out)
        self._address, self._repeat = ctypes.addressof(self._record), self._library.cd_repeat_kernel
        self._keep = call.args, kernel, quiet

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> KernelWork | None:
        stream = self._owner.undisturbed()
        if stream is None:
            return None
        status = self._repeat(self._address, stream.cuda_stream, x_at, out_at)
        if status:
            if status == DISTURBED:
                return None
            launch.raise_refused(launch.LAUNCH, status, self._library)
            self._owner.note_capture()
        self._owner.used(x, out)
        return KernelWork(self._owner, stream, self._ranks, self._epoch)


class CopyPlan:
    """A push by copy engines, of a shard that lies in its place.

    Args:
        make: the operation, for x at a fixed place of the pool; None where it has none. Called when it repeats first.
    """

    def __init__(
        self, owner: PlanOwner, engines: CopyEngines, make: Callable[[], PushTemplate | None], rank: int
    ) -> None:
        self._owner, self._engines, self._rank = owner, engines, rank
        self._make: Callable[[], PushTemplate | None] | None = make
        self._template: PushTemplate | None = None
        self._arrivals, self._epoch = engines.arrivals(), owner.epoch

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> CopyWork | None:
        current = self._owner.untroubled()
        if current is None or torch._C._cuda_isCurrentStreamCapturing():
            return None
        template = self._template or self._made()
        if template is None:
            return None
        kept = out.untyped_storage()  # x, too, is in it; not the tensor, for whose end its owner may watch
        seq = self._engines.push_again(template, kept, current)
        if not seq:
            return None
        splits = bool(template.kind.arrivals)
        return CopyWork(self._owner, seq, self._rank, self._arrivals, splits, None, self._epoch)

    def _made(self) -> PushTemplate | None:
        make, self._make = self._make, None
        if make is not None:
            with contextlib.suppress(TransportError):  # the driver makes no such graph: the long way needs none
                self._template = make()
        return self._template
