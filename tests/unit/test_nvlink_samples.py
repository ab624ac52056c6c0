"""The ring of latency records as the host reads it: in ordinary memory, written as common/trace.cuh writes it."""

from __future__ import annotations

import random

import pytest
import torch

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.memory import samples
from ep_kernels.transports.nvlink.memory.samples import SampleRing
from ep_kernels.types import LatencySample
from tests.cases import draw_seed

SIZE = 3
OFFSET_NS = -(10**15)


class Device:
    """Writes records; counts what is copied, and may be busy or lost."""

    def __init__(self, size: int = SIZE) -> None:
        self.head = torch.zeros(1, dtype=torch.int64)
        self.draw = random.Random(draw_seed())
        self.copied: list[int] = []
        self.busy = self.lost = False
        self.ring = SampleRing(size, self.head, self.copy)
        self.room = torch.zeros(samples.CHUNK * self.ring.records.shape[1], dtype=torch.int64)

    def copy(self, source: torch.Tensor) -> torch.Tensor | None:
        if self.lost:
            raise TransportError("gone")
        self.copied.append(source.numel())
        return None if self.busy else self.kept(source)

    def kept(self, source: torch.Tensor) -> torch.Tensor:
        """One place for all copies, as pinned memory is."""
        return self.room[: source.numel()].view(source.shape).copy_(source)

    def begin(self, *, apart: bool = False) -> tuple[int, LatencySample]:
        """A record that its send phase has filled in, one part short of whole; its number, and what to tell of it."""
        number, draw = int(self.head[0]), self.draw
        waits = [draw.randrange(10**9) for _ in range(self.ring.records.shape[1] - abi.SAMPLE_WORDS)]
        op, mode, seq, tokens, start = number % 2, draw.randrange(2), number // 2 + 1, draw.randrange(4096), 10**15
        sent = draw.randrange(10**9)
        received = start + sent + draw.randrange(10**9) if apart else 0
        end = (received or start) + draw.randrange(10**9)
        words = [op, mode, seq, tokens, start, sent, received, end, abi.COMPLETE_RECORD - 1, *waits]
        self.ring.records[number % abi.SAMPLE_CAPACITY] = torch.tensor(words)
        self.ring.records[(number + 1) % abi.SAMPLE_CAPACITY, abi.SAMPLE_WORDS - 1] = 0
        self.head += 1
        total = sent + end - received if apart else max(sent, end - start)
        told = LatencySample(abi.OPS[op], ("ll", "ht")[mode], seq, tokens, start + OFFSET_NS, sent, tuple(waits), total)
        return number, told

    def end(self, number: int) -> None:
        """Its last block has ended."""
        self.ring.records[number % abi.SAMPLE_CAPACITY, abi.SAMPLE_WORDS - 1] += 1

    def write(self, count: int = 1) -> list[LatencySample]:
        """So many whole records more; as the host should see them."""
        told = []
        for _ in range(count):
            number, sample = self.begin()
            self.end(number)
            told.append(sample)
        return told

    def take(self) -> list[LatencySample]:
        return self.ring.take(OFFSET_NS)


@pytest.mark.parametrize("size", [1, SIZE, abi.MAX_RANKS])
def test_every_record_comes_once_and_in_order(size: int) -> None:
    device = Device(size)
    assert device.take() == []
    written = 0
    while written < 2 * abi.SAMPLE_CAPACITY:  # round and round, the end of the ring within a chunk
        count = device.draw.choice((1, 2, samples.CHUNK - 1, samples.CHUNK, samples.CHUNK + 1, 1000))
        told = device.write(count)
        assert device.take() == told
        assert device.take() == []
        written += count


def test_only_what_is_new_is_copied() -> None:
    """Twice: whole the first time, told as it is the second; the head after it."""
    device = Device()
    device.take()
    assert device.copied == [1]
    device.write(samples.CHUNK + 7)
    device.take()
    words = device.ring.records.shape[1]
    looks = [n * words for n in (samples.CHUNK, samples.CHUNK, 0, 7, 7, 0)]
    assert device.copied == [1, 1, *(look or 1 for look in looks)]


@pytest.mark.parametrize("more", [0, 1, 5, 2 * abi.SAMPLE_CAPACITY])
def test_a_reader_that_lags_loses_the_oldest(more: int) -> None:
    """One record is always clear for the next operation."""
    device = Device()
    device.write(3)
    device.take()
    told = device.write(abi.SAMPLE_CAPACITY - 1 + more)
    assert device.take() == told[more:]


def test_operations_under_way_are_told_when_they_end() -> None:
    """Halves that run apart end in any order, long after others that began later."""
    device = Device()
    for _ in range(20):
        under_way = [device.begin(apart=device.draw.random() < 0.5) for _ in range(5)]
        between = device.write(3)
        assert device.take() == between
        ended = device.draw.sample(under_way, 3)
        for number, _ in ended:
            device.end(number)
        assert device.take() == [told for _, told in sorted(ended)]
        for number, _ in under_way:
            if number not in [n for n, _ in ended]:
                device.end(number)
        assert len(device.take()) == 2
        assert device.take() == []


def test_words_that_come_after_the_last_part_are_not_missed() -> None:
    """Nothing orders them on the device: what is told is a later look."""
    device = Device()
    number, told = device.begin()
    row = device.ring.records[number % abi.SAMPLE_CAPACITY]
    late, row[7] = int(row[7]), 1
    device.end(number)
    looks = 0

    def copy(source: torch.Tensor) -> torch.Tensor:
        nonlocal looks
        found = device.kept(source)
        if source.numel() > 1:
            looks += 1
            row[7] = late
        return found

    device.ring._copy = copy
    assert device.take() == [told]
    assert looks == 2


def test_what_was_broken_off_has_no_record() -> None:
    device = Device()
    whole = device.write(2)
    broken, _ = device.begin()
    device.ring.records[(broken + 1) % abi.SAMPLE_CAPACITY, abi.SAMPLE_WORDS - 1] = 3  # ends of one that never was sent
    device.ring.skip()
    assert device.take() == whole
    told = device.write(4)
    assert device.take() == told


def test_a_reader_that_was_never_there_costs_nothing() -> None:
    """However many operations nobody asked about: no list of them is made, not even when one is broken off."""
    device = Device()
    device.head += 10**15
    device.ring.skip()
    assert len(device.ring._open) <= abi.SAMPLE_CAPACITY
    told = device.write(3)
    assert device.take() == told
    assert len(device.ring._open) <= abi.SAMPLE_CAPACITY


def test_a_record_that_is_overwritten_under_the_reader_is_skipped() -> None:
    """Between the looks the ring goes round."""
    device, looks = Device(), 0
    told = device.write(10)

    def copy(source: torch.Tensor) -> torch.Tensor:
        nonlocal looks
        looks += source.numel() > 1
        if source.numel() > 1 and looks == 2:
            told.extend(device.write(abi.SAMPLE_CAPACITY - 7))
        return device.kept(source)

    device.ring._copy = copy
    assert device.take() == told[4:10]
    assert device.take() == told[10:]


def test_a_busy_device_loses_nothing_and_a_lost_one_says_nothing() -> None:
    device = Device()
    told = device.write(4)
    device.busy = True
    assert device.take() == []
    device.busy = False
    assert device.take() == told
    device.write()
    device.lost = True
    assert device.take() == []


def test_other_words_come_by_the_same_copy() -> None:
    device, words = Device(), torch.arange(SIZE)
    copied = device.ring.peek(words)
    assert copied is not None
    assert copied.data_ptr() != words.data_ptr()
    assert copied.tolist() == [0, 1, 2]
    device.busy = True
    assert device.ring.peek(words) is None
    device.lost = True
    assert device.ring.peek(words) is None
