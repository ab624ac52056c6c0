"""Copies beside whatever the device does: what the driver is asked for, in which order, and that all is put back."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from cuda.bindings import driver as cuda

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.memory import samples

RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
CALLS = {
    "cuGetErrorString": "words_of",
    "cuCtxGetCurrent": "context",
    "cuCtxPushCurrent": "push",
    "cuCtxPopCurrent": "pop",
    "cuThreadExchangeStreamCaptureMode": "exchange_mode",
    "cuStreamCreate": "create",
    "cuStreamDestroy": "destroy",
    "cuMemcpyDtoHAsync": "copy",
    "cuStreamQuery": "query",
}
OK, BUSY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_NOT_READY
LOST = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


class Driver:
    """As much of the driver as a copy needs, with one thread's state."""

    CUresult, CUstreamCaptureMode, CUstream_flags = cuda.CUresult, cuda.CUstreamCaptureMode, cuda.CUstream_flags

    def __init__(self) -> None:
        self.contexts, self.mode = ["own"], GLOBAL
        self.copied, self.pending = list[tuple[int, int, int]](), 0  # queries until the copy is done
        self.broken = ""
        self.streams = list[str]()

    def __getattr__(self, name: str) -> Any:
        assert hasattr(cuda, name), "the real one has it too"
        return getattr(self, CALLS[name])

    def _status(self, name: str) -> Any:
        return LOST if name == self.broken else OK

    def words_of(self, status: Any) -> tuple[Any, bytes]:
        return OK, b"its words"

    def context(self) -> tuple[Any, str]:
        return self._status("current"), self.contexts[-1]

    def push(self, context: str) -> tuple[Any]:
        self.contexts.append(context)
        return (self._status("push"),)

    def pop(self) -> tuple[Any, str]:
        return self._status("pop"), self.contexts.pop()

    def exchange_mode(self, mode: Any) -> tuple[Any, Any]:
        before, self.mode = self.mode, mode
        return self._status("mode"), before

    def create(self, flags: Any) -> tuple[Any, str]:
        assert flags == cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams.append("apart")
        return self._status("create"), "apart"

    def destroy(self, stream: str) -> tuple[Any]:
        self.streams.remove(stream)
        return (self._status("destroy"),)

    def copy(self, to: int, address: int, num_bytes: int, stream: str) -> tuple[Any]:
        assert (self.contexts[-1], self.mode, stream) == ("own", RELAXED, "apart")
        self.copied.append((to, address, num_bytes))
        return (self._status("copy"),)

    def query(self, stream: str) -> tuple[Any]:
        assert (self.mode, stream) == (RELAXED, "apart")
        self.pending -= 1
        return (BUSY if self.pending >= 0 else self._status("query"),)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "cuda", made)
    monkeypatch.setattr(driver, "_retired", deque())
    return made


@pytest.mark.parametrize("pending", [0, 1, 5])
def test_a_copy_is_waited_for(fake: Driver, pending: int) -> None:
    reader = driver.Reader(None)
    fake.contexts, fake.pending = ["another thread's"], pending
    assert reader.read(7, 8, 9, 10.0)
    assert fake.copied == [(7, 8, 9)]
    assert fake.pending == -1, "to its end"
    assert (fake.contexts, fake.mode) == (["another thread's"], GLOBAL)


def test_patience_ends(fake: Driver) -> None:
    reader = driver.Reader(None)
    fake.pending = 1 << 40
    assert not reader.read(7, 8, 9, 0.01)
    assert (fake.contexts, fake.mode) == (["own"], GLOBAL)


@pytest.mark.parametrize("broken", ["copy", "query"])
def test_a_lost_device_is_said_and_all_is_put_back(fake: Driver, broken: str) -> None:
    reader = driver.Reader(None)
    fake.broken = broken
    with pytest.raises(TransportError, match="CUDA_ERROR_ILLEGAL_ADDRESS: its words"):
        reader.read(7, 8, 9, 10.0)
    assert (fake.contexts, fake.mode) == (["own"], GLOBAL)


@pytest.mark.parametrize("broken", ["", "destroy"])
def test_its_stream_goes_with_it(fake: Driver, broken: str) -> None:
    reader = driver.Reader(None)
    assert fake.streams == ["apart"]
    fake.broken = broken
    del reader
    gc.collect()
    assert fake.streams == []
    assert (fake.contexts, fake.mode) == (["own"], GLOBAL)


@pytest.mark.parametrize("broken", ["", "query"])
def test_memory_outlives_a_copy_that_is_late(fake: Driver, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Whoever frees it meanwhile: the device would write to what is somebody else's by then. Until it has written, or
    is lost; which is looked for when another reader goes."""
    pinned = {"pin_memory": False}  # there is no device to pin it for
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **how: zeros(*shape, **(how | pinned)))
    monkeypatch.setattr(samples, "PATIENCE_S", 0.01)
    copy, source = samples.DeviceCopy(4), torch.empty(3, dtype=torch.int64)
    memory, address = weakref.ref(copy._words), copy._words.data_ptr()
    fake.pending = 1 << 40
    assert copy(source) is None
    assert fake.copied == [(address, source.data_ptr(), 24)]
    del copy
    gc.collect()
    assert memory() is not None
    assert fake.streams == ["apart"]
    another = driver.Reader(None)
    del another
    gc.collect()
    assert memory() is not None
    assert fake.streams == ["apart", "apart"]
    fake.pending, fake.broken = 0, broken
    last = driver.Reader(None)
    del last
    gc.collect()
    assert memory() is None
    assert fake.streams == []
    assert (fake.contexts, fake.mode) == (["own"], GLOBAL)
    assert not driver._retired
