"""The host's end of the latency records (`kernels/common/trace.cuh` is the other): a ring in device memory, read beside
whatever the device does. By columns: an engine writes thousands of records a second, and Python code that looks at each
of them holds up the thread that launches its steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

import torch

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.telemetry import Samples, record_bytes
from ep_kernels.transports.nvlink.gpu import launch

CHUNK = 512
"""Records that one copy moves."""
PATIENCE_S = 1.0
"""A copy takes microseconds, more where other processes have the device: so long, at most, a caller is kept waiting."""

Copy = Callable[[torch.Tensor], torch.Tensor | None]
"""copy(source) -> the same on the host, valid until the next call; None where the device does not get to it in time.
Raises TransportError where the device is lost."""


class DeviceCopy:
    """A `Copy` of int64 tensors on the current CUDA device. Waits for no kernel; see `driver.Reader`.

    Args:
        num_words: most that are copied at a time.
    """

    def __init__(self, num_words: int) -> None:
        from ep_kernels.transports.nvlink.gpu import driver

        self._words = torch.zeros(num_words, dtype=torch.int64, pin_memory=True, device="cpu")
        self._reader = driver.Reader(self._words)

    def __call__(self, source: torch.Tensor) -> torch.Tensor | None:
        copied = self._words[: source.numel()].view(source.shape)
        done = self._reader.read(copied.data_ptr(), source.data_ptr(), source.nbytes, PATIENCE_S)
        return copied if done else None


class SampleRing:
    """The newest SAMPLE_CAPACITY records of one rank, and which of them have been read.

    Args:
        head: int64 [1], records begun so far; the ring lies on its device.
    """

    def __init__(self, size: int, head: torch.Tensor, copy: Copy) -> None:
        self._size, self._head, self._copy = size, head, copy
        self._native = launch.library()
        shape = abi.SAMPLE_CAPACITY, abi.SAMPLE_WORDS + size
        self.records = torch.zeros(shape, dtype=torch.int64, device=head.device)
        self._lock = threading.Lock()
        self._begun = 0
        self._open: list[int] = []

    def take(self, clock_offset_ns: int) -> Samples:
        """Operations that have ended since the last call, in the order in which they were sent; the caller's clock is
        so far ahead of the device's. Any thread. A lost device gives none, nor one that is too busy for `PATIENCE_S`
        (the next call has them)."""
        found = bytearray()
        with self._lock, contextlib.suppress(TransportError):  # the next operation says what happened to the device
            self._read_into(found, clock_offset_ns)
        return Samples(found, self._size, _KINDS)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """A copy of int64 words (at most CHUNK records full) that lie on the device, by the same way as records: beside
        whatever it does. None where it does not get to that in time, or is lost. Any thread."""
        with self._lock:
            try:
                copied = self._copy(words)
            except TransportError:
                return None
            return None if copied is None else copied.clone()

    def skip(self) -> None:
        """What was under way has been broken off: it has no record, and the next operation a fresh one."""
        with self._lock:
            number = int(self._head)
            self.records[(number + 1) % abi.SAMPLE_CAPACITY] = 0
            self._head += 1
            self._open += range(max(self._begun, number - abi.SAMPLE_CAPACITY), number)
            self._begun = number + 1

    def _read_into(self, found: bytearray, clock_offset_ns: int) -> None:
        """Whole records by spans of numbers; what is not whole yet, or was not reached, stays open."""
        oldest = self._oldest()
        if oldest is None:
            return
        begun = oldest + abi.SAMPLE_CAPACITY - 1
        runs = [*_runs([n for n in self._open if n >= oldest]), range(max(self._begun, oldest), begun)]
        spans = [part for run in runs for part in _chunks(run)]
        self._open, self._begun = [], max(self._begun, begun)
        try:
            while spans and self._read_span(spans[0], found, clock_offset_ns):
                del spans[0]
        finally:
            self._open += [n for span in spans for n in span]

    def _read_span(self, span: range, found: bytearray, clock_offset_ns: int) -> bool:
        """Its whole records; the others stay open. False: the device did not get to it in time."""
        ended = self._words(span)
        if ended is None:
            return False
        whole = (ctypes.c_uint8 * len(span))()
        count = self._native.cd_samples_whole(ended.data_ptr(), len(span), self._size, abi.COMPLETE_RECORD, whole)
        if count:
            words = self._words(span)  # a second look: see kernels/common/trace.cuh
            if words is None:
                return False
            room = ctypes.create_string_buffer(count * record_bytes(self._size))
            self._native.cd_samples(words.data_ptr(), whole, len(span), self._size, clock_offset_ns, room)
            oldest = self._oldest()  # takes the place of the words
            if oldest is None:
                return False
            overwritten = sum(whole[: max(0, oldest - span.start)])
            found += memoryview(room)[overwritten * record_bytes(self._size) :]
        if count < len(span):
            self._open += [number for number, is_whole in zip(span, whole, strict=True) if not is_whole]
        return True

    def _oldest(self) -> int | None:
        """The oldest record that has not been overwritten, or cleared for the next operation."""
        head = self._copy(self._head)
        return None if head is None else int(head[0]) - abi.SAMPLE_CAPACITY + 1

    def _words(self, span: range) -> torch.Tensor | None:
        begin = span.start % abi.SAMPLE_CAPACITY
        return self._copy(self.records[begin : begin + len(span)])


def _runs(numbers: list[int]) -> Iterator[range]:
    """Ascending numbers as ranges."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at


def _chunks(run: range) -> Iterator[range]:
    """Parts of at most CHUNK that lie side by side in the ring."""
    begin = run.start
    while begin < run.stop:
        end = min(run.stop, begin + CHUNK, begin + abi.SAMPLE_CAPACITY - begin % abi.SAMPLE_CAPACITY)
        yield range(begin, end)
        begin = end


_KINDS = {(op, mode): (name, ("ll", "ht")[mode]) for op, name in enumerate(abi.OPS) for mode in (0, 1)}
