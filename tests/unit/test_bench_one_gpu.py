"""Programs of the benchmarks for one GPU, whole, on a pretended one: their rows, what a failure costs, exit status."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import facts
from benchmarks.gpu import experts, fused, host, host_cost, layer, network_push, pieces
from benchmarks.report import read
from benchmarks.service import gpu as service_gpu
from benchmarks.service import load as service_load
from benchmarks.vllm import __main__ as vllm_bench
from benchmarks.vllm import cases as vllm_cases
from ep_kernels import MoECommunicator, MoEConfig
from ep_kernels.transports.nvlink.collectives import NvlinkCollectives
from ep_kernels.transports.nvlink.gpu import driver, launch
from ep_kernels.transports.nvlink.memory import samples
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember
from ep_kernels.transports.nvlink.transport import NvlinkTransport
from tests.emulator.cuda import NAME, pretended
from tests.emulator.silent import SilentDriver
from tests.observability import overhead, overhead_gpu
from tests.tools import needs

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64")
needs_emulator = needs("g++")


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """A pretended GPU; what is set stays as long."""
    with pretended() as made:
        yield made


def several(patch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        patch.setattr(module, name, value)


def failures(folder: Path) -> list[str]:
    told = facts.read(folder)
    assert told["gpu"] == NAME
    found: list[str] = told["failures"]
    return found


@pytest.mark.parametrize(("ready", "status"), [(0.0, 0), (1e9, 1)])
def test_the_schedule_of_fused_products(patch: pytest.MonkeyPatch, ready: float, status: int, tmp_path: Path) -> None:
    several(patch, fused, WARMUP=1, FLUSH_BYTES=64, COPY_BYTES=1 << 12, SQUARE=16, READY=ready, BESIDE=0.0, SHARE=0.0)
    patch.setattr(fused, "EFFICIENCY", {(8, 16): {16: 0.5, 32: 0.5}})
    patch.setattr(fused.CopyClock, "_taken_us", lambda self, num_bytes: 1 + num_bytes / 1000)
    assert fused.main(["--one-gpu", "--iterations", "2", "--out", str(tmp_path)]) == status
    lines = read(tmp_path, "fused")
    assert [line["what"] for line in lines] == ["cublas", "ready", "paced"] * 2 + ["copies"]
    assert all(float(line["p50_us"]) > 0 for line in lines)
    assert failures(tmp_path) == []


def test_a_wrong_product_costs_no_other_shape(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    several(patch, fused, WARMUP=1, FLUSH_BYTES=64, COPY_BYTES=1 << 12, SQUARE=16, READY=0.0, BESIDE=0.0, SHARE=0.0)
    patch.setattr(fused, "EFFICIENCY", {(8, 16): {16: 0.5, 32: 0.5}})
    patch.setattr(fused.CopyClock, "_taken_us", lambda self, num_bytes: 1 + num_bytes / 1000)
    follow = fused.matmul.follow
    patch.setattr(fused.matmul, "follow", lambda pacer, x, *rest: [y + (len(x) == 16) for y in follow(pacer, x, *rest)])
    assert fused.main(["--one-gpu", "--iterations", "2", "--out", str(tmp_path)]) == 1
    assert [line["m"] for line in read(tmp_path, "fused")] == ["32"] * 3 + ["16"]
    assert [fault.partition(":")[0] for fault in failures(tmp_path)] == ["16 x 8 x 16"]


def test_experts_in_pieces(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    several(patch, pieces, RANKS=(2,), TOKENS=(8,), LAYER_SHAPES={(64, 16): 32, (32, 16): 32}, WARMUP=0, FLUSH_BYTES=64)
    assert pieces.main(["--iterations", "1", "--out", str(tmp_path)]) == 0
    lines = read(tmp_path, "pieces")
    assert len(lines) == 2 * len(pieces.FORMS) * len(pieces.SMS_LEFT)
    drawn, broken = layer.Experts.drawn, []

    def fails_first(*given: Any) -> Any:
        broken.append(given)
        return drawn(*given) if len(broken) > 1 else 1 // 0

    patch.setattr(layer.Experts, "drawn", fails_first)
    assert pieces.main(["--iterations", "1", "--out", str(tmp_path)]) == 1
    assert {line["hidden"] for line in read(tmp_path, "pieces")} == {"32"}
    assert "ZeroDivisionError" in failures(tmp_path)[0]


@pytest.mark.parametrize("goal", [0.0, 1e9])
def test_quantised_experts(patch: pytest.MonkeyPatch, goal: float, tmp_path: Path) -> None:
    several(patch, experts, EXPERTS=4, HIDDEN=256, INNER=128, WARMUP=0, GOALS={"fp8 blocks": ((1 << 20, goal),)})
    patch.setattr(experts, "bandwidth", lambda: 1000.0)
    patch.setattr(torch, "_scaled_grouped_mm", lambda x, weight, *_, **__: x)
    words = ["--experts", "4", "--rows", "4", "16", "--calls", "2", "--out", str(tmp_path)]
    assert experts.main(words) == bool(goal)
    lines = read(tmp_path, "experts")
    assert [line["format"] for line in lines] == [name for name in (*experts.FORMATS, "torch fp8 rows") for _ in "12"]
    assert all(float(line["error"]) < 0.1 for line in lines)
    assert failures(tmp_path) == []


@needs_emulator
def test_a_push_to_the_proxy(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    several(patch, network_push, ROUNDS=128, WARMUP=64)
    assert network_push.main(["--out", str(tmp_path)]) == 0
    lines = read(tmp_path, "network_push")
    assert [line["what"] for line in lines] == [
        "fence", "round", "read", "push", "see", "push, at most", "see, at most",
    ]  # fmt: skip
    assert {line["samples"] for line in lines} == {"64"}
    assert all(float(line["p50_us"]) > 0 for line in lines[:3])


# What calls cost the host: a driver that launches nothing.


@pytest.fixture
def silent(patch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> SilentDriver:
    """Of the pretended GPU; it knows the records of all kernels."""
    made = SilentDriver(tmp_path_factory.mktemp("driver"))
    patch.setattr(launch, "load", lambda: made.library)
    for name in ("empty", "empty_like"):  # what kernels would have written
        patch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    patch.setattr(driver, "call", _called)
    patch.setattr(driver, "_passed", lambda stream, patience_s: True)
    patch.setattr(driver, "_retire", lambda *_: None)
    patch.setattr(driver, "block_bytes", lambda device: 232448)
    patch.setattr(driver, "load", lambda *given: launch.Kernel(1, given[-1], made.library))
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    patch.setattr(samples, "DeviceCopy", lambda num_words: torch.Tensor.clone)
    patch.setattr(NvlinkMember, "_check_device", lambda *_: None)
    for kind in (NvlinkTransport, NvlinkCollectives):
        patch.setattr(kind, "__init__", functools.partialmethod(_of_processors, kind.__init__))
    return made


def _called(name: str, *given: Any) -> int:
    """As `driver.call`."""
    if name.startswith("cuMemcpy"):
        ctypes.memmove(*given[:3])
    return 0


def _of_processors(transport: Any, begin: Any, config: Any) -> None:
    begin(transport, config)
    transport.capabilities = replace(transport.capabilities, device_type="cpu")


def as_on_a_gpu(config: MoEConfig) -> MoECommunicator:
    comm = MoECommunicator(config)
    comm._reads_dropped = comm._transport._raises  # type: ignore[attr-defined]
    return comm


OPS = ("dispatch", "combine", "dispatch_async", "combine_async", "dispatch_again")


@pytest.mark.parametrize("goal", [1e9, 0.0])
def test_calls_of_a_communicator(patch: pytest.MonkeyPatch, silent: SilentDriver, goal: float, tmp_path: Path) -> None:
    several(patch, host, HIDDEN=64, EXPERTS=16, TOPK=2, WARMUP=1, MoECommunicator=as_on_a_gpu)
    patch.setattr(host, "GOALS", {"dispatch": (goal, None)})
    assert host.main(["--calls", "2", "--layouts", "flat", "--out", str(tmp_path)]) == (goal == 0)
    found = [(line["op"], line["mode"], line["layout"], line["ranks"]) for line in read(tmp_path, "host")]
    assert found == [
        ("zero_", "", "", "1"), ("all_to_all_single", "", "", "1"),
        *((op, mode, "flat", ranks) for ranks in "18" for mode in ("ll", "ht") for op in OPS),
        *((op, "ht", f"{layout}-exact", "1") for layout in ("flat", "grouped") for op in OPS),
        ("pair", "ll", "expert_major", "1"), ("pair", "ht", "flat-exact", "1"),
    ]  # fmt: skip
    assert failures(tmp_path) == []


@pytest.mark.parametrize("target", [1e9, 0.0])
def test_calls_of_collectives(patch: pytest.MonkeyPatch, silent: SilentDriver, target: float, tmp_path: Path) -> None:
    made = []
    several(patch, host_cost, BATCH=1, TARGETS_US={"all_reduce": target})
    patch.setattr(host_cost, "lonely", lambda ranks, lonely=host_cost.lonely: made.append(lonely(ranks)) or made[0])
    words = ["--ranks", "2", "--num-bytes", "64", "--calls", "2", "--out", str(tmp_path)]
    try:
        assert host_cost.main(words) == (target == 0)
    finally:
        made[0].close()
    lines = read(tmp_path, "host_cost")
    assert [line["op"] for line in (lines[0], lines[-1])] == ["zero_"] * 2
    assert [(line["op"], line["way"]) for line in lines[1:-1]] == [
        (op, way)
        for op in ("all_reduce", "all_reduce_new", "reduce_scatter", "all_gather_kernel", "all_gather_copies")
        for way in ("long", "plan")
    ]
    assert failures(tmp_path) == []


# What stands beside them.


def test_latency_records_of_kernels(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pairs of launches as a clock says: records cost 10 %."""

    class Pair:
        results = (torch.ones(1),)

        def __init__(self, machine: Any, *_: Any) -> None:
            self._us = 10.0 if isinstance(machine, overhead_gpu.Untraced) else 11.0

        def times(self, count: int) -> list[tuple[float, float]]:
            return [(1e-6 * self._us, 2e-6 * self._us)] * count

    patch.setattr(overhead_gpu, "Pair", Pair)
    patch.setattr(overhead_gpu, "globaltimer", lambda: {"min_ns": 32})
    patch.setattr(overhead_gpu, "HIDDEN", 8)
    assert overhead.main(["--device", "cuda", "--turns", "6", "--out", str(tmp_path)]) == 0
    lines = read(tmp_path, "overhead")
    assert [(line["op"], line["mode"]) for line in lines] == [
        (op, mode) for mode in ("ll", "ht") for op in ("dispatch", "combine")
    ]
    assert {float(line["overhead_percent"]) for line in lines} == {10.0}
    patch.setattr(Pair, "results", property(lambda pair: [torch.full((1,), pair._us)]))
    assert overhead.main(["--device", "cuda", "--turns", "6", "--out", str(tmp_path)]) == 1, "other bits"
    assert facts.read(tmp_path)["failures"] == ["operations: AssertionError: kernels without records give other bits"]


class Served:
    """As a Supervisor whose group serves."""

    control_address = "here"

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_serving(self, timeout_s: float) -> Any:
        return SimpleNamespace(members=[])


@pytest.mark.parametrize("broken", [False, True])
def test_a_worker_with_quantised_experts(patch: pytest.MonkeyPatch, broken: bool, tmp_path: Path) -> None:
    parts = {"tokens": 64.0, "experts": 2.0, "dispatch": 1.0, "combine": 1.0}
    load = SimpleNamespace(run=lambda job: service_load.Measured([0.002, 0.002], 0.004))
    several(
        patch, service_gpu, Supervisor=Served, LoadProcesses=lambda number: nullcontext(load),
        Counters=lambda pages: SimpleNamespace(means_since=lambda before: parts), HIDDEN=128, INNER=128, TOPK=2,
    )  # fmt: skip
    if broken:
        patch.setattr(service_gpu, "write_experts", lambda *_, fp8: 1 // (not fp8))
    words = ["--experts", "4", "--seconds", "0.01", "--out", str(tmp_path)]
    assert service_gpu.main(words) == broken
    lines = read(tmp_path, "service_gpu")
    formats = ("bf16",) if broken else ("bf16", "fp8")
    assert [line["format"] for line in lines] == [name for name in formats for _ in service_gpu.CASES]
    assert {line["ratio"] for line in lines} == {"1.0"}
    assert [fault.partition(":")[0] for fault in failures(tmp_path)] == ["fp8"] * broken


def test_kernels_of_vllms_experts(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over a module that stands for those that call vLLM."""
    made = SimpleNamespace(kernel=object(), block_sizes=lambda: "m=64")
    kernels = SimpleNamespace(
        weights_of=lambda shape, experts, device: None, made=lambda case, *_: made, times_us=lambda *_: iter([3.0, 1.0])
    )
    patch.setitem(sys.modules, "benchmarks.vllm.kernels", kernels)
    patch.setattr(sys.modules["benchmarks.vllm"], "kernels", kernels, raising=False)
    patch.setattr(vllm_bench, "check", lambda needed: None)
    words = ["--out", str(tmp_path), "--experts", "--runs", "2", "--decode", "2", "--prefill", "512", "--ranks", "2"]
    assert vllm_bench.main(words) == 0
    lines = read(tmp_path, "vllm-experts")
    assert len(lines) == 2 * len(list(vllm_cases.cases_of(2, 512)))
    assert {line["layer_us"] for line in lines} == {"1.0", "3.0"}
