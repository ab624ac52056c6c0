"""Attack a real group with default settings, plain and with mTLS, and judge what came of it.

    python -m tests.attack [--short] [--scene plain|mtls] [--only NAME] [--out DIR]        (make attack)

Real processes on loopback: a control plane and three workers under a supervisor, a well-behaved client that compares
every answer, and one attacker at a time, from another address. Prints a line per attack: what was answered, the largest
growth of a process's memory, the longest gap between right answers, and the longest time in which a new client got its
first answer. Exit status 1 if a limit below was broken:

    growth of any process     96 MiB, at its peak: twice a client's account (2 x 16 MiB), for each of its 64 gRPC
                              streams a request in hand (here 0.6 MiB), freed memory that is kept (16 MiB)
    gap in right answers      1 s; a kill may take as long as a group needs to form anew
    a new client's answer     5 s
    wrong answers             0
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import facts
from crossdock.common import rpc
from crossdock.protocol.v1 import expert_pb2_grpc
from tests.attack.attacks import ATTACKS, Attack
from tests.attack.connections import request_connections
from tests.attack.hoards import hoards
from tests.attack.rogue import tickets
from tests.attack.scene import NUM_WORKERS, Meter, Scene
from tests.attack.witness import Witness
from tests.services.cluster import Batch

GROWTH_MIB, GAP_S, KILL_GAP_S, NEW_S = 96.0, 1.0, 30.0, 5.0
_SETTLE_S = 0.2
_WARM_TOKENS, _WARM_REQUESTS, _WARM_S = 2000, 10, 60.0
_NICE = 10
"""Attackers yield the processor: they stand for other machines, which have their own."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one attack.

    Attributes:
        scene: "plain" or "mtls".
        attack: its name.
        answered: in words.
        growth_mib: peak memory above that before, of the process that grew most; processes that were there all along.
        kept_mib: the same, some time after the attacker let go.
        gap_s: longest time without a right answer.
        new_s: longest time that a new client needed.
        wrong: wrong answers.
        seconds: how long it took.
        trouble: the limits that were broken; "": none.
    """

    scene: str
    attack: str
    answered: str
    growth_mib: float
    kept_mib: float
    gap_s: float
    new_s: float
    wrong: int
    seconds: float
    trouble: str


EVERYTHING = ATTACKS | {
    "request connections": Attack(request_connections, short=True),
    "shared memory": Attack(hoards, short=True),
    "false tickets": Attack(tickets, kills=True, mtls=False, short=True),
}


def measure(scene: Scene, witness: Witness, name: str, attack: Attack) -> Row:
    """Do it, and look."""
    scene.reset_peaks()
    before, begun = scene.meters(), time.monotonic()
    trouble = []
    try:
        with yielding():
            answered = attack.run(scene)
    except AssertionError as error:
        answered = f"not as it must be: {error}"[:300]
        trouble.append("answer")
    peaks = scene.meters()
    if not scene.calm():
        trouble.append("the group does not serve")
    witness.wait_for("new", time.monotonic() - 1.0, 30.0)
    time.sleep(_SETTLE_S)
    end = time.monotonic()
    gap_s = witness.longest_gap_s(begun, end)
    new = witness.between(begun, end, "new", "shut")
    new_s = max((event.took_s for event in new if event.kind == "new"), default=0.0)
    shut = [event for event in new if event.kind == "shut"]
    wrong = len(witness.between(begun, end, "wrong"))
    growth = largest(before, peaks, peak=True)
    if growth > GROWTH_MIB:
        trouble.append("memory")
    if gap_s > (KILL_GAP_S if attack.kills else GAP_S):
        trouble.append("gap")
    if not attack.kills and (shut or new_s > NEW_S):
        trouble.append(f"new clients{': ' + shut[0].words[:80] if shut else ''}")
    if wrong:
        trouble.append("wrong answers")
    return Row(
        scene=scene.name,
        attack=name,
        answered=answered,
        growth_mib=round(growth, 1),
        kept_mib=round(largest(before, scene.meters(), peak=False), 1),
        gap_s=round(gap_s, 2),
        new_s=round(new_s, 2),
        wrong=wrong,
        seconds=round(end - begun, 1),
        trouble=", ".join(trouble),
    )


def warm(scene: Scene) -> None:
    """Large requests of a good client to every worker: what they load on first use, 8 MiB, is nobody's attack."""
    batch = Batch.random(_WARM_TOKENS)
    for rank in range(NUM_WORKERS):
        channel = rpc.channel(scene.worker(rank), security=scene.security(), name="localhost" if scene.guarded else "")
        with channel:
            messages = iter([batch.message(number) for number in range(_WARM_REQUESTS)])
            answers = list(expert_pb2_grpc.ExpertServiceStub(channel).Forward(messages, timeout=_WARM_S))
        assert len(answers) == _WARM_REQUESTS, answers
        assert not any(answer.HasField("error") for answer in answers), answers


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """Lower the priority of this thread, and of those it starts; only root may raise it again."""
    if os.geteuid() != 0:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the supervisor's words of each death."""
    ours = logging.getLogger("crossdock")
    before = ours.level
    ours.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ours.setLevel(before)


def largest(before: dict[int, Meter], after: dict[int, Meter], *, peak: bool) -> float:
    """By how much the process that grew most did; one that was not there before has no growth."""
    return max(
        (
            (meter.peak_mib if peak else meter.rss_mib) - before[pid].rss_mib
            for pid, meter in after.items()
            if pid in before
        ),
        default=0.0,
    )


def run(kinds: Sequence[str], chosen: dict[str, Attack], console: Console) -> list[Row]:
    """Every chosen attack on every kind of scene."""
    rows = []
    for kind in kinds:
        guarded = kind == "mtls"
        fitting = {name: attack for name, attack in chosen.items() if (attack.mtls if guarded else attack.plain)}
        with tempfile.TemporaryDirectory(prefix="crossdock-attack-") as folder:
            scene = Scene(Path(folder), guarded=guarded)
            with scene, Witness(scene.target, scene.witness_file, [Path(folder) / "model"]) as witness:
                warm(scene)
                for name, attack in fitting.items():
                    rows.append(measure(scene, witness, name, attack))
                    row = rows[-1]
                    verdict = f"[red]{row.trouble}[/]" if row.trouble else "[green]ok[/]"
                    console.print(
                        f"{kind:5} {name:20} {row.seconds:5.1f} s  {verdict}  {row.answered}", highlight=False
                    )
    return rows


def show(rows: Sequence[Row]) -> Table:
    """The table."""
    table = Table(title="Attacks", title_justify="left")
    for column in ("scene", "attack", "answered"):
        table.add_column(column, overflow="fold")
    for column in ("growth MiB", "kept MiB", "gap s", "new client s", "wrong"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in rows:
        figures = (
            f"{row.growth_mib:.0f}",
            f"{row.kept_mib:.0f}",
            f"{row.gap_s:.2f}",
            f"{row.new_s:.2f}",
            str(row.wrong),
        )
        table.add_row(row.scene, row.attack, row.answered, *figures, row.trouble or "ok")
    return table


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Attack a real group and judge it.")
    parser.add_argument("--short", action="store_true", help="the quick attacks only")
    parser.add_argument("--scene", choices=("plain", "mtls"), action="append", help="default: both")
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose name contains this")
    parser.add_argument("--out", type=Path, help="folder for attack.csv and run.json; none: print only")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    arguments = parse(words)
    chosen = {
        name: attack
        for name, attack in EVERYTHING.items()
        if (attack.short or not arguments.short)
        and (not arguments.only or any(part in name for part in arguments.only))
    }
    kinds = arguments.scene or ["plain", "mtls"]
    console = Console(width=None if sys.stdout.isatty() else 160)
    began = time.monotonic()
    with quiet():
        rows = run(kinds, chosen, console)
    console.print(show(rows))
    broken = [row for row in rows if row.trouble]
    console.print(
        f"{len(rows)} attacks in {time.monotonic() - began:.0f} s, {len(broken)} limits broken", highlight=False
    )
    if arguments.out:
        config: dict[str, object] = {"growth_mib": GROWTH_MIB, "gap_s": GAP_S, "nice": _NICE}
        facts.keep(arguments.out, "attack", Row, rows, facts.of_control(sys.argv[1:], config, "tests.attack"))
    return 1 if broken or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
