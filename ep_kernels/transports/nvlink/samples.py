"""The host's end of the latency records (`kernels/common/trace.cuh` is the other): a ring in device memory, read beside
whatever the device does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.types import LatencySample

CHUNK = 128
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
        from ep_kernels.transports.nvlink import driver

        self._words = torch.zeros(num_words, dtype=torch.int64, pin_memory=True, device="cpu")
        self._reader = driver.Reader(self._words)

    def __call__(self, source: torch.Tensor) -> torch.Tensor | None:
        copied = self._words[: source.numel()].view(source.shape)
        done = self._reader.read(copied.data_ptr(), source.data_ptr(), source.nbytes, PATIENCE_S)
        return copied if done else None


class SampleRing:
    """The newest SAMPLE_CAPACITY records of one rank, and which of them have been read.

    Args:
        size: R.
        head: int64 [1], records begun so far; the ring lies on its device.
        copy: how the host gets at both.
    """

    def __init__(self, size: int, head: torch.Tensor, copy: Copy) -> None:
        self._head, self._copy = head, copy
        shape = abi.SAMPLE_CAPACITY, abi.SAMPLE_WORDS + size
        self.records = torch.zeros(shape, dtype=torch.int64, device=head.device)
        self._lock = threading.Lock()
        self._begun = 0
        self._open: list[int] = []

    def take(self, clock_offset_ns: int) -> list[LatencySample]:
        """Operations that have ended since the last call, in the order in which they were sent; the caller's clock is
        so far ahead of the device's. Any thread. A lost device gives none, nor one that is too busy for `PATIENCE_S`
        (the next call has them)."""
        found: list[LatencySample] = []
        with self._lock:
            try:
                self._read_into(found, clock_offset_ns)
            except TransportError:  # the next operation says what happened to the device
                return found
        return found

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

    def _read_into(self, found: list[LatencySample], clock_offset_ns: int) -> None:
        oldest = self._oldest()
        if oldest is None:
            return
        begun = oldest + abi.SAMPLE_CAPACITY - 1
        numbers = [n for n in (*self._open, *range(max(self._begun, oldest), begun)) if n >= oldest]
        self._open, self._begun = numbers, max(self._begun, begun)
        for span in _spans(numbers):
            ended = self._words(span)
            if ended is None:
                return
            if not any(map(_is_whole, ended)):
                continue
            words, oldest = self._words(span), self._oldest()  # a second look: see kernels/common/trace.cuh
            if words is None or oldest is None:
                return
            for number, then, now in zip(span, ended, words, strict=True):
                if _is_whole(then):
                    self._open.remove(number)
                    if number >= oldest:
                        found.append(_sample(now, clock_offset_ns))

    def _oldest(self) -> int | None:
        """The oldest record that has not been overwritten, or cleared for the next operation."""
        head = self._copy(self._head)
        return None if head is None else int(head[0]) - abi.SAMPLE_CAPACITY + 1

    def _words(self, span: range) -> list[list[int]] | None:
        begin = span.start % abi.SAMPLE_CAPACITY
        records = self._copy(self.records[begin : begin + len(span)])
        return None if records is None else records.tolist()


def _spans(numbers: list[int]) -> list[range]:
    """Runs of numbers that lie side by side in the ring, CHUNK at most."""
    spans: list[range] = []
    for number in numbers:
        last = spans[-1] if spans else range(0)
        if number == last.stop and len(last) in range(1, CHUNK) and number % abi.SAMPLE_CAPACITY != 0:
            spans[-1] = range(last.start, number + 1)
        else:
            spans.append(range(number, number + 1))
    return spans


def _is_whole(words: list[int]) -> bool:
    return words[abi.SAMPLE_WORDS - 1] == abi.COMPLETE_RECORD


def _sample(words: list[int], clock_offset_ns: int) -> LatencySample:
    op, mode, seq, tokens, start, send_ns, received, end, _, *waits = words
    # a block that sends may end after the last one that receives
    total_ns = send_ns + end - received if received else max(send_ns, end - start)
    name = "ht" if mode else "ll"
    return LatencySample(abi.OPS[op], name, seq, tokens, start + clock_offset_ns, send_ns, tuple(waits), total_ns)
