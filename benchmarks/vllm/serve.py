"""vLLM's servers, all at once, and its load generator on one after the other. See `serving.py`."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm import serving
from benchmarks.vllm.launch import POLL_S, PROGRAM, free_ports, started, stop
from benchmarks.vllm.plan import Run, said

SERVER, CLIENT = (*PROGRAM, "benchmarks.vllm.child", "serve"), (*PROGRAM, "benchmarks.vllm.child", "load")


@dataclass
class Server:
    """One that was started.

    Attributes:
        fault: why it gives nothing, or "".
    """

    run: Run
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    fault: str = ""

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def look(self) -> None:
        """A process that has ended is a fault."""
        if not self.fault and self.process.poll() is not None:
            self.fault = f"the server ended with {self.process.returncode}: {said(self.text())}"

    def text(self) -> str:
        """Of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def servers(
    runs: Sequence[Run],
    model: str,
    ranks: int,
    logs: Path,
    deadline_s: float,
    command: Sequence[str] = SERVER,
    at_once: int = 1,
) -> Iterator[list[Server]]:
    """One for each run, each of them ready or with a fault; `at_once` start side by side, so that those behind find
    what the first compiled (fp8: DeepGEMM's kernels, minutes). All end with the block."""
    logs = logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    ports, found = free_ports(), list[Server]()
    try:
        for number, run in enumerate(runs, 1):
            port, log = next(ports), logs / f"{run.name}.log"
            words = [*command, str(os.getpid()), *serving.server_arguments(run, model, ranks, port)]
            told = {"CROSSDOCK_VLLM": run.backend.plugin}
            found.append(Server(run, f"http://127.0.0.1:{port}", log, started(words, told, log)))
            if number % at_once == 0 or number == len(runs):
                _wait(found, deadline_s)
        yield found
    finally:
        stop([server.process for server in found], patient=False)


def _wait(found: Sequence[Server], deadline_s: float) -> None:
    """Until each is ready, has ended, or is late."""
    deadline = time.monotonic() + deadline_s
    for server in found:
        while not server.fault and not server.answers():
            server.look()
            if time.monotonic() > deadline:
                server.fault = f"not ready within {deadline_s:g} s: {said(server.text())}"
            time.sleep(POLL_S)
    for server in found:
        server.fault = server.fault or server.run.unsaid([server.text()])


def results(
    jobs: Sequence[tuple[str, Sequence[str]]], log: Path, out: Path, deadline_s: float, command: Sequence[str] = CLIENT
) -> Generator[Mapping[str, Any], None, None]:
    """Of each job (its name, arguments of `vllm bench serve`), in order, as soon as it is there. A job that takes
    longer than `deadline_s`, or whose generator ends, gives {"fault": ...}, and so do all behind it."""
    out.unlink(missing_ok=True)
    order = json.dumps({"out": str(out), "jobs": [list(arguments) for _, arguments in jobs]})
    process = started([*command, str(os.getpid()), order], {}, log)
    fault = ""
    try:
        for number, (name, _) in enumerate(jobs):
            deadline = time.monotonic() + deadline_s
            while not fault and len(lines := _lines(out)) <= number:
                if time.monotonic() > deadline:
                    fault = f"{name} gave nothing within {deadline_s:g} s"
                elif process.poll() is not None and len(_lines(out)) <= number:
                    fault = f"the load generator ended with {process.returncode}: {said(log.read_text())}"
                else:
                    time.sleep(POLL_S)
            yield {"fault": fault} if fault else json.loads(lines[number])
    finally:
        stop([process], patient=not fault)


def _lines(path: Path) -> list[str]:
    """The whole ones."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
