"""Disturb a serving group for minutes, and see that what survives does not grow.

    python -m tests.soak [--minutes 10] [--out DIR]        (make soak)

Real processes: a control plane and three workers with default settings. Well-behaved clients ask without a pause, one
by each way, and compare every answer; new clients come and go; connections and watched views are opened and dropped;
every ROUND_S a worker other than the first is killed, and the group forms anew; in each round experts move to a new
balance, or the group is given another checkpoint. The control plane and the first worker live all along. Each is looked
at once a round, when the group serves: resident memory, file descriptors, threads, and tasks of its event loop.

Prints the slope of each by least squares, without the first third of the rounds, and how far the scatter of the rounds
may have moved it (two standard errors). Exit status 1 if an answer was wrong, the group did not serve again, memory
grew by more than RSS_MIB_PER_MIN or anything else by more than COUNTS_PER_MIN with the scatter taken off, or the
scatter is wider than that limit: such a run is too short to tell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import facts
from benchmarks.service.load import Way
from crossdock.client import Client
from crossdock.common import rpc
from crossdock.common.call_errors import CallError
from crossdock.common.http import ask_http
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from tests.attack.scene import FORM_S, NUM_WORKERS, Scene, meter
from tests.attack.witness import Witness
from tests.frozen import frozen
from tests.services.cluster import Batch, E, K, write_model

ROUND_S, MAX_MINUTES = 6.0, 60.0
WAYS: tuple[Way, ...] = ("auto", "tcp", "grpc")
RSS_MIB_PER_MIN, COUNTS_PER_MIN = 1.5, 1.0
CONNECTIONS = 20
"""Opened and dropped in each burst; there are about two bursts a second."""
_SURVIVORS = ("control", "worker-0")
_CALL_S = 10.0
_WORDS = 5
"""Most errors of requests that are printed."""
_LOOKS, _LOOK_EVERY_S = 5, 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One survivor in one round.

    Attributes:
        at_s: since the first round.
        process: "control" or "worker-0".
        rss_mib, fds, threads: of the process.
        tasks: of its event loop.
    """

    at_s: float
    process: str
    rss_mib: float
    fds: float
    threads: float
    tasks: float


@dataclass(frozen=True, slots=True)
class Slope:
    """A line through samples.

    Attributes:
        per_min: its slope.
        scatter: two standard errors of the slope; inf for fewer than three samples.
    """

    per_min: float
    scatter: float

    def fault(self, limit: float) -> str:
        """What is wrong with growth that may be `limit` a minute; "": nothing."""
        if self.per_min - self.scatter > limit:
            return f"{self.per_min:+.2f} a minute"
        if self.scatter > limit:
            return f"too few rounds to tell ({self.per_min:+.2f} ± {self.scatter:.2f} a minute)"
        return ""


def slope_of(samples: Sequence[Sample], name: str) -> Slope:
    """Least squares."""
    if len(samples) < 3:
        return Slope(0.0, math.inf)
    times = torch.tensor([sample.at_s / 60 for sample in samples], dtype=torch.float64)
    values = torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float64)
    times, values = times - times.mean(), values - values.mean()
    spread = float((times * times).sum())
    per_min = float((times * values).sum()) / spread
    left = values - per_min * times
    return Slope(per_min, 2 * math.sqrt(float((left * left).sum()) / (len(samples) - 2) / spread))


def look(scene: Scene, began: float) -> list[Sample]:
    """Both survivors; the least of some looks, for a call under way is no growth."""
    looks = []
    for _ in range(_LOOKS):
        looks.append([_look_once(scene, name, began) for name in _SURVIVORS])
        time.sleep(_LOOK_EVERY_S)
    return [min(each, key=lambda sample: (sample.tasks, sample.fds)) for each in zip(*looks, strict=True)]


def _look_once(scene: Scene, name: str, began: float) -> Sample:
    seen = meter(scene.pids()[name])
    _, text = ask_http(scene.http(name), "/metrics", _CALL_S)
    line = next(line for line in text.splitlines() if line.startswith("crossdock_event_loop_tasks{"))
    at_s = time.monotonic() - began
    return Sample(round(at_s, 1), name, seen.rss_mib, seen.fds, seen.threads, float(line.split()[1]))


class Restless:
    """Connections and views that come and go, and requests for a few experts, so that moving experts pays."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._stop = scene, threading.Event()
        self._paused, self._idle = threading.Event(), threading.Event()
        self.hot, self.num_connections = 0, 0
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._connect, self._ask)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; waits for it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No connection of it is open in the block."""
        self._idle.clear()
        self._paused.set()
        self._idle.wait(60)
        try:
            yield
        finally:
            self._paused.clear()

    def _connect(self) -> None:
        asyncio.run(self._come_and_go())

    async def _come_and_go(self) -> None:
        while not self._stop.is_set():
            if self._paused.is_set():
                self._idle.set()
                await asyncio.sleep(0.05)
                continue
            channels = [self._scene.channel(self._scene.control, number) for number in range(CONNECTIONS)]
            calls = [control_pb2_grpc.ControlPlaneStub(channel).Watch(pb.WatchRequest()) for channel in channels]
            for call in calls:
                with contextlib.suppress(grpc.RpcError, TimeoutError, asyncio.CancelledError):
                    await asyncio.wait_for(call.read(), _CALL_S)
                call.cancel()
            for channel in channels:
                await channel.close(0)
            self.num_connections += len(channels)
            del calls, call, channels, channel  # a connection lives as long as the last of its calls
            await asyncio.sleep(0.5)

    def _ask(self) -> None:
        with Client(self._scene.target) as client:
            while not self._stop.is_set():
                batch = Batch.random(64)
                ids = (torch.rand(64, E).pow(4).topk(K).indices + self.hot) % E
                with contextlib.suppress(Exception):  # the witness judges answers
                    client.forward(batch.layer, batch.x, ids, batch.weights, timeout_s=_CALL_S)
                self._stop.wait(0.02)


def move(scene: Scene) -> int:
    """Ask for a new balance; how many copies move."""
    with rpc.channel(scene.target) as channel:
        try:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            return int(rpc.call_sync(stub.Rebalance, pb.RebalanceRequest(), timeout_s=_CALL_S).moves)
        except CallError:
            return 0  # the group is forming anew, or something moves already


def switch(scene: Scene, path: Path) -> bool:
    """Ask for another checkpoint; whether the group takes it."""
    checkpoint = Checkpoint.open(path)
    asked = pb.LoadRequest(path=str(path), fingerprint=checkpoint.spec.fingerprint)
    checkpoint.close()
    with rpc.channel(scene.target) as channel:
        try:
            rpc.call_sync(control_pb2_grpc.ControlPlaneStub(channel).Load, asked, timeout_s=_CALL_S)
        except CallError:
            return False  # as `move`
    return True


def disturb(
    scene: Scene, models: Sequence[Path], minutes: float, console: Console
) -> tuple[list[Sample], dict[str, int], str]:
    """All rounds: samples; kills, moved copies, switches; and what went wrong ("": nothing)."""
    samples: list[Sample] = []
    done = {"kills": 0, "moves": 0, "switches": 0}
    restless, began = Restless(scene), time.monotonic()
    restless.start()
    epoch = 0
    try:
        while time.monotonic() - began < 60 * minutes:
            round_began = time.monotonic()
            if not scene.calm(epoch + 1, FORM_S):
                return samples, done, "the group does not serve"
            with restless.paused():
                samples += look(scene, began)
            restless.hot += 3
            if done["kills"] % 2:
                done["switches"] += switch(scene, models[1 - done["switches"] % 2])
            else:
                done["moves"] += move(scene)
            time.sleep(ROUND_S / 3)
            epoch = scene.view(_CALL_S).epoch
            os.kill(scene.pids()[f"worker-{1 + done['kills'] % (NUM_WORKERS - 1)}"], signal.SIGKILL)
            done["kills"] += 1
            time.sleep(max(0.0, round_began + ROUND_S - time.monotonic()))
            if done["kills"] % 10 == 0:
                console.print(f"{time.monotonic() - began:5.0f} s, {done}", highlight=False)
    finally:
        restless.stop()
    console.print(f"{restless.num_connections} connections came and went", highlight=False)
    return samples, done, "" if scene.calm(epoch + 1, FORM_S) else "the group does not serve"


def judge(samples: Sequence[Sample]) -> tuple[Table, list[str]]:
    """The slopes, and what is wrong with them."""
    table, faults = Table(title="Slopes per minute", title_justify="left"), []
    figures = [field.name for field in fields(Sample)][2:]
    for column in ("process", *figures):
        table.add_column(column, justify="left" if column == "process" else "right")
    for process in _SURVIVORS:
        own = [sample for sample in samples if sample.process == process]
        late = own[len(own) // 3 :]
        slopes = {name: slope_of(late, name) for name in figures}
        table.add_row(process, *(f"{slope.per_min:+.2f} ± {slope.scatter:.2f}" for slope in slopes.values()))
        for name, slope in slopes.items():
            if fault := slope.fault(RSS_MIB_PER_MIN if name == "rss_mib" else COUNTS_PER_MIN):
                faults.append(f"{process}: {name} {fault}")
    return table, faults


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Disturb a group; nothing may grow.")
    parser.add_argument("--minutes", type=float, default=10.0, help=f"for how long, at most {MAX_MINUTES:g}")
    parser.add_argument("--out", type=Path, help="folder for soak.csv and run.json; none: print only")
    arguments = parser.parse_args(words)
    if not 0 < arguments.minutes <= MAX_MINUTES:
        parser.error(f"--minutes: expected 0..{MAX_MINUTES:g}, got {arguments.minutes:g}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    arguments, console = parse(words), Console(width=None if sys.stdout.isatty() else 120)
    logging.getLogger("crossdock").setLevel(logging.CRITICAL)  # the supervisor's words of each kill
    found = facts.of_control(sys.argv[1:], {}, "tests.soak")  # of the code that is tested: the checkout may change
    with tempfile.TemporaryDirectory(prefix="crossdock-soak-") as folder:
        scene = Scene(Path(folder), guarded=False)
        models = [Path(folder, "model"), Path(folder, "other")]
        write_model(models[1])
        with frozen(Path(folder) / "code"), scene, contextlib.ExitStack() as life:
            witnesses = [life.enter_context(Witness(scene.target, None, models, way)) for way in WAYS]
            samples, done, trouble = disturb(scene, models, arguments.minutes, console)
            events = [event for witness in witnesses for event in witness.events]
            counts = Counter(event.kind for event in events)
            unanswered = Counter(event.words for event in events if event.kind in ("failed", "shut"))
            of_model = Counter(event.words for event in events if event.kind == "right")
    table, growth = judge(samples)
    console.print(table)
    console.print(f"{done}; answers: {dict(counts)}, by checkpoint: {dict(of_model)}", highlight=False)
    for error, count in unanswered.most_common(_WORDS):
        console.print(f"{count} x {error}", highlight=False)
    faults = [*growth, *([trouble] if trouble else []), *(["wrong answers"] if counts["wrong"] else [])]
    console.print("nothing grows, every answer is right" if not faults else "; ".join(faults), highlight=False)
    if arguments.out:
        config: dict[str, object] = {"minutes": arguments.minutes, **done, **counts, "of_model": dict(of_model)}
        facts.keep(arguments.out, "soak", Sample, samples, found | {"config": config})
    return 1 if faults or len(of_model) < len(models) else 0


if __name__ == "__main__":
    sys.exit(main())
