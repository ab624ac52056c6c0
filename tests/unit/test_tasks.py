"""Tasks that nobody awaits: they live until they end, and an end that was not meant is told."""

from __future__ import annotations

import asyncio
import gc

import pytest

from crossdock.common.tasks import beside, watched


async def fails(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_a_task_that_fails_is_told_once_and_at_once(caplog: pytest.LogCaptureFixture) -> None:
    task = beside(fails(ValueError("why")), "the look")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["the look ended; this is a bug"]
    assert "raise error" in caplog.records[0].crossdock_fields["traceback"]  # type: ignore[attr-defined]


async def test_a_task_that_ends_on_purpose_is_not(caplog: pytest.LogCaptureFixture) -> None:
    expected = beside(fails(OSError("the peer went")), "a call", OSError)
    done, cancelled = beside(asyncio.sleep(0), "a pause"), beside(asyncio.sleep(60), "a long pause")
    cancelled.cancel()
    await asyncio.wait([expected, done, cancelled])
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_a_task_is_kept_until_it_ends() -> None:
    went_on = asyncio.Event()

    async def waits() -> None:
        await asyncio.get_running_loop().create_future()  # nobody else knows that future

    task = beside(waits(), "a wait")
    task.add_done_callback(lambda _: went_on.set())
    del task
    await asyncio.sleep(0)
    gc.collect()
    left = [task for task in asyncio.all_tasks() if task.get_name() == "a wait"]
    assert len(left) == 1
    left[0].cancel()
    await went_on.wait()


async def test_what_a_thread_was_to_say_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    future = asyncio.get_running_loop().create_future()
    watched(future, "the loader")
    future.set_exception(ValueError("why"))
    await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["the loader ended; this is a bug"]
