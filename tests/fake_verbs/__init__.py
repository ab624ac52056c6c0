"""`verbs` without hardware: a libibverbs of our own (library.cpp, nic.cpp, asked.cpp) in place of the machine's.

A process that has loaded it, or was started in its `environment`, gets it wherever it asks for libibverbs.so.1, since
the loader knows libraries by name. It stays for the life of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "libibverbs.so.1"
PAIR_FATAL, DEVICE_FATAL, PORT_UP, PORT_DOWN, QUEUE_ERROR = 1, 8, 9, 10, 0
"""`ibv_event_type`."""
_SOURCES = ("nic.cpp", "library.cpp", "asked.cpp")
_FLAGS = ("-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", "-shared")


class Faults(ctypes.Structure):
    """`fake::Faults`: what goes wrong at one device."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "absent", "port_down", "cut", "not_ready", "denied", "refused", "granted", "no_dma_buf", "no_peermem",
            "max_completions", "patience_ms",
        )
    )  # fmt: skip


class Counts(ctypes.Structure):
    """`fake::Counts`: what the process has made of the library and not given back."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "contexts", "domains", "regions", "channels", "queues", "pairs", "bytes", "dma_bufs", "device_regions",
            "wrong_calls",
        )
    )  # fmt: skip


class Driver(ctypes.Structure):
    """`fake::Driver`: addresses of cuCtxSetCurrent, of a context, of cuMemcpyAsync and cuStreamSynchronize, of a stream
    that waits for no kernel."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("enter", "context", "copy", "wait", "stream"))


@dataclass(frozen=True, slots=True)
class Left:
    """`Counts`, to be compared."""

    contexts: int = 0
    domains: int = 0
    regions: int = 0
    channels: int = 0
    queues: int = 0
    pairs: int = 0
    bytes: int = 0
    dma_bufs: int = 0
    device_regions: int = 0
    wrong_calls: int = 0


class Fake:
    """The library of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_faults.restype = ctypes.POINTER(Faults)
        sizes = (ctypes.c_uint64 * 2)()
        library.fake_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(Faults), ctypes.sizeof(Counts)]
        self.fresh = {name: getattr(self.faults(0), name) for name, _ in Faults._fields_}

    def faults(self, device: int) -> Faults:
        """Of a device; to be written."""
        return self._library.fake_faults(device)[0]  # type: ignore[no-any-return]

    def set(self, device: int, **values: int) -> None:
        """Faults of a device, at once."""
        for name, value in values.items():
            setattr(self.faults(device), name, value)
        self._library.fake_look()

    def heal(self) -> None:
        """No faults any more."""
        for device in (0, 1):
            self.set(device, **self.fresh)

    def event(self, device: int, kind: int) -> None:
        """An asynchronous event, to all that have opened the device; of queue pairs and queues, for each of them."""
        self._library.fake_event(device, kind)

    def device(self, address: int, num_bytes: int, driver: Driver | None = None) -> None:
        """Let memory count as a device's; with a driver, as memory that the processor must not touch."""
        wide = ctypes.c_uint64
        self._library.fake_device(wide(address), wide(num_bytes), ctypes.byref(driver or Driver()))

    def no_device(self, address: int) -> None:
        """Let that memory count as a device's no more."""
        self._library.fake_no_device(ctypes.c_uint64(address))

    def left(self) -> Left:
        """What has not been given back."""
        counts = Counts()
        self._library.fake_counts(ctypes.byref(counts))
        return Left(*(getattr(counts, field.name) for field in fields(Left)))


def missing() -> str:
    """Why it cannot be built; "" if it can."""
    return "" if shutil.which("g++") else "needs g++"


@functools.cache
def build() -> Path:
    """The library, of this name; compiled unless it is there."""
    native = ROOT / "ep_kernels" / "network" / "native"
    used = [
        *sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".hpp", ".map")),
        native / "verbs_abi.hpp",
    ]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in used)).hexdigest()[:16]
    made = ROOT / "build" / "fake_verbs" / digest / NAME
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        staged = Path(folder) / NAME
        linked = (f"-Wl,-soname,{NAME}", f"-Wl,--version-script={HERE / 'library.map'}")
        sources = [str(HERE / name) for name in _SOURCES]
        subprocess.run(["g++", *_FLAGS, f"-I{native}", *sources, *linked, "-o", str(staged)], check=True, timeout=120)
        os.replace(staged, made)
    return made


def environment() -> dict[str, str]:
    """Variables of a process that shall find it."""
    return {**os.environ, "LD_LIBRARY_PATH": str(build().parent)}


@functools.cache
def load() -> Fake:
    """Into this process. Raises RuntimeError: another one is there already."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if NAME[:-2] in line}
    made = build()
    if loaded - {str(made)}:
        raise RuntimeError(f"this process has loaded {loaded}")
    return Fake(ctypes.CDLL(str(made)))


@contextlib.contextmanager
def healed() -> Iterator[Fake]:
    """The library, whole again afterwards; nothing may be left behind."""
    made = load()
    yield made
    made.heal()
    assert made.left() == Left()
