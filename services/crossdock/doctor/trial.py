"""A real dispatch and combine: processes of this host, one for each rank, or of two hosts, and what their times say.

Nothing of it stays: the ranks are processes of their own, stopped at the deadline, and their bootstrap is a file in
a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crossdock.common.plural import counted
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.common.transports import Expected, installed
from crossdock.doctor.findings import Finding, Level, fail, judge, ok, warn

CPU_RANKS = 2
HOSTS = 2
"""Number of hosts of a trial between hosts, with a rank on each."""
MOST_GPUS = 8
STEP_NAMES = {"latency", "bandwidth"}
"""Of `rank.STEPS`."""
PING_DEADLINE_S = 60.0
DEADLINE_S = 120.0
"""GPUs: kernels that are not in the wheel are compiled first."""


def run_trial(transport: str, num_ranks: int, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """The answers of the ranks, by rank; one that failed or was silent has "failed" instead of "steps"."""
    with tempfile.TemporaryDirectory(prefix="crossdock-doctor-") as folder:
        store = str(Path(folder) / "store")
        commands = [[transport, str(rank), str(num_ranks), store] for rank in range(num_ranks)]
        return _run(commands, Path(folder), deadline_s)


def run_between_hosts(
    transport: str, rank: int, meeting: str, network: WorkerNetworkConfig, wait_s: float
) -> list[dict[str, Any]]:
    """Run the trial with two ranks, one here and one on another host, where this is called too.

    Args:
        rank: 0 listens at `meeting`, 1 connects to it.
        meeting: host:port.
        network: of the rank here. It is a domain of its own, so rows take the network even on one host.
        wait_s: how long the other host may take to come.
    """
    own = json.dumps({**msgspec.to_builtins(network), "domain": f"doctor-{rank}"})
    command = [transport, str(rank), str(HOSTS), meeting, own, f"{wait_s}"]
    with tempfile.TemporaryDirectory(prefix="crossdock-doctor-") as folder:
        (answer,) = _run([command], Path(folder), wait_s + DEADLINE_S)
    answers: list[dict[str, Any]] = answer.get("answers", [{**answer, "rank": rank}])
    return answers


def run_ping(network: WorkerNetworkConfig) -> dict[str, Any]:
    """The loop-back ping of that network on this host: a `Ping` as a dict, or "failed"."""
    with tempfile.TemporaryDirectory(prefix="crossdock-doctor-") as folder:
        command = [json.dumps(msgspec.to_builtins(network))]
        return _run([command], Path(folder), PING_DEADLINE_S, "crossdock.doctor.ping")[0]


def judge_ping(answer: Mapping[str, Any]) -> Finding:
    """What the answer of `run_ping` says."""
    if "failed" in answer:
        cure = "the words name what refused; `crossdock doctor` above says what this host lacks for the provider"
        return fail("network-ping", answer["failed"], "a rank of this configuration could not reach any other", cure)
    what = (
        f"{answer['provider']} at {answer['address']}: {answer['num_bytes']} bytes through ring, proxy and provider in "
        f"{answer['median_us']:.1f} us (at most {answer['most_us']:.0f})"
    )
    return ok("network-ping", what)


def judge_boxes(answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the boxes of a GPU."""
    if "boxes" in answer:
        yield ok("network-boxes", answer["boxes"])
    if "no_boxes" in answer:
        cure = "worker.network.gpu_direct: auto takes the best way there is; the words say what refused the others"
        yield fail("network-boxes", answer["no_boxes"], "ranks of this configuration do not start", cure)


def _run(
    commands: Sequence[Sequence[str]], folder: Path, deadline_s: float, module: str = "crossdock.doctor.rank"
) -> list[dict[str, Any]]:
    """What each `python -m MODULE ARGUMENTS` answers; all are stopped at the deadline."""
    said = [(folder / f"rank-{number}.out", folder / f"rank-{number}.err") for number in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + deadline_s
    try:
        for command, (out, errors) in zip(commands, said, strict=True):
            with out.open("wb") as to, errors.open("wb") as aside:  # a rank that says much must not wait for a reader
                program = [sys.executable, "-P", "-m", module, *command]
                processes.append(subprocess.Popen(program, stdout=to, stderr=aside))
        return [_answer(process, number, deadline, *said[number]) for number, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _answer(process: subprocess.Popen[bytes], rank: int, deadline: float, out: Path, errors: Path) -> dict[str, Any]:
    try:
        process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"rank": rank, "failed": "no answer before the deadline"}
    for line in reversed(out.read_text(errors="replace").splitlines()):
        with contextlib.suppress(ValueError):  # half a line of a process that was killed, or another library's
            answer = json.loads(line)
            if isinstance(answer, dict):
                return {"rank": rank, **answer}
    words = errors.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
    return {"rank": rank, "failed": words[0]}


def judge_trial(
    transport: str,
    answers: Sequence[Mapping[str, Any]],
    links_gbps: float,
    expected: Expected | None = None,
    *,
    name: str = "",
) -> Iterator[Finding]:
    """What the answers of the ranks say.

    Args:
        transport: its name.
        name: of the checks; empty: the transport's.
        answers: of `run_trial`.
        links_gbps: gigabytes per second that leave a GPU by its NVLinks on paper; 0 = unknown.
        expected: what is enough; by default what the transport says of itself.
    """
    expected, name = expected or installed()[transport].expected, name or transport
    broken = [answer for answer in answers if "failed" in answer or not answer.get("steps", {}).keys() >= STEP_NAMES]
    if broken:
        other = "an answer without steps: is the doctor there of this version?"
        words = "; ".join(f"rank {answer.get('rank')}: {answer.get('failed', other)}" for answer in broken[:3])
        cure = "findings above may say why; of ranks that wait for each other, look at the one they name"
        yield fail(f"{name}-pass", words, "a group of this transport would not serve here", cure)
        return
    wrong = [answer["rank"] for answer in answers if any(step["wrong"] for step in answer["steps"].values())]
    cause = "rows came back changed: do not serve on this host"
    cure = (
        "findings above (ecc, peer-access) may say why; please report it with the output of `crossdock doctor --json`"
    )
    words = f"{counted(len(answers), 'rank')}, every token came back as it was sent"
    yield judge(f"{name}-pass", not wrong, f"wrong answers on ranks {wrong}" if wrong else words, cause, cure)
    yield from _handles(answers)
    pair_us = _took_us(answers, "latency")
    what = f"one token: {pair_us:.0f} us for dispatch and combine (expected at most {expected.pair_us:.0f})"
    cure = "run this on an idle host; fewer ranks than cores; check clocks and CPU limits"
    yield judge(
        f"{name}-latency", pair_us <= expected.pair_us, what, "every step would be slow", cure, level=Level.WARN
    )
    yield _bandwidth(name, answers, links_gbps, expected)


def _took_us(answers: Sequence[Mapping[str, Any]], step: str) -> float:
    """Median over rounds of the time of the rank that came last: the others' times hold their wait for it."""
    rounds = zip(*(answer["steps"][step]["took_us"] for answer in answers), strict=True)
    return float(statistics.median(min(times) for times in rounds))


def _bandwidth(name: str, answers: Sequence[Mapping[str, Any]], links_gbps: float, expected: Expected) -> Finding:
    took_us = _took_us(answers, "bandwidth")
    rates = [answer["steps"]["bandwidth"]["remote_bytes"] / took_us / 1e3 for answer in answers]
    least = expected.share_of_links * links_gbps or expected.gbps
    slowest = min(range(len(rates)), key=rates.__getitem__)
    paper = f", {links_gbps:.0f} on paper" if links_gbps else ""
    rate = f"many tokens: {rates[slowest]:.2f} GB/s leave rank {slowest} in dispatch"
    what = f"{rate} (expected at least {least:.2f}{paper})"
    cure = "run this on an idle host; `nvidia-smi nvlink -s -e` for links in error; check clocks"
    if rates[slowest] < least:
        return warn(f"{name}-bandwidth", what, "a link or a rank is slower than it should be", cure)
    return ok(f"{name}-bandwidth", what)


def _handles(answers: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    kinds = {answer["handles"]["kind"] for answer in answers if "handles" in answer}
    if kinds:
        refused = next(answer["handles"]["refused"] for answer in answers if "handles" in answer)
        why = "; ".join(f"not {kind}: {reason}" for kind, reason in refused.items())
        yield ok("memory-handles", ", ".join(sorted(kinds)) + (f" ({why})" if why else ""))
    if ways := {answer["gpu_direct"] for answer in answers if "gpu_direct" in answer}:
        yield ok("gpu-direct-memory", f"NICs would reach GPU memory {' | '.join(sorted(ways))}")
