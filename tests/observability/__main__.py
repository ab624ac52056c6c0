"""Does it say what is slow, and only then? A real Prometheus scrapes a real group under load.

    python -m tests.observability [--ranks 8] [--calm 180] [--out DIR]        (make test-observability)

First nothing is wrong for `--calm` seconds: no alert may fire, and its figures must agree with what the clients count.
Then faults are injected one after the other: the alert CrossdockSlow must fire within LIMIT_S with the right subject,
`crossdock status` and `crossdock top` must say the same, and it must end again. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import facts
from tests.observability.faults import FAULTS
from tests.observability.group import E, Group, group
from tests.observability.prometheus import Prometheus, prometheus
from tests.observability.score import KINDS

LIMIT_S, END_S = 120.0, 90.0
AGREES = 0.05
INJECTED = ("stopped", "limited", "hot_expert", "skewed")
COLUMNS = ("fault", "rank", "fired_s", "ended_s", "subject", "wrong")


def said_by(command: str, where: Group) -> dict[str, Any]:
    """The verdict in the JSON of a command."""
    words = [sys.executable, "-m", "crossdock", command, "--target", where.target, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    found: dict[str, Any] = json.loads(done.stdout)["verdict"]
    return found


def slow(server: Prometheus) -> list[tuple[str, str]]:
    """Kind and subject of each CrossdockSlow that fires."""
    return [(one["kind"], one["subject"]) for one in server.firing() if one["alertname"] == "CrossdockSlow"]


def calm(where: Group, server: Prometheus, seconds: float) -> Iterator[str]:
    """What is wrong while nothing is."""
    began, first, moment = time.monotonic(), where.load.answered_tokens, time.time()
    while time.monotonic() - began < seconds:
        time.sleep(1)
        if alerts := slow(server):
            yield f"calm: {alerts} after {time.monotonic() - began:.0f} s"
            return
    window_s = int(time.time() - moment)
    named = server.get("query", query=f"count_over_time(crossdock_verdict_lost_ratio[{window_s}s])")["result"]
    for one in named:  # for less than the alert's 30 s
        print(f"calm: named for {one['value'][1]} s: {one['metric']['kind']}, {one['metric']['subject']}", flush=True)
    counted = server.value(f"sum(increase(crossdock_tokens_total[{window_s}s]))")
    own = where.load.answered_tokens - first
    print(f"tokens in {window_s} s: {own} by the clients, {counted:.0f} by Prometheus", flush=True)
    if abs(counted / own - 1) > AGREES:
        yield f"calm: {own} tokens were answered, Prometheus says {counted:.0f}"


def subject_of(fault: str, rank: int, num_ranks: int) -> tuple[str, str]:
    """What the alert must name."""
    return KINDS[fault], f"expert {rank * E // num_ranks}" if fault == "hot_expert" else f"rank {rank}"


def inject(where: Group, server: Prometheus, fault: str, rank: int) -> dict[str, object]:
    """Inject a fault until the alert fires, and see that it ends."""
    expected, wrong, began = subject_of(fault, rank, len(where.ranks)), [], time.monotonic()
    with FAULTS[fault](where, rank):
        while not (found := slow(server)) and time.monotonic() - began < LIMIT_S:
            time.sleep(1)
        fired_s = time.monotonic() - began
        if found != [expected]:
            wrong.append(f"alert: expected {expected}, got {found}")
        for command in ("status", "top"):
            verdict = said_by(command, where)
            if (verdict["kind"], verdict["ranks"]) != (expected[0], [rank]):
                wrong.append(f"{command}: {verdict['text']}")
    ended = time.monotonic()
    while slow(server) and time.monotonic() - ended < END_S:
        time.sleep(1)
    if slow(server):
        wrong.append(f"still fires after {END_S:g} s")
    row = (fault, rank, round(fired_s, 1), round(time.monotonic() - ended, 1), " ".join(found[0]) if found else "")
    print(*row, *wrong, flush=True)
    return dict(zip(COLUMNS, (*row, "; ".join(wrong)), strict=True))


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calm", type=float, default=180.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        where = stack.enter_context(group(folder / "group", options.ranks))
        addresses = where.supervisors[0].addresses().values()
        server = stack.enter_context(prometheus(folder / "prometheus", [one.http_address for one in addresses]))
        wrong = list(calm(where, server, options.calm))
        rows = [inject(where, server, fault, random.randrange(options.ranks)) for fault in INJECTED]
    wrong += [f"{row['fault']}: {row['wrong']}" for row in rows if row["wrong"]]
    if options.out:
        facts.write_table(options.out, "alerts", COLUMNS, rows)
        config = {"ranks": options.ranks, "calm_s": options.calm, "wrong": wrong}
        facts.write(options.out, facts.of_this_run(config, module="tests.observability"))
    print(*wrong or ["all as it should be"], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
