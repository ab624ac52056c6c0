"""Grow and shrink a group while clients ask it and its workers are killed; no answer may be wrong, none may fail.

    python -m tests.elastic [--seconds N] [--seed N] [--follow]        (make test-elastic)

Six workers on the `cpu` transport, of a group of three to six. First without kills, 4 to 6 to 3 to 4 and so on: the
pause of each switch is the longest gap between answers around it, and must stay below PAUSE_S. Then a storm: other
sizes at random, and kill -9 of a worker at any moment. Each eighth answer must have the bits of one layout that the
control plane has named (oracle.py); none may fail. With --follow the group follows its workers instead, and each of
the six is stopped in order (SIGTERM) and started again. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from crossdock.cli.top import fetch
from crossdock.client import Client
from crossdock.common.call_errors import CallError
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.common.control_channel import ask_leader
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import SERVING, ExpertsRequest, GroupView, ScaleRequest
from tests.elastic.oracle import LAYER, E, Layout, Model, Question

LEAST, MOST, FIRST = 3, 6, 4
PAUSE_S, CALL_S, SETTLE_S = 1.0, 5.0, 120.0
NUM_CLIENTS, NUM_QUESTIONS = 2, 16


@dataclass
class Seen:
    """What clients saw: when answers came, what was wrong, and answers whose layout is not known yet."""

    at: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    open: list[tuple[Question, torch.Tensor]] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)


class Storm:
    """A group, its clients, and who is told of each layout.

    Args:
        folder: for the model and the logs.
        seed: of sizes and kills.
        follow: the group follows its workers.
    """

    def __init__(self, folder: Path, seed: int, *, follow: bool = False) -> None:
        self.model, self.seen, self.random = Model.write(folder / "model"), Seen(), random.Random(seed)
        self.layouts: dict[Layout, int] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        control = ControlConfig(
            listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=MOST if follow else FIRST, min_workers=LEAST,
            max_workers=MOST, lease_s=3.0, follow_workers=follow,
        )  # fmt: skip
        workers = [
            WorkerConfig(
                model=str(folder / "model"), local_rank=rank, uid=f"w/{rank}", max_tokens_per_step=64, torch_threads=1
            )
            for rank in range(MOST)
        ]
        self.group = Supervisor(control, workers, folder / "logs")
        self.threads = [threading.Thread(target=self._ask, args=(turn,), daemon=True) for turn in range(NUM_CLIENTS)]

    def view(self) -> GroupView:
        """The group as it is now."""
        return fetch(self.group.control_address, CALL_S, None)

    def scale(self, size: int) -> None:
        """Have so many workers. Refused while the group forms for the first time."""
        ask_leader(self.group.control_address, None, "Scale", ScaleRequest(workers=size), CALL_S)

    def settle(self) -> GroupView:
        """Wait until it serves with as many as are wanted, and its layout is known."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            view = self.view()
            self._learn()
            if view.state == SERVING and view.world_size == view.wanted.workers and self._settled:
                self.seen.sizes.add(view.world_size)
                return view
            if time.monotonic() > deadline:
                raise TimeoutError(f"not settled within {SETTLE_S:g} s: {view}")
            time.sleep(0.02)

    def roll(self) -> list[float]:
        """Stop each worker in order, and wait until it is one of six again; the longest gap between answers."""
        for thread in self.threads:
            thread.start()
        pauses = []
        for pid in self.group.worker_pids():
            began, epoch = time.monotonic(), self.settle().epoch
            os.kill(pid, signal.SIGTERM)
            while (view := self.settle()).epoch < epoch + 2 or view.world_size < MOST:
                self.seen.sizes.add(view.world_size)
            pauses.append(self._longest_gap(began))
        self._end()
        return pauses

    def run(self, seconds: float) -> list[float]:
        """Switches without kills, then the storm; the pauses of the switches."""
        for thread in self.threads:
            thread.start()
        pauses = []
        for size in (6, 3, 4, 6, 3):
            self.settle()
            time.sleep(0.5)
            began = time.monotonic()
            self.scale(size)
            self.settle()
            time.sleep(0.5)
            pauses.append(self._longest_gap(began))
        ended = time.monotonic() + seconds
        while time.monotonic() < ended and not self.seen.wrong:
            with contextlib.suppress(CallError):  # the group forms
                self.scale(self.random.randint(LEAST, MOST))
            time.sleep(self.random.uniform(0.0, 2.0))
            if self.random.random() < 0.6:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(self.group.worker_pids()), signal.SIGKILL)
            time.sleep(self.random.uniform(0.0, 2.0))
            self._learn()
            if self.random.random() < 0.3:
                self.settle()
        self.settle()
        self._end()
        return pauses

    def _end(self) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join(SETTLE_S)
        self._judge(last=True)

    def _longest_gap(self, since: float) -> float:
        with self._lock:
            at = [since, *(moment for moment in self.seen.at if moment >= since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(at))

    def _learn(self) -> None:
        """Ask where the experts are."""
        self._settled = False
        with contextlib.suppress(CallError):
            found = ask_leader(self.group.control_address, None, "Experts", ExpertsRequest(), CALL_S)
            if found.version and found.layers:
                share, more = divmod(E, found.world_size)
                of_slot = [rank for rank in range(found.world_size) for _ in range(share + (rank < more))]
                layout = tuple(rank for _, rank in sorted(zip(found.layers[0].slots, of_slot, strict=True)))
                self.layouts.setdefault(layout, found.world_size)
                self._settled = True
        self._judge()

    def _judge(self, *, last: bool = False) -> None:
        """Compare answers with the layouts that are known; at last, every answer must have one."""
        with self._lock:
            waiting, self.seen.open = self.seen.open, []
        for question, answer in waiting:
            if not any(torch.equal(question.answer(layout), answer) for layout in self.layouts):
                if last:
                    self.seen.wrong.append("an answer has the bits of no layout")
                else:
                    with self._lock:
                        self.seen.open.append((question, answer))

    def _ask(self, turn: int) -> None:
        questions = [Question.random(self.model, 1 + 5 * number % 23) for number in range(NUM_QUESTIONS)]
        with Client(self.group.control_address, min_tokens_per_worker=64) as client:
            while not self._stop.is_set():
                turn += 1
                question = questions[turn % NUM_QUESTIONS]
                try:
                    y = client.forward(LAYER, question.x, question.ids, question.weights, timeout_s=SETTLE_S)
                except Exception as error:  # clients try again until their deadline: none of these may come
                    self.seen.wrong.append(f"{type(error).__name__}: {error}")
                    return
                with self._lock:
                    self.seen.at.append(time.monotonic())
                    if turn % 8 == 0:
                        self.seen.open.append((question, y))


def read_from(folder: Path, source: str) -> int:
    """Bytes of experts that workers have read from there, as their logs say."""
    logs = "".join(path.read_text() for path in (folder / "logs").glob("worker-*.log"))
    return sum(map(int, re.findall(rf"experts read .*?\b{source}_bytes=(\d+)", logs)))


def main() -> int:
    """Run and print; the exit status."""
    parser = argparse.ArgumentParser(description="Grow and shrink a group under load and kills.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the storm")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of sizes and kills")
    parser.add_argument("--follow", action="store_true", help="the group follows its workers, which are restarted")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crossdock-elastic-"))
    print(f"seed {arguments.seed}; logs in {folder}", flush=True)
    storm = Storm(folder, arguments.seed, follow=arguments.follow)
    with storm.group:
        storm.group.wait_serving(SETTLE_S)
        pauses = storm.roll() if arguments.follow else storm.run(arguments.seconds)
    seen, answers = storm.seen, len(storm.seen.at)
    some = Question.random(storm.model, 16)
    told_apart = len({some.answer(layout).numpy().tobytes() for layout in storm.layouts})
    print(f"{answers} answers, {len(seen.wrong)} wrong or failed {seen.wrong[:3]}; sizes {sorted(seen.sizes)}")
    waits = ", ".join(f"{pause:.2f}" for pause in sorted(pauses))
    print(f"{len(storm.layouts)} layouts, {told_apart} of them with bits of their own; pauses of switches, s: {waits}")
    print(
        f"bytes of experts read: {read_from(folder, 'peer')} from other workers, {read_from(folder, 'disk')} from disk"
    )
    slow = max(pauses) > PAUSE_S
    return 1 if seen.wrong or slow or told_apart < len(storm.layouts) or not answers else 0


if __name__ == "__main__":
    sys.exit(main())
