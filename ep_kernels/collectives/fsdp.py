"""All-gather of FSDP2's parameters by our collectives: `module.set_custom_all_gather(AllGather(coll))`.

    coll = Collectives(CollectiveConfig(group=TorchGroup(mesh.get_group()), pool_bytes=...))
    gather = AllGather(coll)                                   # one for all modules: they share its buffers
    for module in sharded_modules:
        module.set_custom_all_gather(gather)

FSDP asks for a buffer, copies this rank's shard into its own slice of it, calls, and drops the buffer after the
parameters have been copied out. Here the buffer is registered memory, so the gather is in place. Before FSDP drops the
buffer it lets its streams wait for the copy-out, so a buffer that is used again is free in the order of streams.

A buffer that FSDP has dropped is kept for the next unit of its size, since a new one costs a meeting of all hosts. The
pool holds what FSDP uses at once: of each size two, where no more than one unit is prefetched. Where it is full, a
buffer of that size is ordinary memory, one RuntimeWarning says so, and no host is met for one any more. Ranks run the
same program, so all of this happens on all ranks alike; where one holds a buffer longer than the others, their
PeerTimeouts have a note that says so.
"""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ep_kernels.collectives.establish import process_group_of
from ep_kernels.collectives.work import Work
from ep_kernels.errors import ArgumentError, PeerTimeout

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

    def all_gather(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, beside: bool = False
    ) -> Work[torch.Tensor]:
        """As there."""


@dataclass(slots=True)
class _Buffer:
    """Registered bytes, and the tensor in which FSDP has them."""

    memory: torch.Tensor
    lent: weakref.ref[torch.Tensor] | None = None

    @property
    def is_idle(self) -> bool:
        return self.lent is None or self.lent() is None

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.memory.view(dtype).view(*shape)
        self.lent = weakref.ref(tensor)
        return tensor


class AllGather(_CustomAllGather):  # type: ignore[misc]
    """What `FSDPModule.set_custom_all_gather` takes. Several modules may share one.

    Args:
        coll: a `Collectives` over the ranks of the modules' mesh dimension, in its order.
    """

    def __init__(self, coll: Gatherer) -> None:
        self._coll = coll
        self._registers = getattr(getattr(coll, "config", None), "pool_bytes", 1) > 0
        self._buffers: list[_Buffer] = []
        self._full: set[int] = set()  # bytes for which the pool has no more room
        self._checked: dist.ProcessGroup | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of that size: registered, or ordinary where the pool is full. Collective."""
        shape = tuple(int(n) for n in size)
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._idle(num_bytes) or self._new(num_bytes)
        if buffer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return buffer.lend(shape, dtype)

    def _idle(self, num_bytes: int) -> _Buffer | None:
        """One that FSDP has dropped."""
        return next((one for one in self._buffers if one.memory.numel() == num_bytes and one.is_idle), None)

    def _new(self, num_bytes: int) -> _Buffer | None:
        """From the pool, which has room for it once idle ones of other sizes have been returned, or has none."""
        if not num_bytes or not self._registers or num_bytes in self._full:
            return None
        lent = sum(one.memory.numel() == num_bytes for one in self._buffers)
        if lent:
            gc.collect()  # what holds one may be garbage, which other ranks have collected
            if (dropped := self._idle(num_bytes)) is not None:
                return dropped
        for _ in range(2):
            try:
                with _explained(f"asks all for one more buffer of {num_bytes} bytes, beside {lent} in use here"):
                    self._buffers.append(_Buffer(self._coll.empty((num_bytes,), torch.uint8)))
                return self._buffers[-1]
            except ArgumentError:  # on all ranks, since all have the same pool
                self._buffers = [one for one in self._buffers if not one.is_idle]
        self._full.add(num_bytes)
        text = (
            f"FSDP2's all-gather: no room in the pool for a buffer of {num_bytes} bytes beside {len(self._buffers)} "
            "others; gathers of that size go through ordinary memory, which is slow: make pool_bytes larger"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather. Not async: the current stream, which is FSDP's own for it, waits. Raises as `Collectives.all_gather`,
        and ArgumentError where `group` is not made of the ranks of the collectives."""
        if group is not self._checked:
            check_ranks(self._coll, group)
            self._checked = group
        with _explained(_GATHERS):
            work = self._coll.all_gather(input_tensor, out=output_tensor, beside=True)
            if not async_op:
                work.wait()
        return TorchWork(work, lambda: _explained(_GATHERS)) if async_op else None


def check_ranks(coll: Gatherer, group: dist.ProcessGroup) -> None:
    """Check that the group has the ranks of the collectives; where unknown, as many, and this rank's place. Raises
    ArgumentError."""
    if (group.rank(), group.size()) != (coll.rank, coll.size):
        expected = f"rank {coll.rank} of {coll.size}, as the collectives"
        raise ArgumentError("group", expected, f"rank {group.rank()} of {group.size()}")
    own = process_group_of(getattr(getattr(coll, "config", None), "group", None))
    if own is not None and (ranks := dist.get_process_group_ranks(own)) != dist.get_process_group_ranks(group):
        expected = f"ranks {ranks}, as the collectives"
        raise ArgumentError("group", expected, dist.get_process_group_ranks(group))


_GATHERS = "gathers into a buffer that it has"


@contextlib.contextmanager
def _explained(does: str) -> Iterator[None]:
    """A wait for a peer that ends in an error says what may have brought ranks out of step."""
    try:
        yield
    except PeerTimeout as error:
        if not error.gone and not hasattr(error, "__notes__"):  # later calls raise it, too
            error.add_note(
                f"FSDP2's all-gather: this rank {does}. Where one rank asks and another gathers, the one that asks "
                "keeps a gathered tensor that the other has dropped: an exception, a hook or a debugger may hold it"
            )
        raise


class TorchWork(dist.Work):
    """A work of the collectives as one of torch.distributed: FSDP waits for no other.

    Args:
        explained: stands around the wait.
    """

    def __init__(
        self, work: Work[torch.Tensor], explained: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        super().__init__()
        self._work, self._explained = work, explained

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; the deadline is that of the collectives."""
        with self._explained():
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()
