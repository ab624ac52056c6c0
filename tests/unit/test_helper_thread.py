"""Helper threads: none ends silently, and what callers can cause fills no log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from crossdock.common import helper_thread, liveness, log
from crossdock.common.helper_thread import HelperThread, go_on
from crossdock.worker.telemetry import freed_memory


async def test_a_thread_that_an_error_ends_fails_the_liveness_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_thread, "_ended", [])
    alive = liveness.Liveness()
    for work, trouble in ((lambda: None, ""), (lambda: 1 // 0, "counting: ended")):
        thread = HelperThread("counting", work)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert alive.trouble() == trouble
    alive.close()
    assert "ZeroDivisionError" in str(caplog.records[-1].__dict__)


def test_freed_memory_goes_on_after_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_POLL_S", 0.001)
    monkeypatch.setattr(helper_thread, "_PAUSE_S", 0.001)
    given_back, looks = threading.Event(), iter(range(1000))

    def resident_bytes() -> int:
        if (number := next(looks)) < 3:
            raise OSError(24, "Too many open files")
        if number > 100:
            raise SystemExit  # the test is over
        return number * freed_memory.KEPT_BYTES

    monkeypatch.setattr(freed_memory, "resident_bytes", resident_bytes)
    thread = threading.Thread(
        target=lambda: go_on(freed_memory.Watch(given_back.set, 0).poll),
        daemon=True,
    )
    thread.start()
    assert given_back.wait(60)


def test_lines_that_a_caller_can_cause_come_once_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = log.get("crossdock.test")
    for step in range(50):
        now[0] = 100.0 + step / 40
        lines.seldom("refused", number=step)
        lines.seldom("another", number=step)
    said = [(record.getMessage(), record.crossdock_fields) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [
        ("refused", {"number": 0}),
        ("another", {"number": 0}),
        ("refused", {"number": 40, "left_out": 39}),
        ("another", {"number": 40, "left_out": 39}),
    ]
