"""What a worker exports of its seat, and of none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.group.worker_status import WorkerStatus

SEAT: Any = SimpleNamespace(rank=2, epoch=5, size=4, mask=(True, True, True, False))


def test_a_worker_without_a_seat_exports_nothing_of_a_former_one() -> None:
    metrics = WorkerMetrics()
    status = WorkerStatus(metrics, lambda serving: None)

    def seat() -> list[float | None]:
        return [
            metrics.registry.get_sample_value(f"crossdock_{name}") for name in ("rank", "epoch", "members", "serving")
        ]

    assert seat() == [-1, 0, 0, 0]
    status.seated(SEAT)
    status.joining("exchanging regions")
    assert seat() == [2, 5, 3, 0]
    status.serving(SEAT)
    assert seat() == [2, 5, 3, 1]
    status.joining("re-forming: rank 1 is gone")
    assert seat() == [2, 5, 3, 0], "it may keep its seat"
    status.waiting()
    assert seat() == [-1, 0, 0, 0]
    assert status.ready() == (False, "joining: waiting for the group to be complete")
