"""Dispatch and combine over a network of a set rate: `python -m benchmarks.network --gb-s 0.1 0.2 0.4`.

The ranks run in a network namespace of their own. A token bucket of tc limits its loop-back device to the rate: both
directions of both hosts together. One hop home and two take turns in the same processes.
*Of the bound*: the bytes of the rows that have to cross, by rate and time; frames, heads and the bucket are beside
them, so 1.0 is out of reach. Needs `unshare`, `tc`, and root or user namespaces.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.cases import Case, Step, make_steps, sends
from benchmarks.measure import NUM_ROUTINGS, measure

BURST, QUEUE_MS = 512 << 10, 200
"""Of the token bucket: bytes that pass at once, the loop-back device's frames being up to 64 KiB; its longest queue."""
SHARE, GAIN = 0.9, 0.9
"""Targets: of the bound; gain of the second hop by the quotient of the bytes."""


def set_rate(gb_s: float) -> None:
    """Of the loop-back device, GB/s. Raises RuntimeError with what the tool said."""
    bucket = ["tbf", "rate", f"{round(gb_s * 8e9)}bit", "burst", str(BURST), "latency", f"{QUEUE_MS}ms"]
    command = ["tc", "qdisc", "replace", "dev", "lo", "root", *bucket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def crossing(case: Case, step: Step, *, once_per_host: bool) -> int:
    """Bytes of the rows that have to cross between two halves of the ranks: a row per token and other host, or per
    token and rank there."""
    half, rows = case.ranks // 2, 0
    for source in range(case.ranks):
        there = [rank for rank in range(case.ranks) if rank // half != source // half]
        tokens = torch.cat([sends(case, step, source, rank) for rank in there])
        rows += len(set(tokens.tolist())) if once_per_host else len(tokens)
    return rows * case.row_bytes


def rates(case: Case, gb_s: float, rounds: int, seed: int) -> Iterator[tuple[str, str, list[float], str, float]]:
    """(what, of which job, its values, unit, the least that is meant to be or 0) of one rate."""
    set_rate(gb_s)
    of = f"T={case.tokens}, 2 hosts x {case.ranks // 2}, {gb_s:g} GB/s"
    result = measure(case, ("over_hosts", "two_hops"), rounds, seed)
    steps = make_steps(case, NUM_ROUTINGS, seed)
    once, each = (statistics.mean(crossing(case, step, once_per_host=once) for step in steps) for once in (True, False))
    timed = (
        ("dispatch", "over_hosts", "dispatch", once),
        ("combine in one hop", "over_hosts", "combine", each),
        ("combine in two hops", "two_hops", "combine", once),
    )
    for what, backend, op, num_bytes in timed:
        took_us = result.slowest_us[backend, op]
        yield what, of, [us / 1e3 for us in took_us], "ms", 0
        yield f"{what}: of the bound", of, [num_bytes / gb_s / 1e3 / us for us in took_us], "", SHARE
    one, two = (result.slowest_us[name, "combine"] for name in ("over_hosts", "two_hops"))
    gains = [a / b for a, b in zip(one, two, strict=True)]
    yield "combine: one hop's time by two hops'", of, gains, "", 0
    yield "combine: one hop's bytes by two hops'", of, [each / once], "", 0
    yield "combine: gain by that of the bytes", of, [gain * once / each for gain in gains], "", GAIN
