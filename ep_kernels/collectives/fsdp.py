"""All-gather of FSDP2's parameters by our collectives: `module.set_custom_all_gather(AllGather(coll))`.

    coll = Collectives(CollectiveConfig(group=TorchGroup(mesh.get_group()), pool_bytes=...))
    for module in sharded_modules:
        module.set_custom_all_gather(AllGather(coll))

FSDP asks for a buffer, copies this rank's shard into its own slice of it, calls, and drops the buffer after the
parameters have been copied out. Here the buffer is registered memory, so the gather is in place. Before FSDP drops the
buffer it lets its streams wait for the copy-out, so a buffer that is used again is free in the order of streams.

The pool holds what FSDP keeps at once: two units, and one for each that is prefetched. Where it is full, a buffer is
ordinary memory, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ep_kernels.collectives.work import Work
from ep_kernels.errors import ArgumentError

_CustomAllGather: Any = object
try:
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    _CustomAllGather = getattr(_fsdp_api, "AllGather", object)
except ImportError:  # it is an interface without code: duck typing does
    pass


class Gatherer(Protocol):
    """What this needs of a `Collectives`."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """R."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As there."""

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> Work[torch.Tensor]:
        """As there."""


class AllGather(_CustomAllGather):  # type: ignore[misc]
    """What `FSDPModule.set_custom_all_gather` takes. Several modules may share one.

    Args:
        coll: a `Collectives` over the ranks of the modules' mesh dimension, in its order.
    """

    def __init__(self, coll: Gatherer) -> None:
        self._coll = coll

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of that size: registered, or ordinary where the pool is full. Collective."""
        shape = tuple(int(n) for n in size)
        try:
            return self._coll.empty(shape, dtype)
        except ArgumentError:  # on all ranks, since all have the same pool
            return torch.empty(shape, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather. Not async: the current stream, which is FSDP's own for it, waits. Raises as `Collectives.all_gather`,
        and ArgumentError where `group` is not made of the ranks of the collectives."""
        if (group.rank(), group.size()) != (self._coll.rank, self._coll.size):
            expected = f"rank {self._coll.rank} of {self._coll.size}, as the collectives"
            raise ArgumentError("group", expected, f"rank {group.rank()} of {group.size()}")
        work = self._coll.all_gather(input_tensor, out=output_tensor)
        if async_op:
            return _Waitable(work)
        work.wait()
        return None


class _Waitable(dist.Work):
    """FSDP waits only for what is a `torch.distributed.Work`."""

    def __init__(self, work: Work[torch.Tensor]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; the deadline is that of the collectives."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the gather is done."""
        return self._work.is_completed()
