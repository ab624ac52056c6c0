"""Processor time of this machine that other programs took: what a measurement on a shared machine has to know."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_IDLE, _WAIT = 3, 4
"""Columns of /proc/stat that are no one's time."""
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Columns of a process's stat, after its name."""


def of_others_s() -> float:
    """Seconds since the machine has started, of all processors, taken by neither this process nor any that descends
    from it; time that the machine's own host took counts. To be subtracted from a later one."""
    columns = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    taken = sum(columns) - columns[_IDLE] - columns[_WAIT]
    return (taken - _own_ticks()) * _TICK_S


def _own_ticks() -> int:
    """Of processes that live; those that end between two calls count as others' in the second."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            number = int(entry.name)
            parents[number], ticks[number] = int(words[_PARENT]), int(words[_USER]) + int(words[_SYSTEM])
    own, before = {os.getpid()}, 0
    while len(own) > before:
        before = len(own)
        own |= {number for number, parent in parents.items() if parent in own}
    return sum(ticks.get(number, 0) for number in own)
