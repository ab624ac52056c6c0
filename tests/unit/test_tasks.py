"""Tasks that nobody awaits: they live until they end, and an end that was not meant is told."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from crossdock.common.tasks import background, end_tasks, log_failure, wait_for_end


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What only the garbage collector would free stays."""
    gc.disable()
    yield
    gc.enable()


async def fails(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_a_task_that_fails_is_told_once_and_at_once(caplog: pytest.LogCaptureFixture) -> None:
    task = background(fails(ValueError("why")), "the look")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["the look ended; this is a bug"]
    assert "raise error" in caplog.records[0].crossdock_fields["traceback"]  # type: ignore[attr-defined]


async def test_a_task_that_ends_on_purpose_is_not(caplog: pytest.LogCaptureFixture) -> None:
    expected = background(fails(OSError("the peer went")), "a call", OSError)
    done, cancelled = background(asyncio.sleep(0), "a pause"), background(asyncio.sleep(60), "a long pause")
    cancelled.cancel()
    await asyncio.wait([expected, done, cancelled])
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_a_task_is_kept_until_it_ends() -> None:
    went_on = asyncio.Event()

    async def waits() -> None:
        await asyncio.get_running_loop().create_future()  # nobody else knows that future

    task = background(waits(), "a wait")
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
    log_failure(future, "the loader")
    future.set_exception(ValueError("why"))
    await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["the loader ended; this is a bug"]


class Reads:
    """Keeps its own task, as a connection does."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        self.begun.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("cancelled_by", ["end_tasks", "another"])
async def test_what_kept_its_task_is_freed_with_it(cancelled_by: str, no_collection: None) -> None:
    reads = Reads()
    await reads.begun.wait()
    if cancelled_by == "end_tasks":
        await end_tasks(reads.task)
    else:
        reads.task.cancel()
        await wait_for_end(reads.task)
    assert reads.task.cancelled()
    left = weakref.ref(reads)
    del reads
    assert left() is None


async def test_the_end_of_tasks_is_waited_for_and_no_error_of_theirs_is_raised() -> None:
    slept = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            slept.append(1)

    tasks = [asyncio.create_task(lingers()), asyncio.create_task(fails(ValueError("why")))]
    await asyncio.sleep(0.01)
    await end_tasks(*tasks)
    assert slept == [1]
    assert all(task.done() for task in tasks)
    await end_tasks()
