"""A real dispatch and combine: processes of this host, one for each rank, and what their times say.

Nothing of it stays: the ranks are processes of their own, told to end at the deadline, and their bootstrap is a file in
a temporary folder.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdock.common.words import counted
from crossdock.doctor.records import Finding, Level, fail, good, judge, warn

CPU_RANKS = 2
MOST_GPUS = 8
DEADLINE_S = 120.0
"""GPUs: kernels that are not in the wheel are compiled first."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a healthy host reaches at least.

    Attributes:
        pair_us: of one token, dispatch and combine together.
        share_of_links: of what a GPU's NVLinks carry on paper, in a dispatch of many tokens; 0 = not judged.
        gbps: bytes that leave a rank in that dispatch, where there are no links to compare with.
    """

    pair_us: float
    share_of_links: float
    gbps: float


EXPECTED = {"cpu": Expectation(20_000, 0.0, 0.02), "nvlink": Expectation(60, 0.45, 0.0)}
"""H200: 11 us, and 0.7 of the links. A machine with two cores: 0.3 ms."""


def run_trial(transport: str, num_ranks: int, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """The answers of the ranks, by rank; one that failed or was silent has "failed" instead of "steps"."""
    with tempfile.TemporaryDirectory(prefix="crossdock-doctor-") as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "crossdock.doctor.rank", transport]
        said = [(Path(folder) / f"rank-{rank}.out", Path(folder) / f"rank-{rank}.err") for rank in range(num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + deadline_s
        try:
            for rank, (out, errors) in enumerate(said):  # files: a rank that says much must not wait for a reader
                with out.open("wb") as to, errors.open("wb") as aside:
                    place = [str(rank), str(num_ranks), store]
                    processes.append(subprocess.Popen([*command, *place], stdout=to, stderr=aside))
            return [_answer(process, rank, deadline, *said[rank]) for rank, process in enumerate(processes)]
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
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return {"rank": rank, **answer}
    words = errors.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
    return {"rank": rank, "failed": words[0]}


def judge_trial(
    transport: str, answers: Sequence[Mapping[str, Any]], links_gbps: float, expected: Expectation | None = None
) -> Iterator[Finding]:
    """What the answers of the ranks say.

    Args:
        transport: "cpu" or "nvlink".
        answers: of `run_trial`.
        links_gbps: gigabytes per second that leave a GPU by its NVLinks on paper; 0 = unknown.
        expected: what is enough; by default what EXPECTED says.
    """
    expected = expected or EXPECTED[transport]
    broken = [answer for answer in answers if "failed" in answer]
    if broken:
        words = "; ".join(f"rank {answer['rank']}: {answer['failed']}" for answer in broken[:3])
        cure = "findings above may say why; of ranks that wait for each other, look at the one they name"
        yield fail(f"{transport}-pass", words, "a group of this transport would not serve here", cure)
        return
    wrong = [answer["rank"] for answer in answers if any(step["wrong"] for step in answer["steps"].values())]
    cause = "rows came back changed: do not serve on this host"
    cure = (
        "findings above (ecc, peer-access) may say why; please report it with the output of `crossdock doctor --json`"
    )
    words = f"{counted(len(answers), 'rank')}, every token came back as it was sent"
    yield judge(f"{transport}-pass", not wrong, f"wrong answers on ranks {wrong}" if wrong else words, cause, cure)
    yield from _handles(answers)
    pair_us = _took_us(answers, "latency")
    what = f"one token: {pair_us:.0f} us for dispatch and combine (expected at most {expected.pair_us:.0f})"
    cure = "run this on an idle host; fewer ranks than cores; check clocks and CPU limits"
    yield judge(
        f"{transport}-latency", pair_us <= expected.pair_us, what, "every step would be slow", cure, level=Level.WARN
    )
    yield _bandwidth(transport, answers, links_gbps, expected)


def _took_us(answers: Sequence[Mapping[str, Any]], step: str) -> float:
    """Of the rank that came last in each round: the others' times hold their wait for it. The median of all rounds."""
    rounds = zip(*(answer["steps"][step]["took_us"] for answer in answers), strict=True)
    return float(statistics.median(min(times) for times in rounds))


def _bandwidth(
    transport: str, answers: Sequence[Mapping[str, Any]], links_gbps: float, expected: Expectation
) -> Finding:
    took_us = _took_us(answers, "bandwidth")
    rates = [answer["steps"]["bandwidth"]["remote_bytes"] / took_us / 1e3 for answer in answers]
    least = expected.share_of_links * links_gbps or expected.gbps
    slowest = min(range(len(rates)), key=rates.__getitem__)
    paper = f", {links_gbps:.0f} on paper" if links_gbps else ""
    rate = f"many tokens: {rates[slowest]:.2f} GB/s leave rank {slowest} in dispatch"
    what = f"{rate} (expected at least {least:.2f}{paper})"
    cure = "run this on an idle host; `nvidia-smi nvlink -s -e` for links in error; check clocks"
    if rates[slowest] < least:
        return warn(f"{transport}-bandwidth", what, "a link or a rank is slower than it should be", cure)
    return good(f"{transport}-bandwidth", what)


def _handles(answers: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    kinds = {answer["handles"]["kind"] for answer in answers if "handles" in answer}
    if kinds:
        refused = next(answer["handles"]["refused"] for answer in answers if "handles" in answer)
        why = "; ".join(f"not {kind}: {reason}" for kind, reason in refused.items())
        yield good("memory-handles", ", ".join(sorted(kinds)) + (f" ({why})" if why else ""))
