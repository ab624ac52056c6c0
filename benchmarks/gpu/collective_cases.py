"""What the benchmark of collectives measures: cases by row T1 to T7 of its table, and what each takes at least.

* T1, T2: all-gather by multiprocessors and by copy engines. T3: a matmul beside an all-gather.
* T4: matmuls with an all-gather before, or a reduce-scatter behind them. T5: reductions. T6: matmul and all-reduce.
* T7: steps of FSDP2 (`collective_steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks import bounds

MIB, KIB = 1 << 20, 1 << 10
BACKENDS = ("crossdock", "nccl", "nccl_symm", "nccl_ce", "torch", "cublas")
GATHER_MIB, GATHER_SMS = (16, 128, 512), (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 132)
NCCL_SMS = 64
"""NCCL has no more channels, and a block of its kernels is one."""
REDUCE_SMS = (16, 32, 132)
REDUCE_BYTES = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB)
SCATTER_MIB = (2, 16, 128)
SQUARE = 8192
BESIDE_MIB = {2: (64, 256, 512), 4: (64, 160), 8: (64,)}
"""Shards of the gather beside a matmul of SQUARE, by ranks; that of the last takes about as long."""
ORDERS = ("gather_first", "product_first")
"""In which the host queues the two; `sequential` is on one stream."""
SHAPES = ((1792, 4096), (3584, 8192), (6656, 16384))
ROWS = (4096, 8192, 16384)
"""M of T4: rows of all ranks; (N, K) by SHAPES."""
TFLOPS = 989.0
"""Of an H100 or H200 in bf16 and fp16, dense, as its maker says."""
PRODUCTS = ("matmul", "matmul_beside_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
OPS = ("all_gather", "reduce_scatter", "all_reduce", *PRODUCTS, "fsdp_step")


@dataclass(frozen=True)
class CollectiveCase:
    """One line of the table.

    Attributes:
        op: one of OPS.
        num_bytes: all-gather and reduce-scatter: of one shard; all-reduce: of the tensor; else what is gathered of one
            rank, or reduced, beside the matmul.
        dtype: of the elements.
        num_sms: multiprocessors; 0: copy engines, None the backend's choice.
        timing: "eager" or "graph".
        algorithm: for backends with several, and how a product is beside a gather; "" elsewhere.
        m, n, k: of the matmul on one rank, all gathered rows; 0 where there is none.
        t: row of the table.
    """

    op: str
    num_bytes: int
    dtype: torch.dtype = torch.bfloat16
    num_sms: int | None = None
    timing: str = "eager"
    algorithm: str = ""
    m: int = 0
    n: int = 0
    k: int = 0
    t: str = ""

    @property
    def numel(self) -> int:
        """Elements of `num_bytes`."""
        return self.num_bytes // self.dtype.itemsize

    def shape_in(self, ranks: int) -> tuple[int, ...]:
        """x."""
        if self.op == "all_gather_matmul":
            return self.m // ranks, self.k
        if self.op in PRODUCTS and self.op != "matmul_beside_gather":
            return self.m, self.k
        return (self.numel * ranks if self.op == "reduce_scatter" else self.numel,)

    def shape_out(self, ranks: int) -> tuple[int, ...]:
        """The result."""
        if self.op in PRODUCTS and self.op != "matmul_beside_gather":
            return self.m // (ranks if self.op == "matmul_reduce_scatter" else 1), self.n
        gathers = self.op in ("all_gather", "matmul_beside_gather")
        return (self.numel * ranks if gathers else self.numel,)

    def gather(self) -> CollectiveCase:
        """The gather in it alone."""
        return replace(self, op="all_gather", m=0, n=0, k=0, algorithm="")


def moved_bytes(case: CollectiveCase, ranks: int) -> float:
    """That must leave a GPU: of a sum, those of a reduce-scatter and a gather."""
    if case.op == "matmul":
        return 0.0
    whole = case.op in ("all_reduce", "matmul_all_reduce")
    return case.num_bytes * (ranks - 1) * (2 / ranks if whole else 1)


def bound_us(case: CollectiveCase, ranks: int) -> float:
    """Bytes at the rate of the links, or the products at the rate of the cores, whichever takes longer. Where bytes are
    gathered and the caller names no multiprocessors, copy engines may do it, and the rate is theirs."""
    flops, copies = 2.0 * case.m * case.n * case.k, "gather" in case.op and not case.num_sms
    return max(moved_bytes(case, ranks) / bounds.gbps(ranks, copies=copies) / 1e3, flops / TFLOPS / 1e6)


def cases(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    """(backend, case) in the order in which they are measured; `quick`: a few of each kind."""
    for family in (_gathers, _beside, _reductions, _matmul_all_reduces, _gather_matmuls):
        yield from family(ranks, quick)


def _gathers(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    for mib in GATHER_MIB[:1] if quick else GATHER_MIB:
        gather = CollectiveCase("all_gather", mib * MIB, t="1, 2")
        for sms in (0, None, *(GATHER_SMS[:2] if quick else GATHER_SMS)):
            yield "crossdock", replace(gather, num_sms=sms)
        some = [sms for sms in (GATHER_SMS[1:2] if quick else GATHER_SMS) if sms <= NCCL_SMS]
        for name in ("nccl", "nccl_symm"):
            for nccl_sms in (None, *some):
                yield name, replace(gather, num_sms=nccl_sms)
        yield "nccl_ce", replace(gather, num_sms=0)
        yield "torch", gather


def _reductions(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    for num_bytes in REDUCE_BYTES[:2] if quick else REDUCE_BYTES:
        timing = "graph" if num_bytes <= MIB else "eager"
        reduce = CollectiveCase("all_reduce", num_bytes, timing=timing, t="5")
        for sms in REDUCE_SMS if num_bytes >= MIB else ():
            yield "crossdock", replace(reduce, num_sms=sms)
        for name in ("crossdock", "nccl", "nccl_symm"):
            yield name, reduce
        for algorithm in ("one_shot", "two_shot"):
            yield "torch", replace(reduce, algorithm=algorithm)
    for mib in SCATTER_MIB[:1] if quick else SCATTER_MIB:
        for name in ("crossdock", "nccl", "nccl_symm"):
            yield name, CollectiveCase("reduce_scatter", mib * MIB, t="5")


def _beside(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    square = {"dtype": torch.float16, "m": SQUARE, "n": SQUARE, "k": SQUARE, "t": "3"}
    yield "cublas", CollectiveCase("matmul", 0, **square)  # type: ignore[arg-type]
    for mib in BESIDE_MIB.get(ranks, BESIDE_MIB[8])[: 1 if quick else None]:
        both = CollectiveCase("matmul_beside_gather", mib * MIB, **square)  # type: ignore[arg-type]
        for name, sms in (("crossdock", None), ("crossdock", 0), ("nccl", None), ("nccl_ce", 0), ("torch", None)):
            yield name, replace(both.gather(), num_sms=sms)
            for order in (*ORDERS, "sequential"):
                yield name, replace(both, num_sms=sms, algorithm=order)


def _gather_matmuls(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    for n, k in SHAPES[:1] if quick else SHAPES:
        for m in ROWS[:1] if quick else ROWS:
            whole = {"m": m, "n": n, "k": k, "t": "4"}
            gathered = m // ranks * k * 2
            yield "cublas", CollectiveCase("matmul", 0, **whole)  # type: ignore[arg-type]
            for name in ("crossdock", "nccl"):
                yield name, CollectiveCase("all_gather", gathered, t="4")
            fused = CollectiveCase("all_gather_matmul", gathered, **whole)  # type: ignore[arg-type]
            for sms in (0, None):
                yield "crossdock", replace(fused, num_sms=sms)
            yield "nccl", fused
            yield "torch", fused
            turned = {"m": m, "n": k, "k": n, "t": "4"}
            yield "cublas", CollectiveCase("matmul", 0, **turned)  # type: ignore[arg-type]
            for name in ("crossdock", "nccl", "torch"):
                yield name, CollectiveCase("matmul_reduce_scatter", gathered, **turned)  # type: ignore[arg-type]


def _matmul_all_reduces(ranks: int, quick: bool) -> Iterator[tuple[str, CollectiveCase]]:
    shape = {"m": SQUARE, "n": SQUARE, "k": 4 * SQUARE // ranks, "t": "6"}
    yield "cublas", CollectiveCase("matmul", 0, **shape)  # type: ignore[arg-type]
    both = CollectiveCase("matmul_all_reduce", SQUARE * SQUARE * 2, **shape)  # type: ignore[arg-type]
    for sms in (None,) if quick else (None, 8, 16, 32):
        yield "crossdock", replace(both, num_sms=sms)
    for name in ("nccl", "nccl_symm"):
        for algorithm in ("two_streams", "sequential"):
            yield name, replace(both, algorithm=algorithm)
    yield "torch", both
