"""What one collective costs the host, on one GPU: the other ranks are fakes whose regions are this rank's own.

    python -m benchmarks.gpu.host_cost [--ranks 8] [--out DIR]

Kernels are launched and return at once (the rank is stopped on the device); copy engines copy, and what they wait for
is there. So a call makes every driver call that it makes among real peers, and waits for none. `plan`: a call like an
earlier one. `long`: the first of its kind, every time. A call is begun and waited for, in place where it can be.
`zero_` is a kernel of torch's, before and after: what a launch costs this host.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import facts
from benchmarks.parts import Parts
from ep_kernels.collectives import CollectiveConfig, Collectives, collectives
from ep_kernels.groups import PaperGroup
from ep_kernels.telemetry import quantile
from ep_kernels.transports.nvlink.collectives import NvlinkCollectives
from ep_kernels.transports.nvlink.memory.domain import PeerWatch

MODULE = "benchmarks.gpu.host_cost"
TARGETS_US = {"all_reduce": 8.0, "all_gather_copies": 25.0}
ARRIVED = 1 << 40
"""In every flag: a number that no operation has."""
BATCH = 50
"""Calls between two looks at the clock; the queue of a stream holds more."""


@dataclass(frozen=True)
class Row:
    """One line of the csv; times of one call, microseconds."""

    op: str
    way: str
    num_bytes: int
    ranks: int
    p50_us: float
    p99_us: float
    target_us: float | str
    calls: int


class Alone(NvlinkCollectives):
    """A rank whose peers are itself."""

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """See `base.MemberTransport`; nobody else is asked."""
        domain, size = self._domain, self.config.group.size
        domain.mappings = [domain.region.mapping] * size
        pages = [os.dup(domain.mailbox.fd) for _ in range(size)]
        domain.mailbox.attach(pages)
        for page in pages:
            os.close(page)
        domain.watch = PeerWatch({}, self._tables.host.mark_gone)
        self._attach()

    def stand_alone(self) -> None:
        """Kernels return at once, copies find all flags set."""
        torch.cuda.synchronize()
        self._copies._flags.fill(ARRIVED)
        self._tables.stop()
        torch.cuda.synchronize()


def lonely(ranks: int) -> Collectives:
    """Collectives whose other ranks are fakes."""
    group = PaperGroup(0, ranks)
    config = CollectiveConfig(group=group, transport="nvlink", pool_bytes=64 << 20, staging_bytes=16 << 20)
    transport = Alone(config)
    transport.import_regions([transport.allocate()])
    with mock.patch.object(collectives, "establish", return_value=transport):
        return Collectives(config)


def operations(coll: Collectives, num_bytes: int) -> dict[str, Callable[[], Any]]:
    """By name; each begins and waits."""
    n, size = num_bytes // 2, coll.size
    out = coll.empty((size * n,), torch.bfloat16)
    x, wide = torch.ones(n, dtype=torch.bfloat16, device="cuda"), torch.ones_like(out)
    return {
        "all_reduce": lambda: coll.all_reduce(x, out=x).wait(),
        "all_reduce_new": lambda: coll.all_reduce(x).wait(),
        "reduce_scatter": lambda: coll.reduce_scatter(wide, out=x).wait(),
        "all_gather_kernel": lambda: coll.all_gather(out[:n], out=out, num_sms=8).wait(),
        "all_gather_copies": lambda: coll.all_gather(out[:n], out=out, num_sms=0).wait(),
    }


def yardstick(calls: int) -> Row:
    """A launch of torch's that does next to nothing, for hosts that differ."""
    one = torch.zeros(1, device="cuda")
    times = measured(one.zero_, calls)
    p50, p99 = (round(quantile(times, q), 2) for q in (0.5, 0.99))
    return Row("zero_", "torch", 4, 1, p50, p99, "", calls)


def measured(call: Callable[[], Any], calls: int) -> list[float]:
    """Microseconds of a call, by batches."""
    taken = []
    for _ in range(calls // BATCH + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        taken.append((time.perf_counter() - begin) / BATCH * 1e6)
    torch.cuda.synchronize()
    return taken[2:]


def rows(coll: Collectives, num_bytes: int, calls: int) -> Iterator[Row]:
    """Every operation, both ways."""
    assert coll._repeats is not None
    find = coll._repeats.find
    for op, call in operations(coll, num_bytes).items():
        for way, seen in (("long", lambda *_: None), ("plan", find)):
            with mock.patch.object(coll._repeats, "find", seen):
                times = measured(call, calls)
            p50, p99 = (round(quantile(times, q), 2) for q in (0.5, 0.99))
            target = TARGETS_US.get(op, "") if way == "plan" else ""
            yield Row(op, way, num_bytes, coll.size, p50, p99, target, calls)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a target was missed or a part failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--num-bytes", type=int, nargs="+", default=[4096, 1 << 20])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(f"out/{datetime.date.today().isoformat()}-host-cost"))
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    options = parser.parse_args(arguments)
    coll = lonely(options.ranks)
    coll._transport.stand_alone()  # type: ignore[attr-defined]
    config: dict[str, object] = {"ranks": options.ranks, "calls": options.calls}
    about = facts.of_this_run(config, options.commit, MODULE) | facts.of_gpus(1)
    table = Parts(options.out, "host_cost", Row, lambda: about, _show)
    table.measure("before", lambda: [yardstick(options.calls)])
    for num_bytes in options.num_bytes:
        table.measure(f"{num_bytes} bytes", partial(rows, coll, num_bytes, options.calls))
    table.measure("after", lambda: [yardstick(options.calls)])
    missed = any(row.target_us != "" and row.p50_us > float(row.target_us) for row in table.rows)
    return table.status or int(missed)


def _show(row: Row) -> None:
    times = f"{row.p50_us:8.2f} us, p99 {row.p99_us:8.2f} {row.target_us}"
    print(f"{row.op:18} {row.way:5} {row.num_bytes:9} B: {times}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
