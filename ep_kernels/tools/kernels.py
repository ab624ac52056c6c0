"""`make kernels` and `make wheel`: every CUDA kernel compiled without a GPU, judged, and shown as a table.

    python -m ep_kernels.tools.kernels                  all variants for sm_90a and sm_100a; exit status 1 on any fault
    python -m ep_kernels.tools.kernels --arch sm_120a   for this architecture; may be repeated
    python -m ep_kernels.tools.kernels --ship           the cubins of the wheel, for every known architecture

A fault: a spill, a stack frame, more registers than a block of 256 threads can have, a missing instruction. Columns:
dynamic shared memory and blocks per SM are those of a step of serving size (H 7168, K 8, E 256, 8 ranks; 128 tokens in
LL, 4096 in HT); "-" blocks means that such a step does not fit that architecture. An early wait is no fault, but may
cost time: a load is waited for only to write over what it brings (ep_kernels/transports/nvlink/scoreboards.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_kernels import jit
from ep_kernels.transports.nvlink import inspection
from ep_kernels.transports.nvlink.inspection import Job, KernelReport

DEFAULT_ARCHS = ("sm_90a", "sm_100a")
PIPE_WIDTH = 132


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
        found = report.resources
        numbers = (
            found.registers, found.shared_bytes, report.dynamic_bytes, found.spill_bytes, found.stack_bytes,
            report.num_blocks or "-", report.code_bytes, len(report.early_waits),
        )  # fmt: skip
        verdict = Text("; ".join(report.faults), style="bold red") if report.faults else Text("none", style="dim")
        table.add_row(report.job.variant.name, report.job.arch, *map(str, numbers), verdict)
    return table


def summary(reports: list[KernelReport]) -> str:
    """What the table says, in one line."""
    bad = sum(bool(report.faults) for report in reports)
    most = max(report.resources.registers for report in reports)
    code = sum(report.code_bytes for report in reports) / 2**20
    looked = "" if inspection.disassembler() else "; no nvdisasm here, so instructions were not looked at"
    return f"{len(reports)} kernels, {bad} with faults, at most {most} registers, {code:.1f} MiB of code{looked}"


def check(archs: list[str], console: Console) -> int:
    """Compile and judge every variant; the exit status."""
    jobs = [Job(variant, arch) for arch in archs for variant in jit.all_variants()]
    with console.status(f"compiling {len(jobs)} kernels"):
        reports = inspection.inspect(jobs)
    console.print(as_table(reports))
    for report in reports:
        for wait in report.early_waits:
            console.print(f"early wait in {report.job.variant.name} for {report.job.arch}: {wait}", markup=False)
    console.print(summary(reports))
    return int(any(report.faults for report in reports))


def ship(archs: list[str], folder: Path, console: Console) -> int:
    """Write the wheel's cubins and print their sizes; the exit status."""
    table = Table(title=f"cubins for the wheel by NVRTC {jit.compiler_version()}", title_justify="left")
    for name in ("arch", "files", "bytes", "largest"):
        table.add_column(name, justify="left" if name == "arch" else "right")
    with console.status("compiling"):
        made = inspection.ship(archs, folder)
    for arch, files in made.items():
        sizes = {path: path.stat().st_size for path in files}
        largest = max(sizes, key=lambda path: sizes[path])
        name = f"{largest.name.rpartition('-')[0]} {sizes[largest]}"
        table.add_row(arch, str(len(files)), str(sum(sizes.values())), name)
    console.print(table)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do it; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ep_kernels.tools.kernels", description="Compile every CUDA kernel without a GPU."
    )
    parser.add_argument("--arch", action="append", help="sm_90a, sm_100a, ... Repeatable.")
    parser.add_argument("--ship", action="store_true", help="write the cubins that travel in the wheel")
    parser.add_argument("--into", type=Path, default=jit.ROOT / "cubins", help="where --ship writes")
    chosen = parser.parse_args(words)
    supported = jit.supported_archs()
    archs = chosen.arch or (supported if chosen.ship else DEFAULT_ARCHS)
    if unknown := [name for name in archs if name not in supported]:
        parser.error(f"--arch: expected one of {', '.join(supported)}, got {', '.join(unknown)}")
    console = Console()
    console = console if console.is_terminal else Console(width=PIPE_WIDTH)
    return ship(list(archs), chosen.into, console) if chosen.ship else check(list(archs), console)


if __name__ == "__main__":
    sys.exit(main())
