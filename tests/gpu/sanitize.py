"""compute-sanitizer over the loop-back harness: every kernel and layout in a few small steps, under each tool.

    python -m tests.gpu.sanitize              all tools at once, spread over the GPUs; one line per tool
    python -m tests.gpu.sanitize racecheck    one of them
    python -m tests.gpu.sanitize network      all tools over one part alone: moe, network (that over two hosts),
                                              collectives
    python -m tests.gpu.sanitize --steps      the steps alone, without a tool

racecheck looks at shared memory only: the order between ranks is what the tests with delays and poison are for.
Driver calls that fail on purpose are not reported: cuda-bindings asks the driver for symbols that it may lack. Nor is
what initcheck says of copies to the host and of torch's own kernels: the steps fetch whole tensors, and their toy
experts run over whole tensors, rows past the counts included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels.types import Layout, Mode, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.tools import path

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
DEADLINE_S = 200.0
OPTIONS = ("--report-api-errors", "no", "--error-exitcode", "86", "--show-backtrace", "no", "--print-limit", "0")
FOUND_SOMETHING = 86
TORCH = re.compile(r"\b(at|c10|cub|thrust)::")
"""In the names of kernels that are not ours."""
NUM_RANKS, BLOCKS_PER_RANK = 3, 2


@dataclass(frozen=True)
class Finding:
    """What one tool said.

    Attributes:
        tool: its name.
        ok: no error, and all steps passed.
        summary: one line.
        report: the tool's lines and the end of the program's.
    """

    tool: str
    ok: bool
    summary: str
    report: str


def configurations() -> Iterator[dict[str, Any]]:
    """What a communicator of each round is made of, beside its mode; first, rows that are long for HT combine."""
    yield {"layout": Layout.FLAT, "hidden_size": 4104}
    for layout in Layout:
        yield {"layout": layout}
        yield {"layout": layout, "quantize": True, "combine_dtype": torch.float8_e4m3fn}
    yield {"layout": Layout.GROUPED, "quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED, "expert_alignment": 4}
    for layout in (Layout.EXPERT_MAJOR, Layout.GROUPED):
        yield {"layout": layout, "exact_combine": True}


def take_moe_steps(nodes: int = 1) -> int:
    """Dispatch and combine, with the ranks on `nodes` hosts. Each result is compared with the reference. Returns the
    number of steps."""
    from tests.gpu.loopback import Loopback
    from tests.gpu.loopback_network import TCP
    from tests.gpu.test_loopback import SPLIT, check

    count, network = 0, {"network": TCP} if nodes > 1 else {}
    for mode in (Mode.LL, Mode.HT):
        for overrides in configurations():
            hidden = overrides.get("hidden_size", 272)
            case = RoutingCase(7, 3, hidden, (4, 0, 3), "single_none", draw_seed(), max_tokens=4)
            fields = {**overrides, **network, "mode": mode, "timeout_s": 60.0}
            loop = Loopback(
                lambda group, c=case, f=fields: c.config(group, **f),  # type: ignore[misc]
                NUM_RANKS, BLOCKS_PER_RANK, nodes=nodes,
            )  # fmt: skip
            loop.launch([engine.barrier() for engine in loop.engines])
            check(loop, case, mode)
            check(loop, case, mode, phases=SPLIT, backward=len(overrides) == 1)
            loop.close()
            count += 2
    return count


def take_collective_steps() -> int:
    """Each of the collectives' kernels, whole vectors and parts of them; the number of steps."""
    from types import SimpleNamespace

    from tests.gpu.loopback import Gpu
    from tests.gpu.loopback_collectives import BOTH, LoopbackCollectives, rows

    config: Any = SimpleNamespace(kernel_cache_dir=None)
    loop = LoopbackCollectives(NUM_RANKS, Gpu(config), BLOCKS_PER_RANK)
    draw = torch.Generator().manual_seed(draw_seed())
    for n in (8, 515):
        for place in ("plain", "registered", "in place"):
            loop.all_gather([rows(NUM_RANKS, n, torch.bfloat16, draw)], place, 2 * (n % 8))
        for algorithm in BOTH:
            for place in ("plain", "registered", "both"):
                loop.all_reduce(rows(NUM_RANKS, n, torch.bfloat16, draw), algorithm, place, 2 * (n % 3))
        loop.reduce_scatter(rows(NUM_RANKS, NUM_RANKS * n, torch.bfloat16, draw), n == 8, 2 * (n % 3))
        terms = [x.view(NUM_RANKS, n) for x in rows(NUM_RANKS, NUM_RANKS * n, torch.bfloat16, draw)]
        loop.add_terms(terms, 2 * (n % 3), n == 8)
    return 2 * 11


PARTS = {"moe": take_moe_steps, "network": lambda: take_moe_steps(nodes=2), "collectives": take_collective_steps}


def command(tool: str, parts: Sequence[str]) -> list[str]:
    """The tool over those parts of this module's steps; only our kernels are watched, except where all writes have to
    be known."""
    sanitizer = path("compute-sanitizer")
    assert sanitizer is not None, "compute-sanitizer is not on PATH"
    scope = [f"--kernel-name=kns={name}" for name in ("dispatch", "combine", "barrier", "all_", "reduce_", "add_")]
    if tool == "initcheck":
        scope = ["--check-api-memory-access", "no"]
    return [sanitizer, "--tool", tool, *OPTIONS, *scope, sys.executable, "-m", "tests.gpu.sanitize", "--steps", *parts]


def examine(tools: Sequence[str], parts: Sequence[str] = tuple(PARTS), deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run the tools side by side, each on a GPU of its own where there are enough."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = visible.split(",")
    begin, running = time.monotonic(), []
    for number, tool in enumerate(tools):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}
        running.append(
            subprocess.Popen(
                command(tool, parts), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    return [finish(tool, process, begin, deadline_s) for tool, process in zip(tools, running, strict=True)]


def finish(tool: str, process: subprocess.Popen[str], begin: float, deadline_s: float) -> Finding:
    """Wait for one tool."""
    try:
        text, _ = process.communicate(timeout=max(1.0, begin + deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Finding(tool, False, f"{tool}: not done after {deadline_s:.0f} s", text[-4000:])
    return judge(tool, process.returncode, text, time.monotonic() - begin)


def judge(tool: str, status: int, text: str, took_s: float) -> Finding:
    """What a tool's exit status and output mean."""
    totals = [
        int(n) for pair in re.findall(r"ERROR SUMMARY: (\d+) error|SUMMARY: (\d+) hazard", text) for n in pair if n
    ]
    places = re.findall(r"^========= Uninitialized .*\n=========     at (.*)$", text, re.MULTILINE)
    not_ours = sum(TORCH.search(place) is not None for place in places) if tool == "initcheck" else 0
    errors = sum(totals) - not_ours
    steps = re.search(r"^steps passed: (\d+)$", text, re.MULTILINE)
    ok = bool(totals) and errors == 0 and steps is not None and status in (0, FOUND_SOMETHING if not_ours else 0)
    said = f"{errors} errors" if totals else "no summary"
    done = f"{steps[1]} steps passed" if steps else f"the steps failed (exit {status})"
    watched = [line for line in text.splitlines() if line.startswith("=========") and not TORCH.search(line)]
    report = "\n".join(watched[:80]) + "\n" + text[-4000:]
    return Finding(tool, ok, f"{tool}: {said}, {done}, {took_s:.0f} s", report)


def main(words: Sequence[str]) -> int:
    """See the module's docstring; the exit status."""
    parts = [word for word in words if word in PARTS] or list(PARTS)
    if "--steps" in words:
        print(f"steps passed: {sum(PARTS[part]() for part in parts)}", flush=True)
        return 0
    findings = examine([word for word in words if word not in PARTS] or TOOLS, parts)
    for finding in findings:
        print(finding.summary if finding.ok else f"{finding.summary}\n{finding.report}", flush=True)
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
