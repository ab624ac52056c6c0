"""Runs coroutines in every order in which they can go on. No thread, no sleep, no clock but its own.

A coroutine that does `await loop.gate("name")` is parked. When nothing can run any more, the loop releases one of those
that are parked; `every_order` runs a scenario again and again until each of them was chosen in each place. Timers are
only due when nobody is parked: time then jumps to the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Scenario = Callable[["StepLoop"], Coroutine[Any, Any, None]]


class StepLoop(asyncio.SelectorEventLoop):
    """An event loop that releases parked coroutines one at a time.

    Args:
        plan: which of the parked ones to release, step by step; the first one after its end.

    Attributes:
        taken: (which one, of how many) was released at each step.
        story: their names.
    """

    def __init__(self, plan: list[int]) -> None:
        super().__init__()
        self._plan = plan
        self._parked: list[tuple[str, asyncio.Future[None]]] = []
        self._now = 0.0
        self.taken: list[tuple[int, int]] = []
        self.story: list[str] = []

    def time(self) -> float:
        """Seconds, which pass only in jumps from timer to timer."""
        return self._now

    async def gate(self, name: str) -> None:
        """Park the caller until it is chosen."""
        future: asyncio.Future[None] = self.create_future()
        self._parked.append((name, future))
        await future

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            self._go_on()
        super()._run_once()  # type: ignore[misc]

    def _go_on(self) -> None:
        self._parked = [(name, future) for name, future in self._parked if not future.done()]
        timers = self._scheduled  # type: ignore[attr-defined]
        if self._parked:
            place = len(self.taken)
            chosen = self._plan[place] if place < len(self._plan) else 0
            self.taken.append((chosen, len(self._parked)))
            name, future = self._parked.pop(chosen)
            self.story.append(name)
            future.set_result(None)
        elif timers:
            self._now = max(self._now, timers[0].when())
        else:
            raise AssertionError("stuck: nothing is parked, and no timer is set")


def every_order(scenario: Scenario, *, most: int = 5000) -> int:
    """Run `scenario` in every order of its gates. Returns how many; a failure names the order. The scenario must do the
    same whenever the same ones are released."""
    plans: list[list[int]] = [[]]
    count = 0
    while plans:
        plan = plans.pop()
        count += 1
        assert count <= most, f"more than {most} orders"
        loop = _run(scenario, plan)
        picks = [chosen for chosen, _ in loop.taken]
        for place in range(len(plan), len(loop.taken)):
            plans += [[*picks[:place], other] for other in range(1, loop.taken[place][1])]
    return count


def _run(scenario: Scenario, plan: list[int]) -> StepLoop:
    loop = StepLoop(plan)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(scenario(loop))
    except BaseException as error:
        error.add_note("in the order: " + " -> ".join(loop.story))
        raise
    finally:
        for _ in range(50):
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            if not left:
                break
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.close()
        asyncio.set_event_loop(None)
    return loop
