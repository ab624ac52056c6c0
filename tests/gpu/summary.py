"""What `tests.gpu.everything` leaves behind: tests.txt (counts, durations, what was skipped and why, the machine) and
tests-log.txt (what pytest printed)."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SUMMARY, LOG = "tests.txt", "tests-log.txt"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
SLOWEST = 15
GOT_THROUGH = (0, 1, 5)
"""Exit status of pytest: all passed, some failed, no test was chosen."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Facts:
    """The machine and the code.

    Attributes:
        gpu: name of the first device.
        arch: sm_90a, ...
        lines: for a reader.
    """

    gpu: str
    arch: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        module: its file, as a dotted name.
        name: with its parameters.
        result: PASSED, FAILED or SKIPPED.
        seconds: it took.
        why: first line of the failure, or the reason of the skip.
    """

    module: str
    name: str
    result: str
    seconds: float
    why: str = ""


def environment(num_gpus: int, commit: str | None) -> Facts:
    """Asks the driver's own tool, so that this process stays off the GPUs."""
    import torch

    from ep_kernels import jit

    query = "--query-gpu=name,driver_version,compute_cap,clocks.max.sm,memory.total"
    rows = said(["nvidia-smi", query, "--format=csv,noheader"]).splitlines() or ["unknown, unknown, 9.0, , "]
    name, driver, capability, clock, memory = (part.strip() for part in rows[0].split(","))
    lines = (
        f"date      {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}",
        f"commit    {commit or said(['git', 'describe', '--always', '--dirty', '--abbrev=40']) or 'unknown'}",
        f"GPUs      {num_gpus} x {name}, {memory}, at most {clock}",
        f"driver    {driver}",
        f"torch     {torch.__version__} (CUDA {torch.version.cuda}), NVRTC {jit.compiler_version()}",
        f"python    {platform.python_version()}, Linux {platform.release().partition('-')[0]}",
    )
    return Facts(name, f"sm_{capability.replace('.', '')}a", lines)


def said(command: Sequence[str]) -> str:
    """What a program prints; "" where it cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def outcomes(report: Path) -> list[Outcome] | None:
    """Of one JUnit file; None where pytest did not get as far as writing one."""
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    found: dict[tuple[str, str], Outcome] = {}
    for case in root.iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        result, why = PASSED, ""
        if not name:  # what was interrupted
            continue
        for child in case:
            if child.tag in ("failure", "error"):
                result, why = FAILED, first_line(child)
            elif child.tag == "skipped" and result == PASSED:
                result, why = SKIPPED, child.get("message", "")
        outcome = Outcome(module or name, name, result, float(case.get("time", 0)), why)
        known = found.get((module, name))
        if known is None or known.result != FAILED:
            found[module, name] = outcome
    return list(found.values())


def first_line(element: ElementTree.Element) -> str:
    """Of a failure; where a rank's traceback is the message, the last line of that says most."""
    message = (element.get("message") or "").strip()
    lines = [line for line in (element.text or "").splitlines() if line.startswith("E  ")]
    return f"{message.splitlines()[0] if message else '?'} ... {lines[-1][1:].strip() if lines else ''}"[:300]


def one_line(folder: Path, stage: str) -> str:
    """How a stage went."""
    found = outcomes(folder / f"{stage}.xml")
    if found is None:
        return f"{stage}: no report; see the log"
    return f"{stage}: {counts(found)}, {sum(o.seconds for o in found):.0f} s of tests"


def counts(found: Sequence[Outcome]) -> str:
    """3 passed, 1 skipped."""
    number = Counter(o.result for o in found)
    return ", ".join(f"{number[r]} {r}" for r in (PASSED, FAILED, SKIPPED) if number[r]) or "nothing ran"


def write(
    out: Path, folder: Path, statuses: Mapping[str, int], facts: Facts, notes: Sequence[str], took_s: float
) -> bool:
    """Both files; True when every stage ran to its end and nothing failed. `statuses`: exit status of each stage."""
    reports = {stage: outcomes(folder / f"{stage}.xml") for stage in statuses}
    everything = [o for found in reports.values() for o in found or ()]
    failed = [o for o in everything if o.result == FAILED]
    early = [stage for stage, status in statuses.items() if cut_short(folder, stage, reports[stage], status)]
    lines = [f"make test-gpu: {counts(everything)}, {took_s:.0f} s in all", "", *facts.lines, "", *notes, ""]
    for stage in early:
        last = folder / f"{stage}.now"
        where = f" in {last.read_text(encoding='utf-8')}" if last.exists() else ""
        lines.append(f"{stage}: {'ended early' if reports[stage] else 'broke off'}{where}, the rest was not run")
    lines += [f"FAILED {o.module}::{o.name}: {o.why}" for o in failed]
    lines += ["file", *by_file(everything), "", "skipped", *skips(everything), "", f"slowest {SLOWEST}"]
    slow = sorted(everything, key=lambda o: -o.seconds)[:SLOWEST]
    lines += [f"{o.seconds:7.1f} s  {o.module}::{o.name}" for o in slow]
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
    log = "\n".join(f"==== {stage}\n{text_of(folder / f'{stage}.log')}" for stage in statuses)
    (out / LOG).write_text(log, encoding="utf-8")
    return not failed and not early and any(o.result == PASSED for o in everything)


def cut_short(folder: Path, stage: str, found: Sequence[Outcome] | None, status: int) -> bool:
    """Whether a stage did not get to its end."""
    if found is None or status not in GOT_THROUGH:
        return True
    return "session-timeout" in text_of(folder / f"{stage}.log")


def text_of(log: Path) -> str:
    """A log without colours and without the names of this machine's folders."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)\n"
    text = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def by_file(found: Sequence[Outcome]) -> list[str]:
    """One line per file."""
    lines = []
    for module in sorted({o.module for o in found}):
        here = [o for o in found if o.module == module]
        lines.append(f"  {module:<48} {counts(here):<34} {sum(o.seconds for o in here):7.1f} s")
    return lines


def skips(found: Sequence[Outcome]) -> list[str]:
    """Each reason once, with its number of tests."""
    reasons = Counter(o.why for o in found if o.result == SKIPPED)
    return [f"  {number:4} x {why}" for why, number in reasons.most_common()] or ["  nothing"]
