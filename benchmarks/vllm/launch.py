"""Starts engines' ranks, waits for them, and ends them: whatever happens, within a deadline, and with a reason."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.vllm import Refused
from benchmarks.vllm.engine import TURN, Order, loaded
from benchmarks.vllm.plan import Outcome, Run, environment, said

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0
"""For processes to end by themselves, and again after SIGTERM."""
POLL_S = 0.2
PORTS, PORTS_EACH = range(20000, 32000), 16
"""Below those that the kernel gives to sockets that name none: an engine's ranks open hundreds of them."""
PROGRAM = (sys.executable, "-m")
ENGINE = (*PROGRAM, "benchmarks.vllm.engine")


@dataclass
class Rank:
    """A started rank; its files."""

    process: subprocess.Popen[bytes]
    log: Path
    result: Path

    def said(self) -> str:
        """See `plan.said`."""
        return said(self.log.read_text(encoding="utf-8", errors="replace"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every engine is asked for: see `Order`."""

    ranks: int
    decode: int
    prefill: int
    runs: int
    deadline_s: float
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """An engine that is to run.

    Attributes:
        model: its name, where several are compared.
        arguments: of vLLM's `LLM`.
        folder: gets each rank's log and result.
    """

    model: str
    run: Run
    arguments: dict[str, Any]
    folder: Path


class Engine:
    """An engine: its ranks load, wait for their turn, and work.

    Args:
        turn_s: after it has loaded, until its turn, at most.
        port: the first of some free ones, where vLLM's ranks meet.
    """

    def __init__(self, job: Job, sizes: Sizes, turn_s: float, port: int, command: Sequence[str]) -> None:
        self.job, self._sizes, self._turn_s, self._port, self._command = job, sizes, turn_s, port, command
        self._ranks: list[Rank] = []
        self._fault: Outcome | None = None
        self._finished = False
        wait = timedelta(seconds=sizes.deadline_s)
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]

    def start(self) -> None:
        """A process for each rank."""
        run, sizes = self.job.run, self._sizes
        folder = self.job.folder.resolve()  # the ranks work elsewhere
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(sizes.ranks):
            order = Order(
                self.job.arguments, run.backend.tier != "built in", rank, sizes.ranks, self._store.port,
                sizes.deadline_s, self._turn_s, os.getpid(), sizes.decode, sizes.prefill, sizes.runs, sizes.tokens,
                str(folder / f"rank-{rank}.json"),
                "" if sizes.tokens or run.eager else str(folder / f"traces-{rank}"),
            )  # fmt: skip
            told = environment(run, rank, sizes.ranks, self._port)
            self._ranks.append(_started(order, told, folder, self._command))

    def load(self) -> None:
        """Until all ranks have; where one cannot, or not in time, all end: engines beside them are timed."""
        self._fault = self._waited("had not loaded", lambda rank: self._store.check([loaded(rank)]))
        if self._fault:
            self.stop()

    def begin(self) -> None:
        """It is its turn."""
        self._store.set(TURN, b"")

    def outcome(self) -> Outcome:
        """Of its work; a fault of its loading comes out here."""
        fault = self._fault or self._waited("gave nothing", lambda _: False)
        if fault:
            return fault
        logs = [rank.log.read_text(errors="replace") for rank in self._ranks]
        if unsaid := self.job.run.unsaid(logs):
            return Outcome(fault=unsaid)
        self._finished = True
        return Outcome([json.loads(rank.result.read_text(encoding="utf-8")) for rank in self._ranks])

    def _waited(self, what: str, done: Callable[[int], bool]) -> Outcome | None:
        """None once all ranks are done, as one with a result is; else the first that ends before, or the deadline."""
        deadline = time.monotonic() + self._sizes.deadline_s

        def late() -> list[int]:
            return [number for number, rank in enumerate(self._ranks) if not (rank.result.exists() or done(number))]

        while late():
            for number, rank in enumerate(self._ranks):
                code = rank.process.poll()
                if code is not None and not rank.result.exists():
                    return Outcome(fault=f"rank {number} ended with {code}: {rank.said()}", rank=number)
            if time.monotonic() > deadline and (missing := late()):
                last = self._ranks[missing[0]].said()
                said = f"ranks {missing} {what} within {self._sizes.deadline_s:g} s: {last}"
                return Outcome(fault=said, rank=missing[0])
            time.sleep(POLL_S)
        return None

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Of its ranks; none once it was stopped."""
        return [rank.process for rank in self._ranks]

    def stop(self) -> None:
        """End its processes, once; those that have given their results may do so by themselves."""
        stop(self.processes, patient=self._finished)
        self._ranks = []


def outcomes(
    jobs: Iterable[Job], sizes: Sizes, at_once: int, command: Sequence[str] = ENGINE
) -> Generator[tuple[Job, Outcome], None, None]:
    """Each job's, in their order. `at_once` engines load side by side, and work when all of them have: all together if
    it is tokens that they give, one after the other if it is times. The next jobs are asked for after that."""
    jobs, ports = iter(jobs), free_ports()
    while batch := list(islice(jobs, at_once)):
        engines: list[Engine] = []
        try:
            for job in batch:
                # What comes before an engine's turn: others that load, then others that work.
                engines.append(Engine(job, sizes, 2 * len(batch) * sizes.deadline_s, next(ports), command))
                engines[-1].start()
            for engine in engines:
                engine.load()
            for turn in [engines] if sizes.tokens else [[engine] for engine in engines]:
                for engine in turn:
                    engine.begin()
                for engine in turn:
                    outcome = engine.outcome()
                    engine.stop()
                    yield engine.job, outcome
        finally:
            stop([process for engine in engines for process in engine.processes], patient=False)


def _started(order: Order, told: dict[str, str], folder: Path, command: Sequence[str]) -> Rank:
    log, result = folder / f"rank-{order.rank}.log", Path(order.result)
    result.unlink(missing_ok=True)
    return Rank(started([*command, order.text()], told, log), log, result)


def started(words: Sequence[str], told: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process of its own session, in the repository's root; `told`: its environment, beside what it inherits."""
    words = ["env", *(f"{name}={value}" for name, value in told.items()), *words]
    with log.open("wb") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )


def stop(processes: Sequence[subprocess.Popen[bytes]], *, patient: bool) -> None:
    """End them and all that they have started: by SIGTERM, by SIGKILL; by themselves before, where one is `patient`."""
    for number in (*((0,) if patient else ()), signal.SIGTERM, signal.SIGKILL):
        if not _signalled(processes, number):
            return
        end = time.monotonic() + GRACE_S
        while _signalled(processes, 0) and time.monotonic() < end:
            time.sleep(POLL_S)


def _signalled(processes: Sequence[subprocess.Popen[bytes]], number: int) -> bool:
    """Send it to each one's group (0 sends nothing); whether any is left."""
    left = False
    for process in processes:
        process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            left = True
    return left


def free_ports() -> Iterator[int]:
    """The first of PORTS_EACH free ports, other ones each time: an engine binds its port much later."""
    firsts = list(range(PORTS.start, PORTS.stop, PORTS_EACH))
    random.shuffle(firsts)
    for first in firsts:
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + PORTS_EACH):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            held.close()
            yield first
    raise Refused(f"expected {PORTS_EACH} free ports in a row among {PORTS.start} to {PORTS.stop}, found no more")
