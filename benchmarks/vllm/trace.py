"""What torch's profiler has seen of decode steps that are CUDA graphs: their time on the GPU, kernel by kernel. Pure.

A step is one replay: all operations of one launch. Its span runs from the first operation's begin to the last one's
end, waits for other ranks inside it; busy is the time in which at least one operation ran.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPERATIONS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events that are work of the GPU."""
FEWEST = 50
"""Operations of one launch that make it the replay of a model's step."""
NAME = 60
"""Characters of a kernel's name that are kept."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One step on one rank's GPU."""

    span_us: float
    busy_us: float
    operations: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel in a step: how often it ran and how long in all, means over the steps."""

    name: str
    count: float
    us: float


def replays(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The operations of each replay, in the order of their begin, from a trace's "traceEvents"."""
    launches: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in OPERATIONS:
            launches[event["args"]["correlation"]].append(event)
    found = [sorted(each, key=lambda event: event["ts"]) for each in launches.values() if len(each) >= FEWEST]
    return sorted(found, key=lambda each: each[0]["ts"])


def replay_of(operations: Sequence[Mapping[str, Any]]) -> Replay:
    """Its times."""
    begin, end, busy = operations[0]["ts"], 0.0, 0.0
    for event in operations:
        last = event["ts"] + event["dur"]
        busy += max(0.0, last - max(event["ts"], end))
        end = max(end, last)
    return Replay(round(end - begin, 1), round(busy, 1), len(operations))


def kernel_times(steps: Sequence[Sequence[Mapping[str, Any]]]) -> list[KernelTime]:
    """By kernel, the longest first."""
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in (event for step in steps for event in step):
        name = event["name"][:NAME]
        counts[name] += 1
        times[name] += event["dur"]
    return [
        KernelTime(name, round(counts[name] / len(steps), 2), round(us / len(steps), 1))
        for name, us in times.most_common()
    ]


def median_of(found: Sequence[Replay]) -> Replay:
    """Field by field."""
    columns = [[getattr(each, name) for each in found] for name in ("span_us", "busy_us", "operations")]
    span, busy, operations = map(statistics.median, columns)
    return Replay(span, busy, int(operations))
