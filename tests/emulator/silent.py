"""One rank of the `nvlink` transport without a GPU: its launches go to a driver that keeps their records and runs
nothing, so that what a call does on the host can be looked at, and timed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_kernels import bringup, jit
from ep_kernels.communicator import MoECommunicator
from ep_kernels.transports.build import find_compiler, native_of
from ep_kernels.transports.nvlink.calls.streams import StreamOrder
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.transport import NvlinkTransport
from tests import tools
from tests.cases import RoutingCase
from tests.emulator.machine import without_driver
from tests.gpu.loopback import Loopback

RECORD_BYTES = 4096
DRIVER = """
#include <cstdint>
#include <cstring>
extern "C" {
int launches = 0, narrowed = 0, copies = 0, answer = 0, capturing = 0, record_bytes = 0, busy = 0;
int64_t brought = 0;  // what copies of 8 bytes bring: two int32; -1 = nothing
void* context = nullptr;
unsigned char record[4096];
int cuLaunchKernelEx(const void*, void* function, void** arguments, void**) {
  if (function == reinterpret_cast<void*>(2)) {  // the kernel `narrow`
    auto* from = *static_cast<int64_t**>(arguments[0]);
    auto* to = *static_cast<int32_t**>(arguments[1]);
    auto *weights = *static_cast<float**>(arguments[3]), *copy = *static_cast<float**>(arguments[4]);
    for (int i = 0; i < *static_cast<int32_t*>(arguments[2]); ++i) {
      to[i] = static_cast<int32_t>(from[i]);
      if (copy) copy[i] = weights[i];
    }
    ++narrowed;
    return answer;
  }
  ++launches;
  memcpy(record, arguments[0], record_bytes);
  return answer;
}
int cuStreamIsCapturing(void*, int* status) { return *status = capturing, 0; }
int cuCtxGetCurrent(void** found) { return *found = context, 0; }
int cuStreamQuery(void*) { return busy ? 600 : 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t num_bytes, void*) {
  ++copies;
  if (num_bytes != 8) memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), num_bytes);
  else if (brought != -1) memcpy(reinterpret_cast<void*>(to), &brought, 8);
  return 0;
}
int cuStreamWaitValue64_v2(void*, uint64_t, uint64_t, unsigned) { return 0; }
int cuStreamWriteValue64_v2(void*, uint64_t at, uint64_t value, unsigned) {
  *reinterpret_cast<volatile uint64_t*>(at) = value;
  return 0;
}
int cuEventRecord(void*, void*) { return 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuGraphLaunch(void*, void*) { return 801; }
int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_LAUNCH_FAILED", 0; }
int cuGetErrorString(int, const char** text) { return *text = "it broke", 0; }
}
"""


class SilentDriver:
    """The driver, and the transport's library that has opened it and no other.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler()
        if compiler is None:
            tools.skip("g++", "no other compiler either")
        (folder / "silent.cpp").write_text(DRIVER)
        made = folder / "silent.so"
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(folder / "silent.cpp")]
        subprocess.run(command, check=True, timeout=120)
        shutil.copy(native_of("nvlink").library, folder / "_native.so")
        self._notes = ctypes.CDLL(str(made))
        self.library = launch.load(replace(native_of("nvlink"), library=folder / "_native.so"), str(made))

    def __getattr__(self, name: str) -> Any:
        kind = {"brought": ctypes.c_int64, "context": ctypes.c_void_p}.get(name, ctypes.c_int)
        return kind.in_dll(self._notes, name)

    def record(self) -> bytes:
        """Of the last launch."""
        return bytes((ctypes.c_ubyte * RECORD_BYTES).in_dll(self._notes, "record"))[: self.record_bytes.value]


class NothingRuns:
    """A machine that runs nothing."""

    device, num_sms = torch.device("cpu"), 132


class _Mailbox:
    epoch = 0

    def check_left_out(self, op: str) -> None:
        """Nobody has gone on."""

    def watched(self) -> list[tuple[int, int]]:
        """No pages."""
        return []

    def settle(self, timeout_s: float) -> None:
        """Nothing is on its way."""


class SilentTransport(NvlinkTransport):
    """A transport that meets nobody."""

    def __init__(self, loop: Loopback, driver: SilentDriver) -> None:
        super().__init__(loop.configs[0])
        self.num_entered = 0
        can = self.capabilities
        self.capabilities = type(can)("cpu", False, can.dtypes, can.modes, True, "silent")
        self._device, self._engine, self._driver = torch.device("cpu"), loop.engines[0], driver
        self._tables, self._streams = self._engine.tables, StreamOrder(torch.device("cpu"))
        self._streams.current.value = self._streams._handle = 0
        self._domain: Any = type("Domain", (), {"mailbox": _Mailbox(), "close": lambda self: None})()
        kernel, narrow = (launch.Kernel(number, 0, driver.library) for number in (1, 2))
        self._functions = dict.fromkeys(self._engine.variants(), kernel) | {jit.NARROW: narrow}

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        """Already done."""
        return b""

    def import_regions(self, tickets: Any) -> None:
        """Nobody's."""

    def barrier(self) -> None:
        """Nobody comes."""

    def close(self) -> None:
        """Nothing to free."""

    def enter(self) -> int:
        """Counts: only launches that no single native call has begun."""
        self.num_entered += 1
        return super().enter()

    def settle(self) -> None:
        """All is done at once."""
        self.raise_fault()

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        """There is one."""


@contextmanager
def silent_rank(driver: SilentDriver, case: RoutingCase, **fields: Any) -> Iterator[tuple[MoECommunicator, Any]]:
    """Rank 0 of a group of which nobody else is there: its communicator and its transport."""
    with pytest.MonkeyPatch.context() as patch:
        without_driver(patch)
        patch.setattr(launch, "load", lambda: driver.library)
        patch.setattr("ep_kernels.transports.nvlink.gpu.driver.call", lambda name: driver.context.value or 0)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        size = len(case.tokens)
        loop = Loopback(lambda group: case.config(group, **fields), size, 2, NothingRuns())  # type: ignore[arg-type]
        transport = SilentTransport(loop, driver)
        patch.setattr("ep_kernels.communicator.create", lambda config: transport)
        patch.setattr(bringup, "check_capabilities", lambda *_: None)
        patch.setattr(bringup, "settle", lambda config, _: config)
        patch.setattr(bringup, "meet", lambda *_: [])
        with MoECommunicator(loop.configs[0]) as comm:
            comm._reads_dropped = transport._raises  # as on a GPU
            yield comm, transport
