"""Two states of the source tree in turns: the same calls to a group of each, both alive side by side.

    python -m benchmarks.service.turns BEFORE AFTER [--rounds N] [--ways unix,tcp,grpc] [--tokens 1,128] [--out FILE]

BEFORE and AFTER are trees with their libraries built. Each has a process of its own with the group of `path.py`, its
own client and its own service; all else is this tree's. A round asks each of them for the same number of calls, in
changing order, so that what else the machine does meets both. Prints medians over rounds of a round's percentiles, and
the smallest and largest p50. `one`: one client; `eight`: eight in two processes.

`--others S` is for a machine that is not quiet. A measurement during which other programs, or the machine's own host,
took more than S of a processor's time is repeated, at most AGAIN times in all. The last line has that number.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

import torch

from benchmarks.service import path
from benchmarks.service.foreign import ForeignClient
from benchmarks.service.load import Job, LoadProcesses, Way, choose
from crossdock.client import Client
from crossdock.common.config import WorkerConfig
from crossdock.worker.process import run_worker

SERVE, WARM_CALLS = "--serve", 40
CALLS = {1: 300, 128: 40}
"""Of one client in a round; others: 100."""
EIGHT_S, CALL_S = 1.5, 60.0
AGAIN, PAUSE_S = 200, 0.5
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_IDLE, _WAIT = 3, 4
"""Columns of /proc/stat that are no one's time."""
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Columns of a process's stat, after its name."""
WAYS: dict[str, Way] = {"unix": "auto", "tcp": "tcp", "grpc": "grpc"}


def _work(_: object, config: WorkerConfig) -> None:
    """A worker without the stamps of `path.py`."""
    run_worker(config)


def one_client(group: path.Group, tokens: int, way: str) -> list[float]:
    """Seconds of each call; all rows go to one worker and choose experts of either rank."""
    own, took = path.of_both_ranks(tokens), list[float]()
    choose(WAYS[way])
    made = ForeignClient(group.address) if way == "grpc" else Client(group.address, min_tokens_per_worker=tokens)
    with contextlib.closing(made) as client:
        for number in range(WARM_CALLS + CALLS.get(tokens, 100)):
            begin = time.monotonic()
            client.forward(0, *own, timeout_s=CALL_S)
            if number >= WARM_CALLS:
                took.append(time.monotonic() - begin)
    return took


def serve() -> None:
    """Answer lines "clients tokens way" with p10, p50, p90 in us and rows a second."""
    torch.set_num_threads(1)
    path._work = _work  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as name, LoadProcesses(2) as load:
        group = path.Group(Path(name))
        try:
            path._wait_serving(group)
            print("ready", flush=True)
            for line in sys.stdin:
                clients, tokens, way = line.split()
                begin = time.monotonic()
                if way == "in-process":
                    took = group.experts.measure(path.SIZES, 0, int(tokens), EIGHT_S / 3)
                    elapsed = sum(took)
                elif clients == "one":
                    took = one_client(group, int(tokens), way)
                    elapsed = sum(took)
                else:
                    job = Job(group.address, path.SIZES, int(tokens), 0, 8, EIGHT_S, way=WAYS[way])
                    got = load.run(job)
                    took, elapsed = got.took, got.elapsed
                us = sorted(1e6 * each for each in took)
                found = [us[len(us) * tenths // 10] for tenths in (1, 5, 9)]
                print("took", *found, int(tokens) * len(us) / elapsed, time.monotonic() - begin, flush=True)
        finally:
            group.stop()


def others_s() -> float:
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


class Tree:
    """A process that serves `serve` from a tree."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        paths = os.pathsep.join([str(folder), str(folder / "services"), *filter(None, sys.path)])
        python = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).resolve()), SERVE]
        self._process = subprocess.Popen(
            ["env", f"PYTHONPATH={paths}", *python],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self._read("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._asks.close()
        self._process.wait(30)

    def ask(self, *words: object) -> list[float]:
        """p10, p50, p90 in us, rows a second."""
        print(*words, file=self._asks, flush=True)
        return [float(word) for word in self._read("took")[:4]]

    def ask_undisturbed(self, most: float, again: list[int], *words: object) -> list[float]:
        """`ask`, repeated while others take more than that share of a processor. again: [repetitions left]."""
        while True:
            before_s, began = others_s(), time.monotonic()
            found = self.ask(*words)
            if others_s() - before_s <= most * (time.monotonic() - began) or not again[0]:
                return found
            again[0] -= 1
            time.sleep(PAUSE_S)

    def _read(self, first: str) -> list[str]:
        for line in self._answers:
            if line.split()[:1] == [first]:
                return line.split()[1:]
        raise RuntimeError(f"{self.name}: ended before {first!r}")


def table(found: dict[tuple[str, str], list[list[float]]]) -> list[str]:
    """A line for each case and tree."""
    lines = []
    for (case, tree), rounds in found.items():
        p10, p50, p90, rows = (statistics.median(column) for column in zip(*rounds, strict=True))
        least, most = (pick(each[1] for each in rounds) for pick in (min, max))
        lines.append(
            f"{case:28} {tree:12} p10 {p10:7.0f} p50 {p50:7.0f} [{least:.0f}, {most:.0f}] p90 {p90:7.0f} us, "
            f"{rows:7.0f} rows/s"
        )
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Measure; print the table, of whole rounds alone; 1 where a round failed."""
    parser = argparse.ArgumentParser(description="Calls to the services of two trees, in turns.")
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ways", default="unix,tcp,grpc")
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--clients", default="one")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--others", type=float, default=float("inf"), metavar="S")
    given, again = parser.parse_args(words), [AGAIN]
    asked = (given.clients.split(","), given.ways.split(","), given.tokens.split(","))
    cases = [(clients, tokens, way) for clients, way, tokens in itertools.product(*asked)]
    cases += [("one", tokens, "in-process") for tokens in asked[2]]
    found: dict[tuple[str, str], list[list[float]]] = {}
    status = 0
    with contextlib.ExitStack() as life:
        trees = [life.enter_context(Tree(folder.resolve())) for folder in given.trees]
        try:
            for number in range(given.rounds):
                for key, asked_of in _round(trees if number % 2 else trees[::-1], cases, given.others, again):
                    found.setdefault(key, []).append(asked_of)
        except Exception:
            traceback.print_exc()
            status = 1
    lines = [*table(dict(sorted(found.items()))), f"asked again because of others: {AGAIN - again[0]} times"]
    print(*lines, sep="\n", flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
    return status


def _round(
    trees: Sequence[Tree], cases: Sequence[tuple[str, str, str]], others: float, again: list[int]
) -> list[tuple[tuple[str, str], list[float]]]:
    """Each case of each tree once."""
    return [
        ((f"{way}, {clients}, T={tokens}", tree.name), tree.ask_undisturbed(others, again, clients, tokens, way))
        for clients, tokens, way in cases
        for tree in (trees[-1:] if way == "in-process" else trees)
    ]


if __name__ == "__main__":
    if SERVE in sys.argv:
        serve()
    else:
        sys.exit(main())
