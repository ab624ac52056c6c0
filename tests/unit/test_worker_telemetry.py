"""Sample records: known bytes in, LatencySample out, as the native struct has it. And how the worker counts them."""

from __future__ import annotations

import math
import random
import struct
import threading
import time
from array import array
from typing import Any

import grpc
import pytest

from crossdock.common.metrics import WorkerMetrics
from crossdock.common.operation_counts import by_kind
from crossdock.worker.telemetry import worker_telemetry as telemetry_module
from crossdock.worker.telemetry.worker_telemetry import CommunicatorCounts, StepRecord, WorkerTelemetry
from ep_kernels import LatencySample, PeerTraffic
from ep_kernels.telemetry import KINDS, MAX_RANKS, RING_SIZE, Samples, quantile, record_bytes
from ep_kernels.transports.cpu import native


def record(
    op: int = 0, mode: int = 1, ranks: int = 3, waits: tuple[int, ...] = (5, 0, 9), seq: int = 41, tokens: int = 12
) -> bytes:
    return struct.pack(f"=4iQ3q{len(waits)}q", op, mode, tokens, ranks, seq, 1000, 20, 300, *waits)


def test_a_record() -> None:
    one = LatencySample("dispatch", "ht", 41, 12, 1000, 20, (5, 0, 9), 300)
    assert Samples(record(), 3) == [one]
    found = Samples(record() + record(op=1, mode=0), 3)
    assert (len(found), found[0], found[-1].op, [s.op for s in found[:2]]) == (
        2,
        one,
        "combine",
        ["dispatch", "combine"],
    )
    assert Samples(b"", 3) == []
    with pytest.raises(IndexError):
        found[2]


@pytest.mark.parametrize("bad", [{"op": 2}, {"mode": -1}, {"ranks": 0}, {"ranks": 4}])
def test_fields_that_no_transport_writes(bad: dict[str, int]) -> None:
    samples = Samples(record() + record(**bad), 3)
    with pytest.raises(ValueError, match="records"):
        list(samples)
    with pytest.raises(ValueError, match="records"):
        list(by_kind(samples))


def test_half_a_record() -> None:
    with pytest.raises(ValueError, match=f"multiple of {record_bytes(3)}"):
        Samples(record()[:-1], 3)


def test_native_struct_is_the_same() -> None:
    assert native.load().cd_sample_bytes() == record_bytes(MAX_RANKS)


def test_columns_say_what_the_samples_say() -> None:
    """Records of the native half, and samples that a transport made itself."""
    rng = random.Random(1)
    numbers = [rng.choice([*KINDS]) for _ in range(200)]
    waits = [tuple(rng.randrange(1 << 40) for _ in range(5)) for _ in numbers]
    made = [record(*numbers[seq], 5, waits[seq], seq, 2**31 - 1 - seq) for seq in range(200)]
    native_ones = Samples(b"".join(made), 5)
    for samples in (native_ones, Samples.of(list(native_ones))):
        kinds = {(one.op, one.mode): one for one in by_kind(samples)}
        for kind, one in kinds.items():
            chosen = [sample for sample in samples if (sample.op, sample.mode) == kind]
            assert one.seq.tolist() == [sample.seq for sample in chosen]
            assert one.tokens.tolist() == [sample.tokens for sample in chosen]
            assert one.send_ns.tolist() == [sample.send_ns for sample in chosen]
            assert one.total_ns.tolist() == [sample.total_ns for sample in chosen]
            assert one.waits_ns.tolist() == [list(sample.peer_wait_ns) for sample in chosen]
        assert sum(len(one.seq) for one in kinds.values()) == len(samples) == 200
    assert native_ones == Samples.of(list(native_ones))
    assert RING_SIZE == 4096


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert math.isnan(quantile([], 0.5))


def step(experts: int = 2) -> StepRecord:
    return StepRecord(1, bytes([1, 0, 0, 0]) * experts, [], lambda ids: 0, 1, 1, 1)


def dropped(metrics: WorkerMetrics) -> float:
    return metrics.registry.get_sample_value("crossdock_telemetry_records_dropped_total") or 0.0


def test_a_record_that_cannot_be_counted_does_not_end_the_thread() -> None:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    telemetry.step(step()._replace(remote_rows=lambda ids: 1 // 0))
    while not dropped(metrics):
        time.sleep(0.01)
    telemetry.step(step())
    telemetry.close()
    assert dropped(metrics) == 1
    assert metrics.registry.get_sample_value("crossdock_steps_total") == 1


def test_a_thread_that_is_behind_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_MAX_RECORDS", 8)
    metrics, hold = WorkerMetrics(), threading.Event()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    monkeypatch.setattr(telemetry, "_count_steps", lambda records: hold.wait())
    for _ in range(20):
        telemetry.step(step())
    assert telemetry._queue.qsize() <= 8
    assert dropped(metrics) >= 11, "one is being counted, eight wait"
    assert telemetry._thread.is_alive()
    hold.set()
    telemetry.close()
    assert not telemetry._thread.is_alive()


def of_op(op: str, seq: int) -> LatencySample:
    return LatencySample(op, "ll", seq, 1, 1, 1, (0, 2), 3)


def test_samples_that_the_ring_has_lost_are_counted_by_their_numbers() -> None:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (8, 8), "nvlink")
    telemetry._put(Samples.of([of_op("dispatch", 5), of_op("combine", 5), of_op("dispatch", 6)]))
    telemetry._put(Samples.of([of_op("dispatch", 9), of_op("combine", 6)]))
    telemetry._put(telemetry_module._Collect(None))
    telemetry._put(Samples.of([of_op("dispatch", 1), of_op("dispatch", 2)]))  # another communicator begins again
    telemetry.close()
    assert [one.seq for one in telemetry.recent()] == [1, 2], "a trace does not mix epochs"
    value = metrics.registry.get_sample_value
    assert value("crossdock_samples_dropped_total", {"op": "dispatch"}) == 2
    assert value("crossdock_samples_dropped_total", {"op": "combine"}) == 0
    labels = {"op": "dispatch", "mode": "ll", "phase": "total", "transport": "nvlink"}
    assert value("crossdock_operation_duration_seconds_count", labels) == 5
    assert value("crossdock_peer_wait_seconds_total", {"op": "dispatch", "peer": "1"}) == pytest.approx(10e-9)


def test_rows_are_counted_as_payload_and_as_they_travel() -> None:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (8, 16), "cpu")
    one = bytes([1, 0, 0, 0]) * 2
    for pieces, wire in ((2, (10, 20)), (1, (10, 20)), (0, (7, 9))):
        telemetry.step(StepRecord(1, one, [one] * pieces, len, 1, 1, 1, wire_bytes=wire))
    telemetry.close()
    value = metrics.registry.get_sample_value
    moved = [
        value(f"crossdock_{kind}_bytes_total", {"op": op, "transport": "cpu"})
        for kind in ("payload", "wire")
        for op in ("dispatch", "combine")
    ]
    assert moved == [24, 48, 30, 60]


def test_failed_requests_have_a_latency_and_refused_ones_have_none() -> None:
    metrics = WorkerMetrics()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    telemetry.answered(grpc.StatusCode.OK, 7, 0.25, 0.125)
    telemetry.answered(grpc.StatusCode.UNAVAILABLE, 7, 0.5)
    telemetry.answered(grpc.StatusCode.RESOURCE_EXHAUSTED, 0, 0.0)
    telemetry.close()
    value = metrics.registry.get_sample_value
    sums = [value("crossdock_request_duration_seconds_sum", {"code": code}) for code in ("OK", "UNAVAILABLE")]
    assert sums == [0.25, 0.5]
    assert value("crossdock_request_duration_seconds_count", {"code": "RESOURCE_EXHAUSTED"}) is None
    assert value("crossdock_queue_duration_seconds_sum") == 0.125
    assert value("crossdock_tokens_total") == 7


class TalkingComm:
    """A communicator of four ranks, the last two on another host."""

    def __init__(self) -> None:
        self.active: tuple[bool, ...] = (True,) * 4
        self.passed = {2: PeerTraffic(2, True, 0, 0, 0), 3: PeerTraffic(3, True, 0, 0, 0)}
        self.dropped: int | None = 0

    def samples(self) -> Samples:
        return Samples.of([])

    def traffic(self) -> list[PeerTraffic]:
        return list(self.passed.values())

    def dropped_rows(self) -> int | None:
        return self.dropped


def collected(telemetry: WorkerTelemetry, comm: Any) -> None:
    telemetry._next_collect_s = 0.0
    telemetry.collect(comm)


def test_traffic_goes_on_over_communicators_and_links_are_those_of_active_ranks() -> None:
    metrics, first, second = WorkerMetrics(), TalkingComm(), TalkingComm()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    first.passed[2] = PeerTraffic(2, True, 3, 500, 4)
    collected(telemetry, first)
    first.passed[2] = PeerTraffic(2, True, 5, 700, 4)
    first.active = (True, True, True, False)
    collected(telemetry, first)
    second.passed[2] = PeerTraffic(2, False, 6, 800, 9)
    second.active = first.active
    collected(telemetry, second)
    telemetry.close()

    def value(name: str, peer: int) -> float | None:
        return metrics.registry.get_sample_value(f"crossdock_network_{name}", {"peer": str(peer)})

    sent = [value(f"sent_{unit}_total", 2) for unit in ("messages", "bytes")]
    assert [*sent, value("received_messages_total", 2)] == [11, 1500, 13]
    assert (value("link_up", 2), value("link_up", 3), value("sent_bytes_total", 3)) == (0, None, 0)


def test_the_end_of_an_epoch_is_counted_by_a_thread_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_MAX_RECORDS", 4)
    metrics, comm, hold = WorkerMetrics(), TalkingComm(), threading.Event()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    monkeypatch.setattr(telemetry, "_count_steps", lambda records: hold.wait())
    telemetry.step(step())
    collected(telemetry, comm)
    for _ in range(10):
        telemetry.step(step())
    before = dropped(metrics)
    assert before > 0, "the queue is full"
    telemetry.epoch_ended(comm)
    hold.set()
    telemetry.close()
    assert metrics.registry.get_sample_value("crossdock_network_link_up", {"peer": "2"}) is None
    assert metrics.registry.get_sample_value("crossdock_network_sent_bytes_total", {"peer": "2"}) == 0, "it was up"


def test_rows_dropped_by_one_communicator_after_the_other() -> None:
    metrics, first, second = WorkerMetrics(), TalkingComm(), TalkingComm()
    counts = CommunicatorCounts(metrics)
    for comm, dropped in ((first, 4), (first, 9), (first, None), (second, 0), (second, 2), (second, 2)):
        comm.dropped = dropped
        counts.count(comm)  # type: ignore[arg-type]
    assert metrics.registry.get_sample_value("crossdock_rows_dropped_total") == 11


def test_no_link_is_expected_after_an_epoch() -> None:
    metrics, comm = WorkerMetrics(), TalkingComm()
    telemetry = WorkerTelemetry(metrics, (8, 8))
    collected(telemetry, comm)
    telemetry.epoch_ended(comm)
    telemetry.close()
    assert metrics.registry.get_sample_value("crossdock_network_link_up", {"peer": "2"}) is None
    assert metrics.registry.get_sample_value("crossdock_network_sent_bytes_total", {"peer": "2"}) == 0


def test_steps_together_are_counted_as_one_by_one() -> None:
    rng = random.Random(2)
    records = [
        StepRecord(
            rng.randrange(9), array("i", [rng.randrange(3) for _ in range(rng.choice((3, 4)))]).tobytes(),
            [bytes(8 * rng.randrange(3))], lambda ids: sum(map(len, ids)),
            *(rng.randrange(10**7) for _ in range(3)), rng.randrange(2), rng.choice((None, (7, 1, 0, 9))),
            rng.choice((None, {"trace_id": f"{number:032x}"})), (rng.randrange(2), 3),
        )
        for number in range(50)
    ]  # fmt: skip
    found = []
    for size in (1, 50):
        metrics = WorkerMetrics()
        telemetry = WorkerTelemetry(metrics, (8, 16))
        telemetry.holds({0: (0, 1, 2, 3)}, 1)
        for begin in range(0, 50, size):
            telemetry._count_steps(records[begin : begin + size])
        telemetry._count_experts()
        series = {
            (sample.name, *sample.labels.values()): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name.startswith("crossdock") and not sample.name.endswith(("_created", "_timestamp_seconds"))
        }
        latency = telemetry.stats(0).latency
        report = (latency.steps, latency.tokens, latency.rows, latency.hot_rows, latency.experts_s, latency.step_s)
        found.append((series, report, telemetry.take_rows()))
        telemetry.close()
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])
    assert found[0][2] == found[1][2]
    assert sum(found[0][2].values()) == sum(sum(array("i", record.rows_per_expert)) for record in records)
