"""`make wheel`: the cubins of the wheel, compiled without a GPU for every known architecture.

    python -m ep_kernels.tools.kernels --ship

NVRTC compiles one program at a time in a process, so kernels are spread over processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from ep_kernels import jit

A = TypeVar("A")
T = TypeVar("T")
PIPE_WIDTH = 132


def compile_kernel(job: tuple[jit.Variant, str]) -> jit.Binary:
    """A variant for an architecture. Runs in a process of the pool."""
    variant, arch = job
    return jit.compile_source(jit.source(variant), variant.name, arch)


def spread(work: Callable[[A], T], jobs: Iterable[A]) -> Iterator[T]:
    """work(job) for each job, in order, over as many processes as this one may use cores."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process might inherit a held lock
    context.set_forkserver_preload([jit.__name__])
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        yield from pool.map(work, list(jobs))


def ship(archs: list[str], folder: Path, console: Console) -> int:
    """Write the wheel's cubins and print their sizes; the exit status."""
    table = Table(title=f"cubins for the wheel by NVRTC {jit.compiler_version()}", title_justify="left")
    for name in ("arch", "files", "bytes", "largest"):
        table.add_column(name, justify="left" if name == "arch" else "right")
    with console.status("compiling"):
        jobs = [(variant, arch) for arch in archs for variant in jit.shipped_variants()]
        binaries = dict(zip(jobs, spread(compile_kernel, jobs), strict=True))
    for arch in archs:
        compiled = {variant: binary for (variant, of), binary in binaries.items() if of == arch}
        files = jit.Compiler(None, folder).ship(arch, compiled)
        sizes = {path: path.stat().st_size for path in files}
        largest = max(sizes, key=lambda path: sizes[path])
        name = f"{largest.name.rpartition('-')[0]} {sizes[largest]}"
        table.add_row(arch, str(len(files)), str(sum(sizes.values())), name)
    console.print(table)
    return 0


def archs_of(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[str]:
    """Those architectures; ends the program where NVRTC does not know one."""
    supported = jit.supported_archs()
    if unknown := [name for name in names if name not in supported]:
        parser.error(f"--arch: expected one of {', '.join(supported)}, got {', '.join(unknown)}")
    return list(names)


def console_of() -> Console:
    """The terminal, or a wide pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ep_kernels.tools.kernels", description="Compile the CUDA kernels of the wheel without a GPU."
    )
    parser.add_argument("--arch", action="append", help="sm_90a, sm_100a, ... Repeatable.")
    parser.add_argument("--ship", action="store_true", required=True, help="write the cubins that travel in the wheel")
    parser.add_argument("--into", type=Path, default=jit.ROOT / "cubins", help="where --ship writes")
    chosen = parser.parse_args(words)
    return ship(archs_of(parser, chosen.arch or jit.supported_archs()), chosen.into, console_of())


if __name__ == "__main__":
    sys.exit(main())
