"""Record what heartbeats say under each fault, and what the control plane makes of it.

    python -m tests.observability.record --out FILE.jsonl [--ranks 4] [--hosts 2] [--only NAME...] [--rounds N]

A line for each look: fault, rank, the figures of all ranks, the verdict that was shown.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from crossdock.control.latency.latency_watch import INTERVAL_S, JUDGE_EVERY_S
from crossdock.demo.hosts import become
from crossdock.protocol.v1 import control_pb2 as pb
from tests.observability.faults import FAULTS
from tests.observability.group import Group, group

SETTLE_S = INTERVAL_S + JUDGE_EVERY_S + 2


def look(view: pb.GroupView) -> dict[str, Any]:
    """The figures and the verdict of a view, as plain JSON types."""
    ranks = {
        str(member.rank): {
            **MessageToDict(member.stats.latency, preserving_proto_field_name=True),
            "host": member.network.domain or member.hostname,
        }
        for member in view.members
    }
    return {"verdict": MessageToDict(view.verdict, preserving_proto_field_name=True), "ranks": ranks}


def record(where: Group, fault: str, rank: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Inject a fault; a judgement each JUDGE_EVERY_S, once an interval has passed."""
    with FAULTS[fault](where, rank):
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(JUDGE_EVERY_S)
            if passed + JUDGE_EVERY_S >= SETTLE_S:
                yield {"fault": fault, "rank": rank, "at_s": round(passed, 1), **look(where.view())}


def main() -> None:
    """Run the faults in random order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SETTLE_S + 2 * JUDGE_EVERY_S)
    parser.add_argument("--only", nargs="*", default=list(FAULTS))
    parser.add_argument("--in-namespace", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        group(Path(folder), options.ranks, options.hosts) as where,
        options.out.open("a") as out,
    ):
        for fault in [one for _ in range(options.rounds) for one in random.sample(options.only, len(options.only))]:
            for line in record(where, fault, random.randrange(options.ranks), options.seconds):
                out.write(json.dumps(line | {"num_ranks": options.ranks, "num_hosts": options.hosts}) + "\n")
                out.flush()
                print(fault, line["rank"], line["verdict"].get("text"), flush=True)
        print("asked", where.load.asked, "failed", where.load.failed)


if __name__ == "__main__":
    if "--hosts" in sys.argv and "--in-namespace" not in sys.argv:
        sys.exit(become([*sys.argv[1:], "--in-namespace"], "tests.observability.record"))
    main()
