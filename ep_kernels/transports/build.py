"""Compiles the native halves, `<folder>/native/*.cpp` -> `<folder>/_native.so`, of the transports and of the network.

The one place that knows compilers, flags and sources; runs by `python build_backend.py`, or by pip through that file.
Needs the standard library only, so a build backend can load it before anything is installed. Uses g++, clang++ or c++
from PATH, else the compiler in the `ziglang` package. No library links anything but libc: no nvcc, no CUDA headers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NETWORK = HERE.parent / "network"
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
ZIG_VARIANTS = {"rows_avx512.cpp": ("-mevex512",)}
"""What the wheel's clang (18 to 20) wants besides: -mavx512f alone gives it no registers of 512 bits."""
OLDEST_GLIBC = "2.28"
"""What a library built with zig asks of the machine that runs it."""
COMPILE_TIMEOUT_S = 600
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CURE = "build it with `python build_backend.py` in the checkout, or reinstall the package"


class BuildError(RuntimeError):
    """A library could not be compiled; the message has the command and the compiler's words."""


def find_compiler(*, portable: bool = False) -> list[str] | None:
    """Command of a C++ compiler on PATH, or of the `ziglang` package, or None. portable: the package's alone, whose
    libraries run wherever glibc is OLDEST_GLIBC or newer."""
    for name in () if portable else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        target = f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}"
        return [sys.executable, "-P", "-m", "ziglang", "c++", "-target", target]
    return None


@dataclass(frozen=True)
class Native:
    """The native half of one transport, or of the network.

    Attributes:
        sources: folder of its .cpp and .hpp files.
        library: the shared library made of them.
        included: other folders in which the .hpp files that they include are looked for.
    """

    sources: Path
    library: Path
    included: tuple[Path, ...] = ()

    def build_id(self) -> str:
        """Hash of every source and flag; the library carries it, so a stale one is noticed."""
        digest = hashlib.sha256(repr((COMMON, EXACT, X86_VARIANTS)).encode())
        own = [path for path in sorted(self.sources.iterdir()) if path.suffix in (".cpp", ".hpp")]
        for path in [*own, *self._foreign(own)]:
            digest.update(path.name.encode() + path.read_bytes())
        return "crossdock-build-" + digest.hexdigest()[:32]

    def is_current(self) -> bool:
        """True if the library was built from these sources."""
        return self.library.is_file() and self.build_id().encode() in self.library.read_bytes()

    def build(self, *, force: bool = False, portable: bool = False) -> Path:
        """Compile unless the library is current; atomic, so that processes may race. portable: always, by that
        compiler.

        Raises:
            BuildError: no compiler, or it failed.
        """
        if not (force or portable) and self.is_current():
            return self.library
        compiler = find_compiler(portable=portable)
        if compiler is None:
            some = "" if portable else "g++, clang++ or c++ on PATH, or "
            raise BuildError(f"no C++ compiler: expected {some}the Python package ziglang")
        with tempfile.TemporaryDirectory(prefix="crossdock-build-") as folder:
            scratch = Path(folder)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: self._compile(compiler, source, scratch), self._units()))
            made = scratch / self.library.name
            # The sources use nothing of the C++ runtime; zig would compile a whole one just to link it.
            runtime = ["-nostdlib++"] if "ziglang" in compiler else ["-static-libstdc++", "-static-libgcc"]
            _run([*compiler, "-shared", "-pthread", *runtime, *map(str, objects), "-ldl", "-o", str(made)])
            staged = self.library.with_name(f".{self.library.name}.{os.getpid()}")
            shutil.copyfile(made, staged)
            os.replace(staged, self.library)
        return self.library

    def _foreign(self, own: Sequence[Path]) -> list[Path]:
        """Headers of other folders that are included, by others of them too."""
        found: set[Path] = set()
        unread = list(own)
        while unread:
            for name in _INCLUDE.findall(unread.pop().read_text(encoding="utf-8")):
                if not (self.sources / name).exists():
                    new = {folder / name for folder in self.included if (folder / name).exists()} - found
                    found |= new
                    unread += new
        return sorted(found)

    def _units(self) -> list[Path]:
        x86 = platform.machine() in ("x86_64", "AMD64")
        return [path for path in sorted(self.sources.glob("*.cpp")) if x86 or path.name not in X86_VARIANTS]

    def _compile(self, compiler: Sequence[str], source: Path, folder: Path) -> Path:
        made = folder / f"{source.stem}.o"
        flags = [*COMMON, *EXACT, *X86_VARIANTS.get(source.name, ()), f'-DCD_BUILD_ID="{self.build_id()}"']
        flags += ZIG_VARIANTS.get(source.name, ()) if "ziglang" in compiler else ()
        flags += [f"-I{folder}" for folder in self.included]
        _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
        return made


def native_of(transport: str) -> Native:
    """The native half of `transports/<transport>`."""
    return Native(HERE / transport / "native", HERE / transport / "_native.so", (NETWORK / "native",))


def network() -> Native:
    """The native half of `ep_kernels/network`."""
    return Native(NETWORK / "native", NETWORK / "_native.so")


def build_all(*, force: bool = False, portable: bool = False) -> list[Path]:
    """Compile every library; their paths. Raises BuildError."""
    names = sorted(path.parent.name for path in HERE.glob("*/native"))
    return [native.build(force=force, portable=portable) for native in (*map(native_of, names), network())]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.strip()}")
