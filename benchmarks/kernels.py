"""`make kernels`: every CUDA kernel compiled without a GPU, judged, and shown as a table.

    python -m benchmarks.kernels                  all variants for sm_90a and sm_100a; exit status 1 on any fault
    python -m benchmarks.kernels --arch sm_120a   for this architecture; may be repeated

A fault: a spill, a stack frame, more registers than a block of 256 threads can have, a missing instruction. Columns:
dynamic shared memory and blocks per SM are those of a step of serving size (H 7168, K 8, E 256, 8 ranks; 128 tokens in
LL, 4096 in HT); "-" blocks means that such a step does not fit that architecture. An early wait is no fault, but may
cost time: a load is waited for only to write over what it brings (scoreboards.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import scoreboards
from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.groups import PaperGroup
from ep_kernels.tools.kernels import archs_of, compile_kernel, console_of, spread
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.copy_engines import collective_plan
from ep_kernels.tuning import write_whole
from ep_kernels.types import Layout, Mode

DEFAULT_ARCHS = ("sm_90a", "sm_100a")
KEPT = Path(__file__).parents[1] / "build" / "kernels"
"""Looks, by all that they depend on."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas reports for one entry point."""

    entry: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def resources_of(binary: jit.Binary) -> tuple[Resources, ...]:
    """One entry per `__global__` function, from the log."""
    found = []
    for block in re.split(r"Compiling entry function '", binary.log)[1:]:
        numbers = [
            int(match.group(1)) if (match := re.search(pattern, block)) else 0
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes stack frame",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
        ]
        found.append(Resources(block.split("'")[0], *numbers))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What blocks of one SM share.

    Attributes:
        shared_bytes: shared memory of the SM.
        block_shared_bytes: most of it that one block may take.
        num_threads, num_blocks: most that are resident.
    """

    shared_bytes: int
    block_shared_bytes: int
    num_threads: int
    num_blocks: int


_BIG = Multiprocessor(228 << 10, 227 << 10, 2048, 32)
MULTIPROCESSORS = {
    "sm_90a": _BIG,
    "sm_100a": _BIG,
    "sm_103a": _BIG,
    "sm_120a": Multiprocessor(100 << 10, 99 << 10, 1536, 24),
}
_REGISTERS, _PARTITIONS, _REGISTER_UNIT, _RESERVED_SHARED = 65536, 4, 256, 1 << 10


def blocks_per_sm(arch: str, registers: int, shared_bytes: int, num_threads: int) -> int:
    """Blocks that are resident together on one SM; 0 = a block does not fit. shared_bytes: static and dynamic."""
    sm = MULTIPROCESSORS[arch]
    if shared_bytes > sm.block_shared_bytes:
        return 0
    warps = -(-num_threads // 32)
    registers_of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    resident_warps = _REGISTERS // _PARTITIONS // max(1, registers_of_warp) * _PARTITIONS
    by_shared = sm.shared_bytes // (-(-shared_bytes // 128) * 128 + _RESERVED_SHARED)
    return min(resident_warps // warps, by_shared, sm.num_threads // num_threads, sm.num_blocks)


@dataclass(frozen=True, slots=True)
class Job:
    """One variant for one architecture."""

    variant: jit.Variant
    arch: str


@dataclass(frozen=True, slots=True)
class Look:
    """What the compiler and nvdisasm show of a kernel.

    Attributes:
        resources: registers, stack, spills, static shared memory.
        code_bytes: size of the cubin.
        early_waits: where a load is waited for only to write over what it brings (scoreboards.py), in words.
        wrong: what is wrong with the instructions, in words.
    """

    resources: Resources
    code_bytes: int
    early_waits: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One compiled kernel.

    Attributes:
        job: what was compiled.
        look: what the compiler made of it.
        dynamic_bytes: dynamic shared memory of a block in `serving_config`.
        num_blocks: blocks per SM then, 0 = too large for this architecture.
        faults: what must not be, in words.
    """

    job: Job
    look: Look
    dynamic_bytes: int
    num_blocks: int
    faults: tuple[str, ...]


MOST_REGISTERS = {jit.FEW_THREADS: 252, jit.NUM_THREADS: 252, jit.WIDE_THREADS: 128}
"""65536 registers of an SM / threads of its one block; where that is more, what fits an instruction, less a few."""
_STORE, _LOAD, _WAIT = "UBLKCP.G.S", "UBLKCP.S.G", "SYNCS.PHASECHK.TRANS64.TRYWAIT"
_SHARE, _FENCE = "REDG.E.ADD.64.STRONG.SYS", "MEMBAR.ALL.SYS"
_SC_FENCE = "MEMBAR.SC.GPU"
_STORE_TO_HOST = "STG.E.64.STRONG.SYS"
_STORE_LINE, _PEEK_LINE = "STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS"
_LOCAL_MEMORY = "LDL"


def expected_instructions(variant: jit.Variant) -> tuple[str, ...]:
    """What nvdisasm must show. LL: 16 bytes of a line, stored and loaded by one instruction each, in front of every
    cache; dispatch: the fence between a failure and the counts. HT: bulk copies from and to shared memory and the
    mbarrier that loads complete on; dispatch: the release of a share at a peer, which is one reduction, ordered after
    all stores; combine: words of progress behind a fence. Collectives: flags behind a fence; all-gather the copy
    engine, one-shot all-reduce lines."""
    if variant.kernel in ("narrow", "quantize", "add_terms"):
        return ()
    if variant.kernel == "barrier":
        return (_FENCE, "STG.E.64.STRONG.SYS")
    if variant in jit.collective_variants():
        return (_FENCE, _STORE_TO_HOST, *((_STORE, _LOAD, _WAIT) if variant.kernel == "all_gather" else ()),
                *((_STORE_LINE, _PEEK_LINE) if ("KIND", "0") in variant.constants else ()))  # fmt: skip
    if variant.kernel.startswith("ll_"):
        lines = (_STORE_LINE, _PEEK_LINE)
        return (*lines, _SC_FENCE) if variant.kernel == "ll_dispatch" else lines
    if variant.kernel == "ht_combine":
        return (_STORE, _STORE_TO_HOST, _FENCE, _LOAD, _WAIT)
    return (_STORE, _SHARE, _FENCE, _LOAD, _WAIT)


def unwanted_instructions(variant: jit.Variant) -> tuple[str, ...]:
    """Instructions that a kernel must not contain. LL: the release of a share, which waits for the links to
    drain, and the copy engine, whose writes are not lines. (Fences are in every kernel, for post-mortems.)"""
    return (_SHARE, _STORE, _LOAD) if variant.kernel.startswith("ll_") else ()


def serving_config(variant: jit.Variant) -> MoEConfig:
    """A configuration of serving size that launches a dispatch or combine variant: H 7168, K 8, E 256, R 8."""
    constants = dict(variant.constants)
    types = {name: dtype for dtype, name in plan.CPP_TYPES.items()}
    name, _, operation = variant.kernel.partition("_")
    mode = Mode(name)
    if operation == "combine":
        exact = constants["KIND"] == "2"
        layout = Layout.RANK_MAJOR if constants["KIND"] == "1" else Layout.EXPERT_MAJOR
        dtype, moved, quantize = types[constants["Y"]], types[constants["C"]], False
    else:
        layout = {number: layout for layout, number in plan.LAYOUTS.items()}[int(constants["LAYOUT"])]
        quantize, exact, moved = constants["X"] != "u8", False, None
        dtype = types[constants["X"]] if quantize else types["bf16"]
    return MoEConfig(
        group=PaperGroup(0, 8), num_experts=256, hidden_size=7168, topk=8, mode=mode, layout=layout, dtype=dtype,
        quantize=quantize, exact_combine=exact, combine_dtype=moved,
        max_tokens_per_rank=128 if mode is Mode.LL else 4096,
    )  # fmt: skip


def dynamic_bytes(variant: jit.Variant) -> int:
    """Dynamic shared memory of one block in `serving_config`."""
    if variant in jit.GENERAL or variant.kernel == "quantize":
        return 0
    if variant in jit.collective_variants():
        return collective_plan.launch_of(variant, 8).shared_bytes
    config = serving_config(variant)
    of = plan.combine_launch if variant.kernel.endswith("combine") else plan.dispatch_launch
    return of(config, plan.sizes_of(config), config.mode, 132).shared_bytes


def inspect_job(job: Job) -> KernelReport:
    """Compile, look and judge. Runs in a process of the pool. A look is kept: `make test` judges some of the kernels
    that `make kernels` has just compiled."""
    path = KEPT / f"{job.variant.name}-{_key(job)}.json"
    with suppress(OSError, msgspec.DecodeError):
        return judge(job, msgspec.json.decode(path.read_bytes(), type=Look))
    look = look_at(job, compile_kernel((job.variant, job.arch)))
    with suppress(OSError):
        KEPT.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(look))
    return judge(job, look)


def _key(job: Job) -> str:
    """Of all that a look depends on."""
    tool = disassembler()
    version = f"{tool} {os.stat(tool).st_mtime_ns}" if tool else ""
    judges = "".join(Path(module).read_text() for module in (__file__, scoreboards.__file__, jit.__file__))
    parts = jit.key(jit.source(job.variant), job.arch, jit.compiler_version()), version, judges
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def look_at(job: Job, binary: jit.Binary) -> Look:
    """Look at a compiled kernel."""
    (found,) = resources_of(binary)
    listing = disassemble(binary.cubin)
    early = tuple(map(str, scoreboards.early_waits(listing or "")))
    wrong = () if listing is None else tuple(_wrong(job.variant, listing))
    return Look(found, len(binary.cubin), early, wrong)


def _wrong(variant: jit.Variant, listing: str) -> Iterator[str]:
    if _LOCAL_MEMORY in listing:
        yield "reads local memory"
    yield from (f"no {name}" for name in expected_instructions(variant) if name not in listing)
    yield from (f"has {name}" for name in unwanted_instructions(variant) if name in listing)


def judge(job: Job, look: Look) -> KernelReport:
    """What it means for a launch of serving size, and whether all is as it must be."""
    found, dynamic = look.resources, dynamic_bytes(job.variant)
    blocks = blocks_per_sm(job.arch, found.registers, found.shared_bytes + dynamic, job.variant.num_threads)
    return KernelReport(job, look, dynamic, blocks, (*_faults(job, found, blocks), *look.wrong))


def _faults(job: Job, found: Resources, blocks: int) -> Iterator[str]:
    most = MOST_REGISTERS[job.variant.num_threads]
    if not 0 < found.registers <= most:
        yield f"{found.registers} registers, at most {most}"
    if found.spill_bytes:
        yield f"{found.spill_bytes} bytes spilled"
    if found.stack_bytes:
        yield f"stack frame of {found.stack_bytes} bytes"
    if not blocks and MULTIPROCESSORS[job.arch] == _BIG:
        yield "no block fits an SM"


def inspect(jobs: Iterable[Job]) -> list[KernelReport]:
    """Reports in the order of `jobs`. Raises TransportError where one does not compile."""
    return list(spread(inspect_job, jobs))


def disassemble(cubin: bytes) -> str | None:
    """Instructions of a cubin, each with its bits; None where there is no nvdisasm."""
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-c", "-ndf", "-hex", file.name], check=True, capture_output=True, text=True, timeout=120
        ).stdout


def disassembler() -> str | None:
    """nvdisasm from PATH, or the one that Triton brings."""
    if found := shutil.which("nvdisasm"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(bundled) if bundled.exists() else None


def as_table(reports: list[KernelReport]) -> Table:
    """One row per kernel and architecture."""
    table = Table(title=f"kernels by NVRTC {jit.compiler_version()}", title_justify="left")
    for name in ("variant", "arch"):
        table.add_column(name, no_wrap=True)
    numbered = ("registers", "static shared", "dynamic shared", "spills", "stack", "blocks per SM", "code bytes")
    for name in (*numbered, "early waits"):
        table.add_column(name, justify="right")
    table.add_column("faults")
    for report in reports:
        found = report.look.resources
        numbers = (
            found.registers, found.shared_bytes, report.dynamic_bytes, found.spill_bytes, found.stack_bytes,
            report.num_blocks or "-", report.look.code_bytes, len(report.look.early_waits),
        )  # fmt: skip
        verdict = Text("; ".join(report.faults), style="bold red") if report.faults else Text("none", style="dim")
        table.add_row(report.job.variant.name, report.job.arch, *map(str, numbers), verdict)
    return table


def summary(reports: list[KernelReport]) -> str:
    """What the table says, in one line."""
    bad = sum(bool(report.faults) for report in reports)
    most = max(report.look.resources.registers for report in reports)
    code = sum(report.look.code_bytes for report in reports) / 2**20
    looked = "" if disassembler() else "; no nvdisasm here, so instructions were not looked at"
    return f"{len(reports)} kernels, {bad} with faults, at most {most} registers, {code:.1f} MiB of code{looked}"


def check(archs: list[str], console: Console) -> int:
    """Compile and judge every variant; the exit status."""
    jobs = [Job(variant, arch) for arch in archs for variant in jit.all_variants()]
    with console.status(f"compiling {len(jobs)} kernels"):
        reports = inspect(jobs)
    console.print(as_table(reports))
    for report in reports:
        for wait in report.look.early_waits:
            console.print(f"early wait in {report.job.variant.name} for {report.job.arch}: {wait}", markup=False)
    console.print(summary(reports))
    return int(any(report.faults for report in reports))


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do it; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description="Compile every CUDA kernel without a GPU."
    )
    parser.add_argument("--arch", action="append", help="sm_90a, sm_100a, ... Repeatable.")
    archs = archs_of(parser, parser.parse_args(words).arch or DEFAULT_ARCHS)
    return check(archs, console_of())


if __name__ == "__main__":
    sys.exit(main())
