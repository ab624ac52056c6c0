"""All-gathers of DeepSpeed by our collectives, those of ZeRO-3's parameter prefetch first of all.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    coll = Collectives(CollectiveConfig(group=TorchGroup(), pool_bytes=0, ...))
    with ZeroGathers(coll, deepspeed):
        loss = engine(x)
        engine.backward(loss)
        engine.step()

ZeRO-3 gathers into ordinary memory of torch, of which a part becomes a parameter. So nothing is registered but the
staging of the collectives, which every gather uses again: peers read a shard there and put it where DeepSpeed wants it.
DeepSpeed asks one object for each all-gather; while these gathers are in force, that asks here. What cannot be served
(other ranks, as of hpZ's and expert groups; another device; tensors that are not contiguous) or would travel in several
rounds (a shard above `max_shard_bytes`) goes DeepSpeed's own way, on all ranks alike, and one RuntimeWarning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ep_kernels.collectives.collectives import Collectives
from ep_kernels.collectives.fsdp import TorchWork, check_ranks
from ep_kernels.errors import ArgumentError

_NAME = "all_gather_into_tensor"


class ZeroGathers:
    """The all-gathers of this process's DeepSpeed, from now until `close`. Also a context manager.

    Args:
        coll: serves process groups of its ranks, in its order; the default one, as a rule.
        deepspeed: the module, initialised (`deepspeed.initialize` or `deepspeed.init_distributed`).
        max_shard_bytes: largest shard that is served; equal on all ranks. None: `staging_bytes`, one round. Each round
            more waits for the peers, and for multiprocessors that a matmul may hold.

    Raises ArgumentError where it is not, or where its gathers were taken over before.
    """

    def __init__(self, coll: Collectives, deepspeed: ModuleType, max_shard_bytes: int | None = None) -> None:
        backend = deepspeed.comm.comm.cdb
        if backend is None:
            raise ArgumentError("deepspeed", "an initialised module: deepspeed.init_distributed()", "one that is not")
        if _NAME in vars(backend):
            raise ArgumentError("deepspeed", "its own all-gathers", "some that were taken over: close those first")
        self._coll, self._backend, self._warned = coll, backend, False
        self._theirs: Callable[..., Any] = getattr(backend, _NAME)
        self._most = coll.config.staging_bytes if max_shard_bytes is None else max_shard_bytes
        self._known: dict[Any, str] = {}  # why a process group is not served; "": it is
        setattr(backend, _NAME, self._all_gather)

    def close(self) -> None:
        """DeepSpeed gathers by itself again. Idempotent."""
        if vars(self._backend).get(_NAME) == self._all_gather:
            delattr(self._backend, _NAME)

    def __enter__(self) -> ZeroGathers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """As `torch.distributed.all_gather_into_tensor`; raises as `Collectives.all_gather`."""
        if why := self._why_not(output_tensor, input_tensor, group):
            self._warn(why)
            return self._theirs(output_tensor, input_tensor, group, async_op)
        x, out = (flat if flat.dim() == 1 else flat.view(-1) for flat in (input_tensor, output_tensor))
        work = self._coll.all_gather(x, out=out, beside=True)
        if async_op:
            return TorchWork(work)
        work.wait()
        return None

    def _why_not(self, out: torch.Tensor, x: torch.Tensor, group: Any) -> str:
        """Equal on all ranks, since they run one program."""
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._why_no_group(group)
        wanted = self._coll.capabilities.device_type
        if not known and not (x.device.type == out.device.type == wanted):
            return f"tensors on {x.device} and {out.device}; these collectives have their ranks on {wanted}"
        if not known and not (x.is_contiguous() and out.is_contiguous()):
            return "tensors that are not contiguous"
        if not known and x.nbytes > self._most:
            return f"a shard of {x.nbytes} bytes, where max_shard_bytes (as a rule staging_bytes) is {self._most}"
        return known

    def _why_no_group(self, group: Any) -> str:
        if not (group is None or isinstance(group, dist.ProcessGroup)):  # what torch gives to ranks outside
            return "group: this rank is not in it"
        try:
            check_ranks(self._coll, dist.distributed_c10d._get_default_group() if group is None else group)
        except ArgumentError as error:
            return str(error)
        return ""

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"an all-gather of DeepSpeed goes its own way: {why}", RuntimeWarning, stacklevel=3)
