"""What a call costs its host: microseconds of the CPU for one eager dispatch, combine, pair of `deep_ep`; on one GPU.

    python -m benchmarks.gpu.host [--out DIR] [--calls N] [--layouts flat ...]

Of R ranks only the first is there: the others' regions are its own, and its kernels return at once (`stopped`). The
device is never waited for, so what is timed is the way from the call to the launch. With R = 1 and exact shapes the
kernels run (`running`), and HT waits for its counts, as any caller does.

Beside it, in the same process: a launch of an empty kernel through torch, and torch's own `all_to_all_single` (NCCL,
one rank).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import facts
from benchmarks.parts import Parts
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink.transport import NvlinkTransport

MODULE = "benchmarks.gpu.host"
HIDDEN, EXPERTS, TOPK = 7168, 256, 8
TOKENS, LL_MOST, HT_MOST = 8, 128, 4096
RANKS = (1, 8)
WARMUP, DRAIN = 300, 100
"""Calls before the first that counts; calls after which the device is waited for, so that its queue never fills."""
GOALS = {"dispatch": (20.0, 40.0), "combine": (12.0, None)}
"""By operation: p50 and p99, microseconds."""


@dataclass(frozen=True)
class Row:
    """One line of host.csv. `ratio`: p50 by that of an empty kernel through torch."""

    backend: str
    op: str
    mode: str
    layout: str
    ranks: int
    tokens: int
    p50_us: float
    p99_us: float
    ratio: float
    kernels: str
    calls: int


class Clock:
    """Times calls on the host.

    Args:
        calls: how many count.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self.empty_us = 1.0

    def times(self, step: Callable[[list[float]], None]) -> list[list[float]]:
        """`step(marks)` appends times (perf_counter_ns) around its parts; the microseconds of each part."""
        parts: list[list[float]] = []
        gc.disable()
        for index in range(WARMUP + self._calls):
            marks: list[float] = []
            step(marks)
            if index % DRAIN == 0:
                torch.cuda.synchronize()
            if index >= WARMUP:
                parts.append([(b - a) / 1e3 for a, b in itertools.pairwise(marks)])
        gc.enable()
        torch.cuda.synchronize()
        return [list(part) for part in zip(*parts, strict=True)]

    def row(
        self, taken: Sequence[float], backend: str, op: str, mode: str, layout: str, size: int, kernels: str = ""
    ) -> Row:
        """Of one part."""
        p50, p99 = quantile(taken, 0.5), quantile(taken, 0.99)
        ratio = round(p50 / self.empty_us, 2)
        return Row(
            backend, op, mode, layout, size, TOKENS, round(p50, 2), round(p99, 2), ratio, kernels, len(taken)
        )  # fmt: skip


def _now(marks: list[float]) -> None:
    marks.append(time.perf_counter_ns())


class FirstOf:
    """A `Group` of which only the first rank is there."""

    rank, epoch = 0, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """The others say the same."""
        return [payload] * self.size


class Alone(NvlinkTransport):
    """A rank without peers. Its kernels return at once, from the first on."""

    def barrier(self) -> None:
        """See `base.MemberTransport`."""
        if self.config.group.size > 1:
            self.stop()

    def stop(self) -> None:
        """Kernels that are launched from now on return at once."""
        self._tables.stop()
        torch.cuda.synchronize()


@contextmanager
def first_rank(size: int, **fields: Any) -> Iterator[tuple[MoECommunicator, Alone]]:
    """Of a group of that size."""
    config = MoEConfig(
        group=FirstOf(size), num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, transport="nvlink", **fields
    )
    transport = Alone(config)
    with mock.patch("ep_kernels.communicator.create", return_value=transport), MoECommunicator(config) as comm:
        yield comm, transport


def inputs(device: torch.device, ids: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids, topk_weights of TOKENS tokens."""
    x = torch.randn(TOKENS, HIDDEN, device=device).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)]).to(device, ids)
    return x, chosen, torch.rand(TOKENS, TOPK, device=device)


def communicator_rows(clock: Clock, size: int, mode: Mode, layout: Layout, exact: bool) -> list[Row]:
    """Dispatch and combine: at once, in two phases, with the routing of a former dispatch."""
    most = LL_MOST if mode is Mode.LL else HT_MOST
    where = mode.value, layout.value + ("-exact" if exact else ""), size, "running" if exact else "stopped"
    rows: list[Row] = []
    with first_rank(size, mode=mode, layout=layout, max_tokens_per_rank=most, exact_shapes=exact) as (comm, transport):
        given = inputs(torch.device("cuda", torch.cuda.current_device()))
        if not exact:
            transport.stop()
        for suffix, dispatch, combine in (
            ("", comm.dispatch, comm.combine),
            ("_async", lambda *args: comm.dispatch_async(*args).wait(), lambda *args: comm.combine_async(*args).wait()),
        ):
            sent, back = clock.times(_steps(dispatch, combine, given))
            rows.append(clock.row(sent, "crossdock", f"dispatch{suffix}", *where))
            rows.append(clock.row(back, "crossdock", f"combine{suffix}", *where))
        _, former = comm.dispatch(*given)

        def again(marks: list[float]) -> None:
            _now(marks)
            comm.dispatch(given[0], None, None, previous_handle=former)
            _now(marks)

        rows.append(clock.row(clock.times(again)[0], "crossdock", "dispatch_again", *where))
    return rows


def _steps(dispatch: Callable[..., Any], combine: Callable[..., Any], given: Sequence[torch.Tensor]) -> Any:
    """A dispatch, the tokens of its output with it, and a combine of them."""

    def step(marks: list[float]) -> None:
        _now(marks)
        out, handle = dispatch(*given)
        tokens = out.tokens
        _now(marks)
        combine(tokens, handle)
        _now(marks)

    return step


def deep_ep_rows(clock: Clock) -> list[Row]:
    """Both pairs as callers of DeepEP write them, one rank, kernels running; high throughput waits for its counts."""
    from crossdock.deep_ep import Buffer

    buffer = Buffer(dist.group.WORLD, 0, 1 << 30, low_latency_mode=True, num_qps_per_rank=EXPERTS)
    x, ids, weights = inputs(torch.device("cuda", torch.cuda.current_device()), torch.int64)

    def pair(marks: list[float]) -> None:
        _now(marks)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, LL_MOST, EXPERTS, use_fp8=False)
        assert isinstance(rows, torch.Tensor)
        buffer.low_latency_combine(rows, ids, weights, handle)
        _now(marks)

    def prefill(marks: list[float]) -> None:
        _now(marks)
        per_rank, _, per_expert, to_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=to_rank,
            num_tokens_per_expert=per_expert,
        )  # fmt: skip
        assert isinstance(rows, torch.Tensor)
        assert handle is not None
        buffer.combine(rows, handle)
        _now(marks)

    low, high = clock.times(pair)[0], clock.times(prefill)[0]
    buffer.destroy()
    return [
        clock.row(low, "deep_ep surface", "pair", "ll", "expert_major", 1, "running"),
        clock.row(high, "deep_ep surface", "pair", "ht", "flat-exact", 1, "running"),
    ]


def torch_rows(clock: Clock) -> list[Row]:
    """An empty kernel's launch, and an all-to-all of as many bytes."""
    one = torch.zeros(1, device="cuda")
    sent = torch.zeros(TOKENS * TOPK, HIDDEN, dtype=torch.bfloat16, device="cuda")
    received = torch.empty_like(sent)

    def empty(marks: list[float]) -> None:
        _now(marks)
        one.zero_()
        _now(marks)

    def exchange(marks: list[float]) -> None:
        _now(marks)
        dist.all_to_all_single(received, sent)
        _now(marks)

    taken = clock.times(empty)[0]
    clock.empty_us = quantile(taken, 0.5)
    rows = [clock.row(taken, "torch", "zero_", "", "", 1)]
    rows.append(clock.row(clock.times(exchange)[0], "torch nccl", "all_to_all_single", "", "", 1))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a goal was missed or a part failed."""
    options = _parse(arguments)
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    clock = Clock(options.calls)
    config: dict[str, object] = {"calls": options.calls, "hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK}
    about = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(1)
    table = Parts(options.out, "host", Row, lambda: about, _show)
    table.measure("torch", partial(torch_rows, clock))
    cases = [(size, mode, layout, False) for size in RANKS for mode in (Mode.LL, Mode.HT) for layout in options.layouts]
    for size, mode, layout, exact in [*cases, *((1, Mode.HT, each, True) for each in (Layout.FLAT, Layout.GROUPED))]:
        what = f"{size} ranks, {mode.value}, {layout.value}"
        table.measure(what, partial(communicator_rows, clock, size, mode, layout, exact))
    table.measure("deep_ep", partial(deep_ep_rows, clock))
    print(f"written to {options.out}")
    dist.destroy_process_group()
    return table.status or int(any(map(_missed, table.rows)))


def _show(row: Row) -> None:
    what = f"{row.backend:16} {row.op:18} {row.mode:3} {row.layout:18} R={row.ranks} {row.kernels:8}"
    print(f"{what} {row.p50_us:7.1f} us, p99 {row.p99_us:7.1f}, {row.ratio:5.1f} empty kernels", flush=True)


def _missed(row: Row) -> bool:
    p50, p99 = GOALS.get(row.op, (None, None))
    late = (p50 is not None and row.p50_us > p50) or (p99 is not None and row.p99_us > p99)
    return late and row.kernels == "stopped"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(f"out/{datetime.date.today().isoformat()}-host"))
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--layouts", type=Layout, nargs="+", default=list(Layout), help="all by default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
