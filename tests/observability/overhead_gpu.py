"""Kernels with and without latency records, of many ranks on one GPU; and the step of its clock."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.transports.base import CombineArgs
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.types import Layout, Mode
from tests.gpu.loopback import Gpu, Loopback
from tests.gpu.loopback_group import LoopGroup
from tests.observability.overhead import CASES, EXPERTS, HIDDEN, TOPK, WARMUP, Row, alternate, row_of

RANKS = 4
LAUNCHES = {"ll": 100, "ht": 20}
TRACE = """#pragma once
#include "common/block.cuh"
#include "common/ptx.cuh"
#include "layout/region.cuh"
#include "types.h"

namespace ep {

constexpr u32 kOpSeq = 0, kOpRecord = 1, kNumOpWords = 2;

__device__ __forceinline__ u64 record_number(const World&, u32, const u64*) { return 0; }

__device__ __forceinline__ void note_sent(const World& world, u32 op, u32, i32, u64 seq, u64, u64* words, i32) {
  ptx::store_relaxed_sys(flag_at(world, world.rank, op == OP_DISPATCH ? FLAG_SENT : FLAG_COMBINE_SENT, world.rank),
                         seq);
  words[kOpSeq] = seq;
}

__device__ __forceinline__ u64 note_receive(const World&, Team, u32, u64) { return 0; }

__device__ __forceinline__ void note_end(const World&, Team, u64, const u64*) {}

}  // namespace ep

#define note_wait(waits, peer, waited) ((void)(waits), (void)(peer))
"""
"""`common/trace.cuh` without records: a call of note_wait does not even read the clock."""
CLOCK = """extern "C" __global__ void steps(unsigned long long* values, int count) {
  unsigned long long last = 0, now;
  for (int i = 0; i < count;) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now != last) values[i++] = last = now;
  }
}
"""


class Untraced(Gpu):
    """A GPU whose kernels keep no records."""

    _made: dict[tuple[jit.Variant, int], driver.Function]

    def _function(self, call: Call) -> driver.Function:
        variant = replace(call.variant, loopback=True)
        key = variant, call.launch.shared_bytes
        self._made = getattr(self, "_made", {})
        if key not in self._made:
            text = jit.source(variant, {"common/trace.cuh": TRACE})
            binary = jit.compile_source(text, variant.kernel, driver.architecture(self.device.index))
            self._made[key] = driver.Function(binary.cubin, variant.kernel, call.launch.shared_bytes)
        return self._made[key]


class Pair:
    """A dispatch and a combine of all ranks, to be launched again and again, as a graph would."""

    def __init__(self, machine: Gpu, config: Callable[[LoopGroup], MoEConfig], inputs: list[Any], mode: Mode) -> None:
        self._loop, self._machine = Loopback(config, RANKS, machine=machine), machine
        steps = self._loop.begin(*inputs, mode)
        self._dispatch = [step.call for step in steps]
        self._loop.launch(self._dispatch)
        delivered = self._loop.finish(steps)
        self._combine, self.results = [], []
        for engine, (out, handle) in zip(self._loop.engines, delivered, strict=True):
            call, receive = engine.combine(CombineArgs(out.tokens, handle, None, True))
            self._combine.append(call)
            self.results.append(receive(None)[0])
        self._launches = [(calls[0], *self._loop.pack(calls)) for calls in (self._dispatch, self._combine)]
        self._keep = steps, delivered

    def times(self, count: int) -> list[tuple[float, float]]:
        """Seconds of each dispatch and of each combine."""
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(count)]
        for first, second, third in marks:
            first.record()
            self._machine.enqueue(*self._launches[0])
            second.record()
            self._machine.enqueue(*self._launches[1])
            third.record()
        torch.cuda.synchronize()
        self._loop.check()
        return [(1e-3 * a.elapsed_time(b), 1e-3 * b.elapsed_time(c)) for a, b, c in marks]


def rows(turns: int) -> Iterator[Row]:
    """Dispatch and combine."""
    for mode, tokens in CASES.items():

        def config(group: LoopGroup, tokens: int = tokens, mode: str = mode) -> MoEConfig:
            return MoEConfig(
                group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens,
                mode=Mode(mode), layout=Layout.FLAT, timeout_s=20.0,
            )  # fmt: skip

        inputs = [
            [torch.randn(tokens, HIDDEN).bfloat16() for _ in range(RANKS)],
            [torch.rand(tokens, EXPERTS).topk(TOPK).indices.int() for _ in range(RANKS)],
            [torch.rand(tokens, TOPK) for _ in range(RANKS)],
        ]
        plain = config(LoopGroup(0, RANKS))
        pairs = {kind: Pair((Gpu if kind else Untraced)(plain), config, inputs, Mode(mode)) for kind in (True, False)}
        ops: dict[bool, list[list[float]]] = {False: [], True: []}

        def measured(kind: bool, pairs: Any = pairs, ops: Any = ops, mode: str = mode) -> float:
            medians = [statistics.median(times) for times in zip(*pairs[kind].times(LAUNCHES[mode]), strict=True)]
            ops[kind].append(medians)
            return sum(medians)

        alternate(measured, turns)
        for place, op in enumerate(("dispatch", "combine")):
            times = [[one[place] for one in ops[kind][WARMUP:]] for kind in (False, True)]
            yield row_of(torch.cuda.get_device_name(), op, mode, tokens, list(zip(*times, strict=True)))
        for with_records, without in zip(pairs[True].results, pairs[False].results, strict=True):
            assert torch.equal(with_records, without), "kernels without records give other bits"


def globaltimer() -> dict[str, float]:
    """Nanoseconds between two values of the clock, as a thread that only reads it sees them."""
    device = torch.cuda.current_device()
    cubin = jit.compile_source(CLOCK, "steps", driver.architecture(device)).cubin
    values = torch.zeros(1000, dtype=torch.int64, device="cuda")
    function = driver.Function(cubin, "steps", 0)
    stream = torch.cuda.current_stream().cuda_stream
    function.launch(1, 1, stream, ctypes.c_uint64(values.data_ptr()), ctypes.c_int32(len(values)))
    torch.cuda.synchronize()
    steps = (values[1:] - values[:-1]).tolist()
    return {"min_ns": min(steps), "median_ns": statistics.median(steps), "max_ns": max(steps)}
