"""Who runs a matmul with a collective in the benchmark. Beside each stands `cublas`, the matmul alone.

* `crossdock`: `all_gather_matmul` (x in place in a registered out), `matmul_reduce_scatter`, `matmul_all_reduce`.
* `nccl`: one after the other; `two_streams`: CHUNKS chunks of rows on two streams in turn, product and sum of each.
  `nccl_symm`: what is summed is in a symmetric window.
* `torch`: symmetric memory's fused operators; all-reduce by its two-shot, in place, behind the product.
* A matmul beside a gather of other bytes, by any backend, on a stream of high priority: the gather is queued first or
  the product, for either order may be the better one; `sequential` on one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.collective_backends import POOL_SLACK, Runner, Windows, nccl_group
from benchmarks.gpu.collective_cases import ORDERS, CollectiveCase
from ep_kernels.collectives import CollectiveConfig, Collectives

CHUNKS = 4
STAGING_BYTES = 128 << 20
"""Of ours: pieces of a product are large enough to lose little."""


def weights(case: CollectiveCase, rank: int) -> torch.Tensor:
    """w [k, n] of a rank, random; the same on every rank that asks."""
    own = torch.Generator("cuda").manual_seed(977 + rank)
    return (
        torch.randn(case.k, case.n, generator=own, device="cuda", dtype=torch.float32).mul_(case.k**-0.5).to(case.dtype)
    )


class Product:
    """See `collective_backends.Runner`; `multiply` of a subclass sets `out`."""

    def __init__(self, case: CollectiveCase, rank: int, ranks: int) -> None:
        self.case, self.ranks, self.w = case, ranks, weights(case, rank)
        self.x = torch.empty(case.shape_in(ranks), dtype=case.dtype, device="cuda")
        self.out = torch.empty(case.shape_out(ranks), dtype=case.dtype, device="cuda")

    def run(self) -> None:
        """See `Runner`: the matmul alone."""
        torch.mm(self.x, self.w, out=self.out)

    def close(self) -> None:
        """See `Runner`."""
        torch.cuda.synchronize()
        del self.x, self.w, self.out


class OurProduct(Product):
    """See the module's head."""

    def __init__(self, case: CollectiveCase, group: Any, ranks: int) -> None:
        super().__init__(case, group.rank, ranks)
        gathers = case.op == "all_gather_matmul"
        pool = case.num_bytes * ranks + POOL_SLACK if gathers else POOL_SLACK
        self._coll = Collectives(
            CollectiveConfig(group=group, transport="nvlink", pool_bytes=pool, staging_bytes=STAGING_BYTES)
        )
        if gathers:
            self._gathered = self._coll.empty((case.m, case.k), case.dtype)
            rows = case.m // ranks
            self.x = self._gathered[group.rank * rows : (group.rank + 1) * rows]

    def run(self) -> None:
        """See `Runner`."""
        coll, sms = self._coll, self.case.num_sms
        if self.case.op == "all_gather_matmul":
            self.out = coll.all_gather_matmul(self.x, [self.w], out=self._gathered, num_sms=sms)[0][0]
        elif self.case.op == "matmul_reduce_scatter":
            self.out = coll.matmul_reduce_scatter(self.x, self.w, num_sms=sms)
        else:
            self.out = coll.matmul_all_reduce(self.x, self.w, chunks=CHUNKS, num_sms=sms)

    def close(self) -> None:
        """See `Runner`."""
        super().close()
        self._gathered = None  # type: ignore[assignment]
        self._coll.close()


class NcclProduct(Product):
    """See the module's head."""

    def __init__(self, case: CollectiveCase, rank: int, ranks: int, *, windows: bool) -> None:
        super().__init__(case, rank, ranks)
        self._group = nccl_group(None, None)
        self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        rows, columns = (case.m, case.k) if case.op == "all_gather_matmul" else (case.m, case.n)
        self._whole = torch.empty(rows, columns, dtype=case.dtype, device="cuda")
        if case.op == "all_gather_matmul":  # in place
            self.x = self._whole[rank * (rows // ranks) :][: rows // ranks]
        self._windows = Windows(self._group) if windows else None
        if self._windows is not None:
            self.out = self._windows.empty(case.shape_out(ranks), case.dtype)
            self._windows.register()

    def run(self) -> None:
        """See `Runner`."""
        if self.case.op == "all_gather_matmul":
            dist.all_gather_into_tensor(self._whole, self.x, group=self._group)
            torch.mm(self._whole, self.w, out=self.out)
        elif self.case.op == "matmul_reduce_scatter":
            torch.mm(self.x, self.w, out=self._whole)
            dist.reduce_scatter_tensor(self.out, self._whole, group=self._group)
        elif self.case.algorithm == "two_streams":
            self._by_two_streams()
        else:
            torch.mm(self.x, self.w, out=self.out)
            dist.all_reduce(self.out, group=self._group)

    def _by_two_streams(self) -> None:
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for number, (x, out) in enumerate(zip(self.x.chunk(CHUNKS), self.out.chunk(CHUNKS), strict=True)):
            with torch.cuda.stream(self._streams[number % 2]):
                torch.mm(x, self.w, out=out)
                dist.all_reduce(out, group=self._group, async_op=True).wait()
        for stream in self._streams:
            current.wait_stream(stream)

    def close(self) -> None:
        """See `Runner`."""
        if self._windows is not None:
            self._windows.close()
        super().close()
        del self._whole


class TorchProduct(Product):
    """See the module's head."""

    def __init__(self, case: CollectiveCase, rank: int, ranks: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(case, rank, ranks)
        group = dist.group.WORLD
        assert group is not None
        name, ops = group.group_name, torch.ops.symm_mem
        if case.op == "matmul_all_reduce":
            self.out = symmetric.empty(case.shape_out(ranks), dtype=case.dtype, device=self.x.device)
            symmetric.rendezvous(self.out, group=group)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "all_gather_matmul": lambda: ops.fused_all_gather_matmul(self.x, [self.w], 0, name)[1][0],
            "matmul_reduce_scatter": lambda: ops.fused_matmul_reduce_scatter(self.x, self.w, "sum", 0, name),
            "matmul_all_reduce": lambda: ops.two_shot_all_reduce_(torch.mm(self.x, self.w, out=self.out), "sum", name),
        }
        self._call = calls[case.op]

    def run(self) -> None:
        """See `Runner`."""
        self.out = self._call()

    def close(self) -> None:
        """See `Runner`."""
        super().close()
        del self._call


class Beside:
    """A matmul beside `inner`'s gather, whose x and out are those of the case; see `Runner`."""

    def __init__(self, case: CollectiveCase, inner: Runner) -> None:
        self._inner, self._order = inner, case.algorithm
        self.x, self.out = inner.x, inner.out
        own = torch.Generator("cuda").manual_seed(7)
        made = [
            torch.randn(shape, generator=own, device="cuda", dtype=case.dtype)
            for shape in ((case.m, case.k), (case.k, case.n))
        ]
        self._a, self._b = made
        self._y = torch.empty(case.m, case.n, dtype=case.dtype, device="cuda")
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """See `Runner`."""
        if self._order not in ORDERS:
            self._multiply()
            self._gather()
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        if self._order == "product_first":
            self._multiply()
        with torch.cuda.stream(self._stream):
            self._gather()
        if self._order == "gather_first":
            self._multiply()
        current.wait_stream(self._stream)

    def _gather(self) -> None:
        self._inner.run()
        self.out = self._inner.out

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._y)

    def close(self) -> None:
        """See `Runner`. Raises AssertionError where the product is wrong."""
        want = self._a[:64] @ self._b
        far = float((self._y[:64].float() - want.float()).abs().max() / want.float().abs().max())
        del self.x, self.out, self._a, self._b, self._y
        self._inner.close()
        assert far < 2e-2, f"the product is off by {far:.3g} of its largest value"


def create_product(name: str, case: CollectiveCase, group: Any, ranks: int) -> Runner:
    """Backend `name` on a matmul; collective."""
    if name == "cublas":
        return Product(case, group.rank, ranks)
    if name == "crossdock":
        return OurProduct(case, group, ranks)
    if name == "torch":
        return TorchProduct(case, group.rank, ranks)
    return NcclProduct(case, group.rank, ranks, windows=name == "nccl_symm")
