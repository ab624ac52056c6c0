"""Who runs an all-gather, a reduce-scatter or an all-reduce in the benchmark: ours, NCCL in three forms, torch.

* `crossdock`: `num_sms` 0 = copy engines, n = that many multiprocessors, None = as `choose` says. Buffers registered.
* `nccl`: plain buffers. `num_sms` n: a communicator with min_ctas = max_ctas = n.
* `nccl_symm`: both buffers in symmetric windows. `nccl_ce`: these, and the policy that leaves multiprocessors alone, on
  NCCL's own stream (as of NCCL 2.28 its copy engines cannot run in the default one).
* `torch`: symmetric memory's one-shot and two-shot all-reduce, and its all-gather by copies.

Gathers are in place, x being this rank's part of out, and so are all-reduces; torch's gather alone makes its result
anew and copies its own shard, for it knows no other way. NCCL's streams have the high priority.

A runner's `run` is what is timed; it allocates nothing but what its library does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.gpu import Unavailable
from benchmarks.gpu.collective_cases import CollectiveCase
from ep_kernels.collectives import CollectiveConfig, Collectives

NCCL_POLICY_ZERO = 2
"""ncclConfig_t.CTAPolicy: NCCL_CTA_POLICY_ZERO."""
POOL_SLACK = 64 << 20


class Runner(Protocol):
    """One backend on one case.

    Attributes:
        x: [shape_in], to be filled before `run`.
        out: [shape_out], what `run` fills; may be x itself (in place).
    """

    x: torch.Tensor
    out: torch.Tensor

    def run(self) -> None:
        """Queue it on the current stream."""

    def close(self) -> None:
        """Free what is its own."""


def _in_place(
    case: CollectiveCase, ranks: int, empty: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, out) in one place, but for a reduce-scatter, of tensors that `empty(shape, dtype)` makes."""
    if case.op == "all_gather":
        out = empty(case.shape_out(ranks), case.dtype)
        return out[dist.get_rank() * case.numel :][: case.numel], out
    x = empty(case.shape_in(ranks), case.dtype)
    return x, x if case.op == "all_reduce" else empty(case.shape_out(ranks), case.dtype)


class Ours:
    """See the module's head. `beside`: a product runs beside it."""

    def __init__(self, case: CollectiveCase, group: Any, ranks: int, beside: bool) -> None:
        wanted = case.num_bytes * (ranks + 1) + POOL_SLACK
        self._coll = Collectives(CollectiveConfig(group=group, transport="nvlink", pool_bytes=wanted))
        self.x, self.out = _in_place(case, ranks, self._coll.empty)
        operation: Callable[..., Any] = getattr(self._coll, case.op)
        how = {"beside": True} if beside else {}
        self._call = functools.partial(operation, out=self.out, num_sms=case.num_sms, **how)

    def run(self) -> None:
        """See `Runner`."""
        self._call(self.x).wait()

    def close(self) -> None:
        """See `Runner`."""
        self._coll.close()


@functools.cache
def nccl_group(num_sms: int | None, policy: int | None) -> Any:
    """A process group of all ranks whose communicator takes `num_sms` multiprocessors; collective, once per kind."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if num_sms:
        options.config.min_ctas = options.config.max_ctas = num_sms
    if policy is not None:
        if not hasattr(options.config, "cta_policy"):
            raise Unavailable("nccl_ce: this torch cannot set NCCL's CTA policy")
        options.config.cta_policy = policy
    return dist.new_group(backend="nccl", pg_options=options)


class Windows:
    """Memory that is a symmetric window of a process group of NCCL; collective. Raises Unavailable."""

    def __init__(self, group: Any) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._backend: Any = group._get_backend(self._device)
        dist.all_reduce(torch.ones(1, device=self._device), group=group)  # windows cannot be the first operation
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of it, before `register`."""
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def register(self) -> None:
        """What `empty` has made is a window from now on."""
        try:
            self._backend.register_mem_pool(self._pool, symm=True)
        except TypeError as error:
            raise Unavailable(f"nccl windows: this torch has none ({error})") from error

    def close(self) -> None:
        """It is none any more."""
        torch.cuda.synchronize()
        self._backend.deregister_mem_pool(self._pool)


class Nccl:
    """See the module's head."""

    def __init__(self, case: CollectiveCase, ranks: int, *, windows: bool, copies: bool) -> None:
        self._group, self._case = nccl_group(case.num_sms, NCCL_POLICY_ZERO if copies else None), case
        self._beside = copies  # copy engines take no batch on the default stream: "invalid argument"
        self._windows = Windows(self._group) if windows else None
        plain = functools.partial(_plain, torch.device("cuda", torch.cuda.current_device()))
        self.x, self.out = _in_place(case, ranks, plain if self._windows is None else self._windows.empty)
        if self._windows is not None:
            self._windows.register()
        else:
            dist.all_reduce(torch.ones(1, device=self.x.device), group=self._group)  # its communicator is made here

    def run(self) -> None:
        """See `Runner`."""
        how: dict[str, Any] = {"group": self._group, "async_op": self._beside}
        if self._case.op == "all_gather":
            work = dist.all_gather_into_tensor(self.out, self.x, **how)
        elif self._case.op == "reduce_scatter":
            work = dist.reduce_scatter_tensor(self.out, self.x, **how)
        else:
            work = dist.all_reduce(self.x, **how)
        if work is not None:
            work.wait()

    def close(self) -> None:
        """See `Runner`."""
        torch.cuda.synchronize()
        if self._windows is not None:
            self._windows.close()
        del self.x, self.out


def _plain(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class Torch:
    """See the module's head."""

    def __init__(self, case: CollectiveCase, ranks: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        known = {("all_gather", ""), ("all_reduce", "one_shot"), ("all_reduce", "two_shot")}
        if (case.op, case.algorithm) not in known or case.num_sms is not None:
            raise Unavailable("torch: measured for all-gather by copies, and for one-shot and two-shot all-reduce")
        group = dist.group.WORLD
        assert group is not None
        device = torch.device("cuda", torch.cuda.current_device())
        self.x = symmetric.empty(case.shape_in(ranks), dtype=case.dtype, device=device)
        symmetric.rendezvous(self.x, group=group)
        name = group.group_name
        ops = torch.ops.symm_mem
        if case.op == "all_gather":
            self._call: Callable[[], torch.Tensor] = lambda: ops._low_contention_all_gather(self.x, name)
        elif case.algorithm == "one_shot":
            self._call = lambda: ops.one_shot_all_reduce(self.x, "sum", name)
        else:
            self._call = lambda: ops.two_shot_all_reduce_(self.x, "sum", name)
        self.out = self.x.new_empty(case.shape_out(ranks))
        self._result: torch.Tensor | None = None

    def run(self) -> None:
        """See `Runner`."""
        self.out = torch.ops._c10d_functional.wait_tensor(self._call())

    def close(self) -> None:
        """See `Runner`."""
        del self.x, self.out


def create(name: str, case: CollectiveCase, group: Any, ranks: int, beside: bool = False) -> Runner:
    """Backend `name` on a case, `beside` a product; collective. Raises Unavailable with the reason."""
    if name == "crossdock":
        return Ours(case, group, ranks, beside)
    if name == "torch":
        return Torch(case, ranks)
    if case.algorithm:
        raise Unavailable(f"{name}: chooses its algorithm itself")
    if name == "nccl":
        if case.num_sms == 0:
            raise Unavailable("nccl: needs multiprocessors")
        return Nccl(case, ranks, windows=False, copies=False)
    if name == "nccl_symm":
        return Nccl(case, ranks, windows=True, copies=False)
    if case.op != "all_gather" or case.num_sms != 0:
        raise Unavailable("nccl_ce: copy engines gather only")
    return Nccl(case, ranks, windows=True, copies=True)
