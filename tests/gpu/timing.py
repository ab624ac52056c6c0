"""First timings on real GPUs: LL pairs by graph replay, HT by events. Run: python -m tests.gpu.timing --ranks 4 --out
DIR.

By the rules of the project's targets: fresh random routing (10 prepared sets), random payload, ranks aligned on the
GPU, slowest rank, median and p99. LL: L2 warm. HT: L2 flushed before each operation. Both: one launch per operation,
metadata and (per-expert layouts) expansion and weighting included; host calls excluded by the graph or the events.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_kernels import MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.engine import BOTH
from ep_kernels.types import Layout, Mode, Overflow

HIDDEN, EXPERTS, TOPK, SETS = 7168, 256, 8, 10


class Bench:
    """One rank's communicator and prepared inputs."""

    def __init__(self, group: Any, tokens: int, mode: Mode, layout: Layout, quantize: bool) -> None:
        self.config = MoEConfig(
            group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens, mode=mode,
            layout=layout, quantize=quantize, transport="nvlink", exact_shapes=False, overflow=Overflow.DROP,
        )  # fmt: skip
        self.comm = MoECommunicator(self.config)
        self.transport: Any = self.comm._transport
        draw = torch.Generator().manual_seed(100 + group.rank)
        order = torch.rand(SETS, tokens, EXPERTS, generator=draw).argsort(-1)[..., :TOPK]
        self.ids = order.int().cuda()
        self.weights = torch.rand(SETS, tokens, TOPK, generator=draw).cuda()
        self.x = torch.randn(SETS, tokens, HIDDEN, generator=draw).to(torch.bfloat16).cuda()
        self.y: torch.Tensor | None = None
        self.inside = ""

    def dispatch(self, n: int) -> Any:
        args = DispatchArgs(self.x[n], None, self.ids[n], self.weights[n], self.config.mode, None)
        step = self.transport._engine.dispatch(args)
        self.transport._launch(step.call, BOTH)
        return self.transport._engine.finish(step, None, 0)

    def combine(self, out: Any, handle: Any) -> torch.Tensor:
        if out.tokens.dtype == torch.bfloat16:
            y = out.tokens
        else:
            if self.y is None:
                self.y = torch.randn(out.tokens.shape, device="cuda").to(torch.bfloat16)
            y = self.y
        call, receive = self.transport._engine.combine(CombineArgs(y, handle, None, True))
        z, _ = receive(None)
        self.transport._launch(call, BOTH)
        return z

    def correct(self) -> float:
        """Largest relative error of z with experts that do nothing (bf16 payload)."""
        worst = 0.0
        for n in range(SETS):
            out, handle = self.dispatch(n)
            z = self.combine(out, handle).float()
            x = self.x[n].float()
            if self.config.resolved_layout.per_expert:
                want = x * self.weights[n].sum(1, keepdim=True)
            else:
                homes = handle.state.home[..., 0].sort(1).values
                want = x * (1 + (homes[:, 1:] != homes[:, :-1]).sum(1, keepdim=True))
            worst = max(worst, float((z - want).norm() / want.norm()))
        return worst


def graph_pairs(bench: Bench, replays: int) -> list[float]:
    """Microseconds per pair, one number per replay of 10 pairs."""
    graph = torch.cuda.CUDAGraph()
    for n in range(3):
        bench.combine(*bench.dispatch(n))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        zs = [bench.combine(*bench.dispatch(n)) for n in range(SETS)]
    for z in zs:
        z.fill_(float("nan"))
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bench.transport._launch(bench.transport._engine.barrier(), BOTH)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / SETS)
    assert not any(bool(z.isnan().any()) for z in zs)
    bench.comm.check()
    samples = bench.comm.samples()[100:]
    for op in ("dispatch", "combine"):
        chosen = [s for s in samples if s.op == op]
        middle = len(chosen) // 2
        sent, total = (sorted(getattr(s, name) for s in chosen)[middle] / 1e3 for name in ("send_ns", "total_ns"))
        waited = sorted(max(s.peer_wait_ns) for s in chosen)[middle] / 1e3
        bench.inside += f" {op}: sent {sent:.1f} waited {waited:.1f} total {total:.1f}"
    return times[5:]


def events(bench: Bench, iterations: int) -> dict[str, list[float]]:
    """Microseconds of each dispatch and combine by events, ranks aligned, L2 flushed."""
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {"dispatch": [], "combine": []}

    def timed(name: str, call: Any) -> Any:
        flush.zero_()
        bench.transport._launch(bench.transport._engine.barrier(), BOTH)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        times[name].append(begin.elapsed_time(end) * 1000)
        return result

    for i in range(iterations):
        out, handle = timed("dispatch", lambda i=i: bench.dispatch(i % SETS))
        timed("combine", lambda out=out, handle=handle: bench.combine(out, handle))
    bench.comm.check()
    return {name: values[5:] for name, values in times.items()}


def slowest(store: dist.Store, key: str, rank: int, size: int, values: list[float]) -> list[float]:
    """Elementwise maximum over ranks."""
    store.set(f"{key}/{rank}", json.dumps(values))
    store.wait([f"{key}/{r}" for r in range(size)])
    return [max(v) for v in zip(*(json.loads(store.get(f"{key}/{r}")) for r in range(size)), strict=True)]


def bound_us(bench: Bench, store: dist.Store, key: str, row_bytes: int, gbps: float) -> float:
    """Time of the busiest egress or ingress at `gbps`, mean over the routing sets."""
    rank, size = bench.config.group.rank, bench.config.group.size
    owner = bench.ids.long() // (EXPERTS // size)
    sent = torch.stack([(owner == r).any(-1).sum(-1) for r in range(size)]).tolist()  # [R][SETS]
    store.set(f"{key}/{rank}", json.dumps(sent))
    store.wait([f"{key}/{r}" for r in range(size)])
    table = torch.tensor([json.loads(store.get(f"{key}/{r}")) for r in range(size)]).float()  # [from][to][SETS]
    table[range(size), range(size)] = 0
    busiest = torch.maximum(table.sum(1), table.sum(0)).max(0).values.mean()
    return float(busiest) * row_bytes / gbps / 1e3


def quantiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


LL_CASES = [
    (tokens, layout, quantize)
    for tokens in (128, 64, 32, 8, 1)
    for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR)
    for quantize in ((False, True) if tokens == 128 else (False,))
]
HT_CASES = [(4096, Layout.FLAT, False), (4096, Layout.FLAT, True), (4096, Layout.GROUPED, False)]


def run(rank: int, size: int, folder: str, out: str, gbps: float, quick: bool) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    rows: list[dict[str, Any]] = []

    def add(
        op: str, mode: str, layout: Layout, tokens: int, quantize: bool, values: list[float], bound: float, how: str,
        inside: str = "",
    ) -> None:  # fmt: skip
        p50, p99 = quantiles(values)
        dtype = "fp8" if quantize else "bf16"
        row = {"backend": "crossdock", "op": op, "mode": mode, "layout": layout.value, "tokens": tokens, "ranks": size,
               "dispatch_dtype": dtype, "combine_dtype": "bf16", "timing": how, "p50_us": round(p50, 2),
               "p99_us": round(p99, 2), "bound_us": round(bound, 2)}  # fmt: skip
        rows.append(row)
        if rank == 0:
            print(*row.values(), inside, flush=True)

    for tokens, layout, quantize in LL_CASES[:3] if quick else LL_CASES:
        key = f"ll-{tokens}-{layout.value}-{quantize}"
        bench = Bench(StoreGroup(store, rank, size, name=key), tokens, Mode.LL, layout, quantize)
        error = 0.0 if quantize else bench.correct()
        assert error < 1e-2, error
        row = HIDDEN + 4 * HIDDEN // 128 if quantize else 2 * HIDDEN
        bound = bound_us(bench, store, key + "-b", row, gbps) + bound_us(bench, store, key + "-c", 2 * HIDDEN, gbps)
        values = slowest(store, key + "-t", rank, size, graph_pairs(bench, 60))
        add("pair", "ll", layout, tokens, quantize, values, bound, "graph", bench.inside)
        bench.comm.close()
    for tokens, layout, quantize in HT_CASES[:1] if quick else HT_CASES:
        key = f"ht-{tokens}-{layout.value}-{quantize}"
        bench = Bench(StoreGroup(store, rank, size, name=key), tokens, Mode.HT, layout, quantize)
        error = 0.0 if quantize else bench.correct()
        assert error < 1e-2, error
        row = HIDDEN + 4 * HIDDEN // 128 if quantize else 2 * HIDDEN
        measured = events(bench, 45)
        for op, values in measured.items():
            bound = bound_us(bench, store, f"{key}-{op}-b", row if op == "dispatch" else 2 * HIDDEN, gbps)
            add(op, "ht", layout, tokens, quantize, slowest(store, f"{key}-{op}", rank, size, values), bound, "event")
        bench.comm.close()
    if rank == 0:
        path = Path(out)
        path.mkdir(parents=True, exist_ok=True)
        with (path / "timing.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", default="timing")
    parser.add_argument("--gbps", type=float, default=350.0, help="egress ceiling per GPU")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options.ranks, folder, options.out, options.gbps, options.quick), nprocs=options.ranks)


if __name__ == "__main__":
    main()
