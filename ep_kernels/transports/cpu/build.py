"""Compiles the native half of the `cpu` transport: `python build_backend.py`, or by pip through that file.

The one place that knows compilers, flags and sources. Needs the standard library only, so a build backend can load it
before anything is installed. Uses g++, clang++ or c++ from PATH, else the compiler in the `ziglang` package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "native"
LIBRARY = HERE / "_native.so"
COMMON = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-fno-exceptions",
    "-fno-rtti",
)
EXACT = ("-ffp-contract=off", "-fno-fast-math")
"""Products and sums are rounded one by one: the results are promised bit for bit."""
X86_VARIANTS = {
    "rows_avx2.cpp": ("-mavx2", "-mprfchw"),
    "rows_avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512", "-mprfchw"),
}
OLDEST_GLIBC = "2.28"
"""What a library built with zig asks of the machine that runs it."""
COMPILE_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """The library could not be compiled; the message has the command and the compiler's words."""


def find_compiler() -> list[str] | None:
    """Command of a C++ compiler on PATH, or of the `ziglang` package, or None."""
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}"]
    return None


def build_id() -> str:
    """Hash of every source and flag; the library carries it, so a stale one is noticed."""
    digest = hashlib.sha256(repr((COMMON, EXACT, X86_VARIANTS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".hpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return "crossdock-build-" + digest.hexdigest()[:32]


def is_current(library: Path = LIBRARY) -> bool:
    """True if `library` was built from the sources beside this file."""
    return library.is_file() and build_id().encode() in library.read_bytes()


def build(library: Path = LIBRARY, *, force: bool = False) -> Path:
    """Compile to `library` unless it is current; atomic, so that processes may race.

    Raises:
        BuildError: no compiler, or it failed.
    """
    if not force and is_current(library):
        return library
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler: expected g++, clang++ or c++ on PATH, or the Python package ziglang")
    with tempfile.TemporaryDirectory(prefix="crossdock-build-") as folder:
        scratch = Path(folder)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: _compile(compiler, source, scratch), _sources()))
        made = scratch / library.name
        # The sources use nothing of the C++ runtime; zig would compile a whole one just to link it.
        runtime = ["-nostdlib++"] if "ziglang" in compiler else ["-static-libstdc++", "-static-libgcc"]
        _run([*compiler, "-shared", "-pthread", *runtime, *map(str, objects), "-o", str(made)])
        staged = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(made, staged)
        os.replace(staged, library)
    return library


def _sources() -> list[Path]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [path for path in sorted(SOURCES.glob("*.cpp")) if x86 or path.name not in X86_VARIANTS]


def _compile(compiler: Sequence[str], source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    define = f'-DCD_BUILD_ID="{build_id()}"'
    _run([*compiler, *COMMON, *EXACT, *X86_VARIANTS.get(source.name, ()), define, "-c", str(source), "-o", str(made)])
    return made


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.strip()}")


if __name__ == "__main__":
    print(build(force="--force" in sys.argv[1:]))
