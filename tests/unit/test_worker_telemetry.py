"""Sample records: known bytes in, LatencySample out, as the native struct has it. And how the worker counts them."""

from __future__ import annotations

import math
import struct
import threading

import pytest
import torch

from crossdock.common.metrics import WorkerMetrics
from crossdock.worker import worker_telemetry as telemetry_module
from crossdock.worker.worker_telemetry import StepRecord, WorkerTelemetry
from ep_kernels import LatencySample
from ep_kernels.telemetry import MAX_RANKS, RECORD_BYTES, RING_SIZE, decode, quantile, slowest_peer
from ep_kernels.transports.cpu import native


def record(op: int = 0, mode: int = 1, ranks: int = 3, waits: tuple[int, ...] = (5, 0, 9)) -> bytes:
    waits += (77,) * (MAX_RANKS - len(waits))
    return struct.pack(f"=4iQ3q{MAX_RANKS}q", op, mode, 12, ranks, 41, 1000, 20, 300, *waits)


def test_a_record() -> None:
    assert decode(record()) == [LatencySample("dispatch", "ht", 41, 12, 1000, 20, (5, 0, 9), 300)]
    assert [s.op for s in decode(record() + record(op=1, mode=0))] == ["dispatch", "combine"]
    assert decode(b"") == []


@pytest.mark.parametrize("bad", [{"op": 2}, {"mode": -1}, {"ranks": 0}, {"ranks": MAX_RANKS + 1}])
def test_fields_that_no_transport_writes(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="records"):
        decode(record(**bad))


def test_half_a_record() -> None:
    with pytest.raises(ValueError, match=f"multiple of {RECORD_BYTES}"):
        decode(record()[:-1])


def test_native_struct_is_the_same() -> None:
    assert native.load().cd_sample_bytes() == RECORD_BYTES
    assert RING_SIZE == 4096


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert math.isnan(quantile([], 0.5))


def test_slowest_peer() -> None:
    samples = decode(record(waits=(0, 4, 5)) + record(waits=(0, 4, 1)))
    assert slowest_peer(samples) == (1, 8)
    assert slowest_peer([]) == (-1, 0)


def step(experts: int = 2) -> StepRecord:
    return StepRecord(1, torch.ones(experts, dtype=torch.int32), 0, 1, 1, 1)


def dropped(metrics: WorkerMetrics) -> float:
    return metrics.registry.get_sample_value("crossdock_telemetry_records_dropped_total") or 0.0


def test_a_record_that_cannot_be_counted_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    count = telemetry._count_step
    broken = iter([True])

    def once(record: StepRecord) -> None:
        if next(broken, False):
            raise RuntimeError("no")
        count(record)

    monkeypatch.setattr(telemetry, "_count_step", once)
    telemetry.step(step())
    telemetry.step(step())
    telemetry.close()
    assert dropped(metrics) == 1
    assert metrics.registry.get_sample_value("crossdock_steps_total") == 1


def test_a_thread_that_is_behind_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_MAX_RECORDS", 8)
    metrics, hold = WorkerMetrics(), threading.Event()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    monkeypatch.setattr(telemetry, "_count_step", lambda record: hold.wait())
    for _ in range(20):
        telemetry.step(step())
    assert telemetry._queue.qsize() <= 8
    assert dropped(metrics) >= 11, "one is being counted, eight wait"
    assert telemetry.alive
    hold.set()
    telemetry.close()
    assert not telemetry.alive
