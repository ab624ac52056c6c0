"""Grouped products of quantised experts: in Triton's interpreter, on a GPU; and when they are not taken."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import MXFP4, Format, Stack
from crossdock.worker.experts.expert_mlps import ExpertLoop, ExpertMLPs, _kind
from crossdock.worker.experts.grouped.products import GroupedProducts, Launcher
from crossdock.worker.experts.grouped.support import compile_into, reason_against, reason_in_shapes
from tests.tools import needs
from tests.unit.grouped_cases import BLOCKS, CASES, floats, groups, layer, tokens_of

LIMITS = {"blocks, gelu": 0.1, "blocks, ungated": 0.1}
"""In the interpreter: the rest differ by the order of sums, or by what that carries over a step of bf16 or e4m3. Here
rows between the products are rounded to bf16 first, and one in a hundred lands on the other side."""

needs_triton = needs("triton")


def run(module: str, *args: str, **environment: str) -> dict[str, Any]:
    """What a program of this folder prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.unit.{module}", *args],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@functools.cache
def interpreted() -> dict[str, float]:
    """Errors of all cases, from one process: Triton reads TRITON_INTERPRET when it is imported."""
    return run("grouped_interpreted", str(random.getrandbits(31)), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted_products(name: str) -> None:
    assert interpreted()[name] < LIMITS.get(name, 0.02)


@needs_triton
@pytest.mark.parametrize(("name", "most"), [("nvfp4", 0), ("int4", 2**-7), ("int8", 2**-7)])
def test_codes_become_what_their_format_says(name: str, most: float) -> None:
    """e2m1 with scales of e4m3 exactly; integers within bf16's rounding, which is down in the interpreter."""
    assert interpreted()[f"decoded {name}"] <= most


@needs_triton
def test_compiled_for_hopper() -> None:
    """Without a GPU: the tensor cores' instructions, registers that hold the sums, nothing compiled while serving."""
    found = run("grouped_compiled")
    kinds = {(kind.split(".")[4], kind.split(".f32.")[1]) for kind in found["wgmma"]}
    assert kinds == {("m64n32k32", "e4m3.e4m3"), ("m64n128k32", "e4m3.e4m3"), ("m64n16k16", "bf16.bf16"),
                     ("m64n64k16", "bf16.bf16")}  # fmt: skip
    assert found["stack"] <= 160, "bytes of local memory: an inner loop spills"
    assert (found["kernels"], found["again"]) == (13, 0), "another number of rows compiled a kernel anew"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", CASES)
def test_products_on_a_gpu(name: str) -> None:
    """Of the dequantised model within e4m3's rounding of rows, or bf16's; the host waits for nothing."""
    weights, gating = layer(name, 7)
    assert_right(weights, gating, [3, 0, 130, 16, 70, 1, 300], 2)
    assert_right(weights, gating, [0, 0, 0, 1, 0, 0, 0], 0)


def assert_right(weights: tuple[Stack, Stack], gating: Gating, counts: list[int], padding: int) -> None:
    """For groups of so many rows, and `padding` rows of nobody behind each."""
    tokens = tokens_of(counts, padding, weights[0].columns, more=4 * padding)
    begins, end = groups(counts, padding)
    shapes = [(stack.data.shape[0], stack.rows, stack.columns) for stack in weights]
    there = [
        Stack.empty(s.format, shape, torch.bfloat16, "cuda", bias=s.bias is not None, parts=s.parts)
        for s, shape in zip(weights, shapes, strict=True)
    ]
    for target, source in zip(there, weights, strict=True):
        target.copy_(source)
    experts = ExpertMLPs({0: (there[0], there[1])}, gating, torch.bfloat16)
    assert isinstance(experts._computed[_kind(there[0])], GroupedProducts)
    sent = tokens.cuda(), *(torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([*begins, end], counts))
    out = torch.full(tokens.shape, 7.0, dtype=torch.bfloat16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts.forward(0, *sent, out=out, num_rows=end + padding)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    limit = {"fp8": 0.08, "int4": 0.02, "int8": 0.02}.get(weights[0].format.kind, 0.01)
    for slot, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        rows, found = tokens[begin : begin + count].float(), out[begin : begin + count].float().cpu()
        first, down = (stack[slot] for stack in weights)
        inner = rows @ floats(first).t() + (0 if first.bias is None else first.bias.float())
        hidden = gating(inner, torch.empty(count, down.columns))
        expected = hidden @ floats(down).t() + (0 if down.bias is None else down.bias.float())
        assert not count or float((found - expected).norm() / expected.norm()) < limit
        assert bool((out[begin + count : begin + count + padding] == 7).all()), "a row of nobody was written"


@pytest.mark.parametrize(
    ("format", "rows", "inner", "parts", "dtype", "reason"),
    [
        (BLOCKS, 256, 136, 2, torch.bfloat16, "no multiple of 16 bytes"),
        (BLOCKS, 288, 144, 1, torch.bfloat16, "does not end where gate ends, after 144 rows"),
        (Format("fp8", (64, 64)), 256, 128, 2, torch.bfloat16, "they know no fp8, a scale per block of 64 x 64"),
        (MXFP4, 256, 128, 1, torch.float16, "mxfp4 with torch.float16"),
        (BLOCKS, 256, 128, 2, torch.bfloat16, ""),
    ],
)
def test_when_they_are_not_taken(
    format: Format, rows: int, inner: int, parts: int, dtype: torch.dtype, reason: str
) -> None:
    stacks = [
        Stack.empty(format, (2, *shape), dtype, "meta", parts=p)
        for *shape, p in ((2 * inner, 256, parts), (256, inner, 1))
    ]
    found = reason_in_shapes(stacks[0], stacks[1], Gating(), dtype)
    assert reason in found if reason else found == ""


@needs_triton
def test_compiled_kernels_go_where_they_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", knobs.cache.dir)
    compile_into(str(tmp_path))
    assert knobs.cache.dir == str(tmp_path / "triton")
    knobs.cache.dir = str(tmp_path / "home" / ".triton")
    compile_into("")
    assert knobs.cache.dir == str(tmp_path / "home" / ".triton")


@needs_triton
def test_where_nothing_can_be_written_kernels_are_compiled_into_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the chart's pods: a read-only root, and no home. What others may write is not run."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "dir", "/proc/nobody/.triton/cache")
    with pytest.raises(OSError, match="/proc/nobody"):
        FileCacheManager("key")
    for folder in ("", "/proc/nobody", ""):
        knobs.cache.dir = "/proc/nobody/.triton/cache"
        compile_into(folder)
        assert knobs.cache.dir == str(tmp_path / f"crossdock-triton-{os.geteuid()}")
        FileCacheManager("key").put("", "file")
    Path(knobs.cache.dir).chmod(0o777)
    compile_into("/proc/nobody")
    assert knobs.cache.dir.startswith(str(tmp_path / f"crossdock-triton-{os.geteuid()}-"))


def test_on_a_cpu_the_loop_serves() -> None:
    weights, gating = layer("blocks", 2)
    assert reason_against(*weights, gating, torch.bfloat16) == "they are for GPUs, and weights are on cpu"
    (computed,) = ExpertMLPs({0: weights}, gating, torch.bfloat16)._computed.values()
    assert isinstance(computed, ExpertLoop)


def test_a_launch_that_repeats_is_compiled_once() -> None:
    """For each kind of argument that Triton compiles for; without a kernel in between, each goes its own way."""
    launched: list[tuple[str, Any]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args: launched.append(("again", (grid, args)))

    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(*args: Any, **named: Any) -> Compiled:
                launched.append(("first", (grid, args, named)))
                return Compiled()

            return first

    launch, rows = Launcher(Function()), torch.zeros(64, dtype=torch.bfloat16)
    constants, options = {"columns": 7, "swap": True}, {"num_warps": 4}
    launch(3, (rows, None, 16, 0.5), constants, options)
    assert launched.pop() == ("first", ((3,), (rows, None, 16, 0.5), constants | options))
    launch(5, (rows, None, 32, 0.25), constants, options)
    assert launched.pop() == ("again", ((5, 1, 1), (rows, None, 32, 0.25, 7, True)))
    others: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = [
        ((rows[1:], None, 16, 0.5), constants, options), ((rows.float(), None, 16, 0.5), constants, options),
        ((rows, rows, 16, 0.5), constants, options), ((rows, None, 17, 0.5), constants, options),
        ((rows, None, 1, 0.5), constants, options), ((rows, None, 1 << 40, 0.5), constants, options),
        ((rows, None, 16, 0.5), constants | {"columns": 8}, options),
        ((rows, None, 16, 0.5), constants, {"num_warps": 8}),
    ]  # fmt: skip
    for kinds in others:
        for how in ("first", "again"):
            launch(1, *kinds)
            assert launched.pop()[0] == how
