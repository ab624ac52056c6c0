"""A library of the tests' own in place of one of the machine's.

A process that has loaded it, or was started in its `environment`, gets it wherever it asks for that name, since the
loader knows libraries by name. It stays for the life of the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "ep_kernels" / "network" / "native"
_FLAGS = ("-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", "-shared")


@dataclass(frozen=True)
class StandIn:
    """Where it comes from.

    Attributes:
        name: of the library, as programs ask for it.
        folder: with its sources, the headers beside them, and perhaps library.map.
        abi: header of `ep_kernels/network/native` that they include.
        flags: more for the compiler.
    """

    name: str
    folder: Path
    abi: str
    flags: tuple[str, ...] = ()

    def build(self) -> Path:
        """The library, of this name; compiled unless it is there."""
        sources = sorted(self.folder.glob("*.cpp"))
        maps = list(self.folder.glob("*.map"))
        used = [*sources, *sorted(self.folder.glob("*.hpp")), *maps, NATIVE / self.abi]
        told = "".join(self.flags).encode() + b"".join(path.read_bytes() for path in used)
        digest = hashlib.sha256(told).hexdigest()[:16]
        made = ROOT / "build" / self.folder.name / digest / self.name
        if made.exists():
            return made
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            staged = Path(folder) / self.name
            linked = (f"-Wl,-soname,{self.name}", *(f"-Wl,--version-script={path}" for path in maps), "-ldl")
            command = ["g++", *_FLAGS, *self.flags, f"-I{NATIVE}", *map(str, sources), *linked, "-o", str(staged)]
            subprocess.run(command, check=True, timeout=600)
            os.replace(staged, made)
        return made

    def environment(self) -> dict[str, str]:
        """Variables of a process that shall find it."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.build().parent)}

    def load(self) -> ctypes.CDLL:
        """Into this process. Raises RuntimeError: another one is there already."""
        stem = self.name.removesuffix(".1")
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if stem in line}
        made = self.build()
        if loaded - {str(made)}:
            raise RuntimeError(f"this process has loaded {loaded}")
        return ctypes.CDLL(str(made))

    def run(self, *arguments: str, may_skip: bool = False) -> str:
        """Run a pytest where it is found; what it printed. Fails with that."""
        done = subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
        assert " passed" in done.stdout
        assert may_skip or "skipped" not in done.stdout
        return done.stdout


class Counts(ctypes.Structure):
    """Numbers of such a library, compared by value."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bytes(self) == bytes(other)  # type: ignore[call-overload, arg-type]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name, *_ in self._fields_)})"


class Loaded:
    """Such a library in this process: what goes wrong in it, what it counts.

    Args:
        library: with fake_sizes, fake_faults, fake_no_device and fake_counts.
        faults, counts: its structures.
    """

    def __init__(self, library: ctypes.CDLL, faults: type[ctypes.Structure], counts: type[Counts]) -> None:
        self._library, self._counts = library, counts
        library.fake_faults.restype = ctypes.POINTER(faults)
        sizes = (ctypes.c_uint64 * 2)()
        library.fake_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(faults), ctypes.sizeof(counts)]

    def no_device(self, address: int) -> None:
        """Let that memory count as a device's no more."""
        self._library.fake_no_device(ctypes.c_uint64(address))

    def left(self) -> Counts:
        """The counts now: what has not been given back, and more."""
        found = self._counts()
        self._library.fake_counts(ctypes.byref(found))
        return found
