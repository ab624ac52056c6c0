"""Faults that make a group slow and break nothing. Each is a context, and ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.observability.group import E, Group

RATE = "20mbit"


@contextlib.contextmanager
def none(group: Group, rank: int) -> Iterator[None]:
    """Nothing."""
    yield


@contextlib.contextmanager
def pulses(pids: Sequence[int], stop_s: float, go_s: float) -> Iterator[None]:
    """SIGSTOP processes together, for `stop_s` of every `stop_s + go_s`."""
    end = threading.Event()

    def pulse() -> None:
        while not end.wait(go_s):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    os.kill(pid, number)
                time.sleep(stop_s * (number is signal.SIGSTOP))

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def stopped(group: Group, rank: int) -> contextlib.AbstractContextManager[None]:
    """A rank that stands still for 50 ms of every 200 ms."""
    return pulses([group.ranks[rank]], 0.05, 0.15)


def limited(group: Group, rank: int) -> contextlib.AbstractContextManager[None]:
    """A rank that runs 6 ms of every 20 ms, as under a limit of its CPU time."""
    return pulses([group.ranks[rank]], 0.014, 0.006)


def slow_host(group: Group, rank: int) -> contextlib.AbstractContextManager[None]:
    """The same of all ranks of one of two hosts."""
    half = len(group.ranks) // 2
    first = rank // half * half
    return pulses(group.ranks[first : first + half], 0.014, 0.006)


@contextlib.contextmanager
def hogs(number: int, cpus: set[int]) -> Iterator[None]:
    """Processes that compute on these processors."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(hog.kill)
            os.sched_setaffinity(hog.pid, cpus)
        yield


@contextlib.contextmanager
def _behind_hogs(pids: Sequence[int], nice: int, number: int, shared: set[int]) -> Iterator[None]:
    """Ranks at a lower priority than so many hogs, on the processors that they share."""
    cpus = os.sched_getaffinity(0)
    with hogs(number, shared):
        try:
            for pid in pids:
                _prioritize(pid, nice, shared)
            yield
        finally:
            for pid in pids:
                _prioritize(pid, 0, cpus)


def niced(group: Group, rank: int) -> contextlib.AbstractContextManager[None]:
    """A rank behind two other processes on one processor."""
    return _behind_hogs([group.ranks[rank]], 5, 2, {min(os.sched_getaffinity(0))})


def uniform(group: Group, rank: int) -> contextlib.AbstractContextManager[None]:
    """All ranks behind two processes on each processor."""
    cpus = os.sched_getaffinity(0)
    return _behind_hogs(group.ranks, 10, 2 * len(cpus), cpus)


def _prioritize(pid: int, nice: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # the kernel may schedule sessions as groups, with a priority of their own
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(path.name), nice)
            os.sched_setaffinity(int(path.name), cpus)


@contextlib.contextmanager
def hot_expert(group: Group, rank: int) -> Iterator[None]:
    """Every token chooses one expert of the rank."""
    group.load.favoured = (rank * E // len(group.ranks),)
    try:
        yield
    finally:
        group.load.favoured = ()


@contextlib.contextmanager
def skewed(group: Group, rank: int) -> Iterator[None]:
    """Every token chooses all experts of the rank."""
    each = E // len(group.ranks)
    group.load.favoured = tuple(range(rank * each, (rank + 1) * each))
    try:
        yield
    finally:
        group.load.favoured = ()


@contextlib.contextmanager
def throttled(group: Group, rank: int) -> Iterator[None]:
    """The cable between the two hosts carries RATE."""
    shape = f"root tbf rate {RATE} burst 16kb latency 200ms".split()
    subprocess.run(["tc", "qdisc", "add", "dev", "cable", *shape], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "cable", "root"], check=True)


FAULTS: dict[str, Callable[[Group, int], contextlib.AbstractContextManager[None]]] = {
    "none": none,
    "stopped": stopped,
    "limited": limited,
    "niced": niced,
    "hot_expert": hot_expert,
    "skewed": skewed,
    "throttled": throttled,
    "uniform": uniform,
    "slow_host": slow_host,
}
