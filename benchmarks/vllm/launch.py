"""Starts an engine's ranks, waits for them, and ends them: whatever happens, within a deadline, and with a reason."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.vllm.engine import Order
from benchmarks.vllm.plan import Outcome, Run, environment, said

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0
"""For processes to end by themselves, and again after SIGTERM."""
LOOK_S = 0.2
ENGINE = (sys.executable, "-m", "benchmarks.vllm.engine")


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


def measured(
    run: Run, sizes: Sizes, arguments: dict[str, object], folder: Path, command: Sequence[str] = ENGINE
) -> Outcome:
    """One engine, from its start to its end. `folder` gets each rank's log and result."""
    folder = folder.resolve()  # the ranks work elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    wait = timedelta(seconds=sizes.deadline_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]
    port, ranks, finished = _free_port(), [], False
    try:
        for rank in range(sizes.ranks):
            order = Order(
                arguments, run.backend.tier != "built in", rank, sizes.ranks, store.port, sizes.deadline_s, os.getpid(),
                sizes.decode, sizes.prefill, sizes.runs, sizes.tokens, str(folder / f"rank-{rank}.json"),
            )  # fmt: skip
            ranks.append(_started(order, environment(run, rank, sizes.ranks, port), folder, command))
        outcome = _outcome(ranks, sizes.deadline_s, run.backend.manager)
        finished = bool(outcome.results)
        return outcome
    finally:
        stop([rank.process for rank in ranks], patient=finished)


def _started(order: Order, told: dict[str, str], folder: Path, command: Sequence[str]) -> Rank:
    log, result = folder / f"rank-{order.rank}.log", Path(order.result)
    result.unlink(missing_ok=True)
    words = ["env", *(f"{name}={value}" for name, value in told.items()), *command, order.text()]
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
    return Rank(process, log, result)


def _outcome(ranks: Sequence[Rank], deadline_s: float, manager: str) -> Outcome:
    """Wait for all results; the first rank that ends without one, or the deadline, is the fault."""
    deadline = time.monotonic() + deadline_s
    while not all(rank.result.exists() for rank in ranks):
        for number, rank in enumerate(ranks):
            code = rank.process.poll()
            if code is not None and not rank.result.exists():
                return Outcome(fault=f"rank {number} ended with {code}: {rank.said()}", rank=number)
        if time.monotonic() > deadline:
            late = [number for number, rank in enumerate(ranks) if not rank.result.exists()]
            last = ranks[late[0]].said()
            return Outcome(fault=f"ranks {late} gave nothing within {deadline_s:g} s: {last}", rank=late[0])
        time.sleep(LOOK_S)
    if not any(f"{manager} all2all manager" in rank.log.read_text(errors="replace") for rank in ranks):
        return Outcome(fault=f"something else was measured: no rank's log says that it uses {manager}")
    return Outcome([json.loads(rank.result.read_text(encoding="utf-8")) for rank in ranks])


def stop(processes: Sequence[subprocess.Popen[bytes]], *, patient: bool) -> None:
    """End them and all that they have started: by SIGTERM, by SIGKILL; by themselves before, where one is `patient`."""
    for number in (*((0,) if patient else ()), signal.SIGTERM, signal.SIGKILL):
        if not _signalled(processes, number):
            return
        end = time.monotonic() + GRACE_S
        while _signalled(processes, 0) and time.monotonic() < end:
            time.sleep(LOOK_S)


def _signalled(processes: Sequence[subprocess.Popen[bytes]], number: int) -> bool:
    """Send it to each one's group (0 sends nothing); whether any is left."""
    left = False
    for process in processes:
        process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            left = True
    return left


def _free_port() -> int:
    """vLLM's ranks meet at it, and at the ones after it."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])
