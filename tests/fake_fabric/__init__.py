"""Memory of GPUs by `libfabric` without hardware: the machine's libfabric, whose provider over sockets is made to say
that it reaches such memory (library.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import stand_in, tools
from tests.stand_in import StandIn

NAME = "libfabric.so.1"
PROVIDER = "libfabric(tcp;ofi_rxm)"


class Faults(ctypes.Structure):
    """`Faults` of library.cpp: what goes wrong."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("no_hmem", "is_old", "calls_cuda", "no_peer", "no_dma_buf", "no_address", "granted")
    )


class Counts(stand_in.Counts):
    """`Counts` of library.cpp: what the process has registered and not given back; of endpoints, all there were."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("dma_bufs", "device_regions", "endpoints", "wrong_calls"))


class Fake(stand_in.Loaded):
    """The library of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, Faults, Counts)

    def set(self, **values: int) -> None:
        """Faults, at once."""
        for name, value in values.items():
            setattr(self._library.fake_faults()[0], name, value)

    def heal(self) -> None:
        """No faults any more."""
        self.set(**{name: 0 for name, _ in Faults._fields_})

    def device(self, address: int, num_bytes: int) -> None:
        """Let memory count as a device's."""
        self._library.fake_device(ctypes.c_uint64(address), ctypes.c_uint64(num_bytes))


@functools.cache
def real() -> str:
    """Path of the machine's library; "": it has none."""
    code = f"import ctypes; ctypes.CDLL({NAME!r}); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return next((line.split()[-1] for line in done.stdout.splitlines() if "/libfabric.so" in line), "")


def missing() -> str:
    """Why it cannot be built; "" if it can."""
    return tools.lack("g++", "libfabric")


@functools.cache
def library() -> StandIn:
    """How it is built."""
    return StandIn(NAME, Path(__file__).resolve().parent, "fabric_abi.hpp", (f'-DREAL="{real()}"',))


@functools.cache
def load() -> Fake:
    """Into this process. Raises RuntimeError: another one is there already."""
    return Fake(library().load())


@contextlib.contextmanager
def healed() -> Iterator[Fake]:
    """The library, whole again afterwards; nothing may be left behind."""
    made = load()
    yield made
    made.heal()
    left = made.left()
    assert (left.dma_bufs, left.device_regions, left.wrong_calls) == (0, 0, 0)
