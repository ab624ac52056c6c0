"""An operation like an earlier one: its records are filled but for two addresses, and one call launches it.

Whoever keeps a plan keeps it for arguments of the same shape, dtype, registered offset and options, and only as long as
the same ranks take part. A plan begins nothing where there may be something to tell, where launches have been on
several streams, or, for copy engines, under graph capture: it says None, and the operation takes the long way, which
sees to all of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ep_kernels.jit import Variant
from ep_kernels.transports.nvlink.collective_work import CopyWork, KernelWork, WorkOwner
from ep_kernels.transports.nvlink.copies import CopyEngines
from ep_kernels.transports.nvlink.copy_schedule import PushTemplate
from ep_kernels.transports.nvlink.engine import Call


class PlanOwner(WorkOwner, Protocol):
    """What a plan asks of its transport."""

    def undisturbed(self) -> torch.cuda.Stream | None:
        """The current stream, where an operation may begin on it without another look; else None."""

    def note_capture(self) -> None:
        """A CUDA graph has captured an operation."""


class KernelPlan:
    """One launch.

    Args:
        owner: the transport.
        functions: kernels by variant.
        call: the launch.
        addressed: what of its record has `x` and `out`: itself, or its only part.
        ranks: whose shards come, this rank first.
    """

    def __init__(
        self, owner: PlanOwner, functions: Mapping[Variant, Any], call: Call, addressed: Any, ranks: Sequence[int]
    ) -> None:
        self._owner, self._ranks, launch = owner, ranks, call.launch
        self._start = functions[call.variant].starter(
            launch.num_blocks, call.variant.num_threads, cooperative=launch.cooperative, overlapped=launch.overlapped
        )
        self._args, self._addressed = call.args, addressed

    def begin(self, x: torch.Tensor, out: torch.Tensor) -> KernelWork | None:
        """See `collective_base.CollectivePlan`."""
        stream = self._owner.undisturbed()
        if stream is None:
            return None
        self._addressed.x, self._addressed.out = x.data_ptr(), out.data_ptr()
        if self._start(stream.cuda_stream, self._args):
            self._owner.note_capture()
        return KernelWork(self._owner, stream, self._ranks)


class CopyPlan:
    """A push by copy engines, of a shard that lies in its place.

    Args:
        owner: the transport.
        engines: its copy engines.
        stream: of the copies.
        template: the operation, for x at a fixed place of the pool.
        rank: this rank.
    """

    def __init__(
        self, owner: PlanOwner, engines: CopyEngines, stream: torch.cuda.Stream, template: PushTemplate, rank: int
    ) -> None:
        self._owner, self._engines, self._stream = owner, engines, stream
        self._template, self._rank, self._arrivals = template, rank, engines.arrivals()

    def begin(self, x: torch.Tensor, out: torch.Tensor) -> CopyWork | None:
        """See `collective_base.CollectivePlan`."""
        current = self._owner.undisturbed()
        if current is None or torch.cuda.is_current_stream_capturing():
            return None
        engines = self._engines
        self._stream.wait_stream(current)
        seq = engines.push_again(self._template, (x, out))
        end = self._stream.record_event()
        return CopyWork(self._owner, end, seq, self._rank, self._arrivals, True, None, engines.has_ended)
