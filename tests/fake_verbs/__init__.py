"""`verbs` without hardware: a libibverbs of our own (library.cpp, nic.cpp, asked.cpp) in place of the machine's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from tests import stand_in, tools
from tests.stand_in import StandIn

LIBRARY = StandIn("libibverbs.so.1", Path(__file__).resolve().parent, "verbs_abi.hpp")
PAIR_FATAL, DEVICE_FATAL, PORT_UP, PORT_DOWN, QUEUE_ERROR = 1, 8, 9, 10, 0
"""`ibv_event_type`."""


class Faults(ctypes.Structure):
    """`fake::Faults`: what goes wrong at one device."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "absent", "port_down", "cut", "not_ready", "denied", "refused", "granted", "no_dma_buf", "no_peermem",
            "max_completions", "max_message", "patience_ms",
        )
    )  # fmt: skip


class Counts(stand_in.Counts):
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


class Fake(stand_in.Loaded):
    """The library of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, Faults, Counts)
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


def missing() -> str:
    """Why it cannot be built; "" if it can."""
    return tools.lack("g++")


@functools.cache
def load() -> Fake:
    """Into this process. Raises RuntimeError: another one is there already."""
    return Fake(LIBRARY.load())


@contextlib.contextmanager
def healed() -> Iterator[Fake]:
    """The library, whole again afterwards; nothing may be left behind."""
    made = load()
    yield made
    made.heal()
    assert made.left() == Counts()
