"""Does it say what is slow, and only then? A real Prometheus scrapes a real group under load.

    python -m tests.observability [--ranks 8] [--hosts 1] [--calm 180] [--out DIR]        (make test-observability)

First nothing is wrong for `--calm` seconds: no alert may fire, and its figures must agree with what the clients count.
Then faults are injected one after the other: the alert CrossdockSlow must fire within LIMIT_S with the right subject,
`crossdock status` and `crossdock top` must say the same, and it must end again. On one host a real OpenTelemetry
Collector receives spans of some requests, which exemplars in Prometheus must name; at the end a rank is killed. On two,
which are network namespaces, the line between them is throttled. Exit status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import facts
from crossdock.common.config import DEFAULT_GROUP
from crossdock.common.http import serve_http
from crossdock.common.settings import TracingConfig
from crossdock.demo.hosts import become
from crossdock.host.pages import HostMetricsPage
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import SERVING
from tests.observability import picture
from tests.observability.collector import collector
from tests.observability.faults import FAULTS
from tests.observability.group import E, Group, group
from tests.observability.prometheus import Prometheus, prometheus
from tests.observability.score import KINDS
from tests.services.otlp import spans_of

LIMIT_S, END_S, FORM_S, SPANS_S = 120.0, 90.0, 60.0, 30.0
AGREES = 0.05
INJECTED = {1: ("stopped", "limited", "hot_expert", "skewed"), 2: ("throttled", "slow_host")}
"""By number of hosts."""
TRACED = 0.05
"""Share of the requests."""
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
    classic, native = (
        server.value(f"histogram_quantile(0.5, sum{by} (rate(crossdock_request_duration_seconds{at}[{window_s}s])))")
        for by, at in ((" by (le)", "_bucket"), ("", ""))
    )
    print(f"median of a request: {classic:.4f} s by buckets, {native:.4f} s by a native histogram", flush=True)
    if not abs(native / classic - 1) < AGREES:
        yield f"calm: median of a request {classic} s by buckets, {native} s by a native histogram"


def expected_of(fault: str, rank: int, hosts: Mapping[int, str]) -> tuple[tuple[str, str], list[int]]:
    """Kind and subject that the alert must name, and the ranks. `hosts`: names of the ranks' hosts."""
    if fault == "throttled":
        return (KINDS[fault], " - ".join(sorted(set(hosts.values())))), sorted(hosts)
    if fault == "slow_host":
        return (KINDS[fault], hosts[rank]), sorted(other for other in hosts if hosts[other] == hosts[rank])
    subject = f"expert {rank * E // len(hosts)}" if fault == "hot_expert" else f"rank {rank}"
    return (KINDS[fault], subject), [rank]


def hosts_of(where: Group) -> dict[int, str]:
    """By rank, the name of its host; those of this machine's namespaces have its name, and their domain behind it."""
    return {one.rank: f"{one.hostname} ({one.network.domain})" for one in where.view().members}


def inject(where: Group, server: Prometheus, fault: str, rank: int) -> dict[str, Any]:
    """Inject a fault until the alert fires, and see that it ends. A line of the table, and when it was."""
    (expected, ranks), wrong = expected_of(fault, rank, hosts_of(where)), []
    began, begin_s = time.monotonic(), time.time()
    with FAULTS[fault](where, rank):
        while not (found := slow(server)) and time.monotonic() - began < LIMIT_S:
            time.sleep(1)
        fired_s = time.monotonic() - began
        if found != [expected]:
            wrong.append(f"alert: expected {expected}, got {found}")
        for command in ("status", "top"):
            verdict = said_by(command, where)
            if (verdict["kind"], verdict["ranks"]) != (expected[0], ranks):
                wrong.append(f"{command}: {verdict['text']}")
        end_s = time.time()
    ended = time.monotonic()
    while slow(server) and time.monotonic() - ended < END_S:
        time.sleep(1)
    if slow(server):
        wrong.append(f"still fires after {END_S:g} s")
    row = (fault, rank, round(fired_s, 1), round(time.monotonic() - ended, 1), " ".join(found[0]) if found else "")
    print(*row, *wrong, flush=True)
    drawn = {"name": fault, "rank": rank, "begin_s": begin_s, "end_s": end_s, "shown": True}
    return dict(zip(COLUMNS, (*row, "; ".join(wrong)), strict=True)) | {
        "drawn": drawn | {"fired_s": fired_s if found else None}
    }


def killed(where: Group, rank: int) -> dict[str, Any]:
    """A rank is killed; the group forms again. When that was."""
    begin_s = time.time()
    os.kill(where.ranks[rank], signal.SIGKILL)
    while time.time() - begin_s < FORM_S:
        time.sleep(1)
        if time.time() - begin_s > 3 and where.view().state == SERVING:
            break
    return {"name": "killed", "rank": rank, "begin_s": begin_s, "end_s": time.time(), "shown": False, "fired_s": None}


def traces(server: Prometheus, path: Path) -> Iterator[str]:
    """What is wrong with the spans that the collector has received, and with the exemplars that name them."""
    query, now_s = "crossdock_request_duration_seconds", time.time()  # exemplars belong to the native histogram
    found = server.get("query_exemplars", query=query, start=str(now_s - 3600), end=str(now_s))
    named = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
    while True:  # spans leave a worker by the batch, after the exemplar that names them
        spans = spans_of(path)
        roots = {one.trace_id for one in spans if not one.parent}
        if named <= roots or time.time() - now_s > SPANS_S:
            break
        time.sleep(1)
    names = Counter(one.name for one in spans)
    print(f"collector: {len(roots)} traces, {dict(names)}; {len(named)} named by exemplars", flush=True)
    if not roots or not named <= roots:
        yield f"traces: {len(roots)} traces received, exemplars of others: {sorted(named - roots)[:3]}"
    if not named:
        yield "traces: no exemplar in Prometheus"
    if min(names[part] for part in ("admit", "queue", "step", "dispatch", "experts", "combine")) < 0.9 * len(roots):
        yield f"traces: parts are missing: {dict(names)}"


@contextmanager
def host_page(supervisor: Supervisor) -> Iterator[str]:
    """The page of a host, as `crossdock up` serves it: where."""
    names = [child.name for child in supervisor.children]
    page = HostMetricsPage(supervisor.metrics, names, supervisor.addresses, None, DEFAULT_GROUP)
    made = serve_http("127.0.0.1:0", page, lambda: (True, "ok"))
    try:
        yield made.address
    finally:
        made.close()


def run(options: argparse.Namespace, stack: ExitStack) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of the table, and what is wrong."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tracing, spans = None, folder / "none"
    if options.hosts == 1 and options.traces:
        address, spans = stack.enter_context(collector(folder / "collector"))
        tracing = TracingConfig(endpoint=f"http://{address}", ratio=TRACED)
    where = stack.enter_context(group(folder / "group", options.ranks, options.hosts, tracing))
    targets = [stack.enter_context(host_page(supervisor)) for supervisor in where.supervisors]
    server = stack.enter_context(prometheus(folder / "prometheus", targets))
    begin_s = time.time()
    wrong = list(calm(where, server, options.calm))
    rows = [inject(where, server, fault, random.randrange(options.ranks)) for fault in options.only]
    drawn = [row.pop("drawn") for row in rows]
    if options.hosts == 1:
        wrong += traces(server, spans) if options.traces else []
        drawn.append(killed(where, random.randrange(options.ranks)))
        time.sleep(15)
        if options.out:
            answers = picture.ask(server, begin_s, time.time(), drawn)
            picture.keep(answers, options.out / "answers.json.gz")
            picture.draw(answers, options.out / "dashboard.png")
    return rows, wrong


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, choices=list(INJECTED), default=1)
    parser.add_argument("--calm", type=float, default=180.0)
    parser.add_argument("--only", nargs="*", help="faults, instead of all")
    parser.add_argument("--traces", action=argparse.BooleanOptionalAction, default=True, help="with the collector")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--in-namespace", action="store_true")
    options = parser.parse_args()
    if options.hosts > 1 and not options.in_namespace:
        sys.exit(become([*sys.argv[1:], "--in-namespace"], "tests.observability"))
    options.only = options.only or INJECTED[options.hosts]
    with ExitStack() as stack:
        rows, wrong = run(options, stack)
    wrong += [f"{row['fault']}: {row['wrong']}" for row in rows if row["wrong"]]
    if options.out:
        facts.write_table(options.out, "alerts", COLUMNS, rows)
        config = {"ranks": options.ranks, "hosts": options.hosts, "calm_s": options.calm, "wrong": wrong}
        facts.write(options.out, facts.of_this_run(config, module="tests.observability"))
    print(*wrong or ["all as it should be"], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
