"""RDMA in a guest: bytes, faults and yardsticks of `verbs` and `libfabric` over Soft-RoCE. Run by `make test-rxe`."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import facts
from benchmarks import native as bench_native
from tests import tools
from tests.rxe import guest

BYTES = ["verbs", "libfabric(verbs;ofi_rxm)", "libfabric(tcp;ofi_rxm)", "shuffle(verbs)"]
OF_SOCKETS = (
    "test_a_frame_outside_of_the_mirror_ends_the_connection",
    "test_a_connection_that_an_end_gives_up_never_stood",
    "test_one_that_stood_has_ended_though_the_one_in_its_place_never_stood",
    "test_half_a_message_is_no_message",
)
"""Tests of frames, which `tcp` alone has."""
# A completion queue of Soft-RoCE has 32,767 entries; libfabric's verbs provider asks for more unless told otherwise.
SMALL = (
    "export FI_UNIVERSE_SIZE=8 FI_OFI_RXM_MSG_TX_SIZE=64 FI_OFI_RXM_MSG_RX_SIZE=64 FI_VERBS_TX_SIZE=64 "
    "FI_VERBS_RX_SIZE=64;"
)
TIMEOUT_S, LIVES = 600.0, 30
BLOCKS = 9
"""Of each figure in one guest; in a second one as many again where the first leaves a goal open."""
PROVIDERS = ("verbs", "libfabric(verbs;ofi_rxm)", "libfabric(tcp;ofi_rxm)")
GOALS = {"us": {"verbs": 1.2}, "mib_per_s": dict.fromkeys(PROVIDERS, 0.9)}
"""Of the yardstick: greatest latency, least bandwidth."""
BESIDE = ("yardstick", "alike")
SURE = 0.95
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure of a provider.

    Attributes:
        what: us, or mib_per_s.
        beside: yardstick, perftest or a bare loop of fi_writedata; or alike, a bare loop whose messages take a posted
            receive and a completion (verbs), whose queue can wake a sleeper (libfabric), as ours.
        ours, yardstick: medians of the blocks.
        ratio: median of the quotients of neighbouring blocks; from low to high: where it is with probability SURE.
        goal: of the ratio; none: 0.
        met: yes; no, if the goal lies outside of that interval; "not shown", if the ratio misses it and it lies within.
    """

    provider: str
    what: str
    beside: str
    ours: float
    yardstick: float
    ratio: float
    low: float
    high: float
    blocks: int
    goal: float
    met: str


@pytest.fixture(autouse=True)
def asked(request: pytest.FixtureRequest) -> None:
    """Only where it is asked for, and can run."""
    if "tmp_path" not in request.fixturenames:
        return  # arithmetic
    if not request.config.getoption("--rxe"):
        tools.skip("a guest", "it takes minutes")
    if why := guest.missing():
        tools.skip("a guest", why)


def inside(out: Path, script: str, arguments: Iterable[str]) -> str:
    """Run a script of this folder in a guest; what it printed. Fails with that."""
    quoted = " ".join(f"'{argument}'" for argument in arguments)
    status, printed = guest.run(f"{SMALL} {sys.executable} {guest.HERE}/{script} {quoted}", out, TIMEOUT_S)
    assert status == 0, printed[-20000:]
    return printed


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("provider", BYTES)
def test_bytes(provider: str, tmp_path: Path) -> None:
    file = "tests/unit/test_network_bytes.py"
    left_out = [word for name in OF_SOCKETS for word in ("--deselect", f"{file}::{name}")]
    printed = inside(tmp_path, "inside.py", ["-q", file, "--provider", provider, *left_out])
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_faults(tmp_path: Path) -> None:
    printed = inside(tmp_path, "inside.py", ["-q", "tests/rxe/inside_faults.py"])
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.timeout(3 * TIMEOUT_S + 60)
def test_combine_in_two_hops(tmp_path: Path) -> None:
    """With torch, which an emulated processor imports in minutes."""
    command = f"{sys.executable} -m pytest -q -s -p no:cacheprovider -o timeout=0 tests/rxe/inside_two_hops.py"
    status, printed = guest.run(
        f"export PYTHONPATH={guest.ROOT}:{guest.ROOT}/services; {command}", tmp_path, 3 * TIMEOUT_S
    )
    assert status == 0, printed[-20000:]
    assert "2 passed" in printed
    print(*re.findall(r"TWO HOPS .*|CUT .*", printed), sep="\n")


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_lives_survive_their_close(tmp_path: Path) -> None:
    """libfabric 1.17 ended 13 of 30 such processes when an endpoint closed to which its peer still sent."""
    assert f"LIVES {LIVES} DEATHS 0 " in inside(tmp_path, "closing.py", ["libfabric(verbs;ofi_rxm)", str(LIVES)])


@pytest.mark.timeout(6 * TIMEOUT_S)
def test_yardsticks(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Fails where a goal is missed for sure: processors without KVM scatter, and so does whatever runs beside them."""
    bench_native.load()  # compiled here, not in the guest
    native = guest.ROOT / "ep_kernels" / "network" / "native"
    for name, more in (("bare_fabric", []), ("bare_verbs", [str(native / "verbs_device.cpp")])):
        sources = [str(guest.HERE / f"{name}.cpp"), *more]
        command = ["g++", "-std=c++17", "-O2", f"-I{native}", *sources, "-ldl", "-o", str(guest.BUILT / name)]
        subprocess.run(command, check=True, timeout=120)
    found: list[Beside] = []
    for provider in PROVIDERS:
        rows = measured(tmp_path, provider)
        if any(one.met == "not shown" for one in figures(provider, rows)):
            rows += measured(tmp_path, provider)
        found += figures(provider, rows)
        print(*figures(provider, rows), sep="\n")
    if out := pytestconfig.getoption("--rxe-out"):
        config = {"blocks": BLOCKS, "guest": "QEMU without KVM, 2 processors, Soft-RoCE over veth"}
        facts.keep(Path(out), "yardsticks", Beside, found, facts.of_control(["--rxe"], config, "tests.rxe"))
    assert all(one.met != "no" for one in found if one.beside == "alike"), found


def measured(out: Path, provider: str) -> Rows:
    """The blocks of one guest."""
    return rows_in(inside(out, "yardsticks.py", [str(guest.BUILT), str(BLOCKS), provider]))


def rows_in(printed: str) -> Rows:
    """Rows that a guest printed, of blocks that have all: its kernel writes to the same console, also into a line."""
    rows: Rows = []
    for line in re.findall(r"ROW (\{[^{}]*\})", printed):
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    count = Counter((row["what"], row["block"]) for row in rows)
    return [row for row in rows if count[row["what"], row["block"]] == 1 + len(BESIDE)]


def figures(provider: str, rows: Rows) -> list[Beside]:
    """Of a provider's blocks."""
    return [
        figure(provider, what, beside, [row for row in rows if row["what"] == what])
        for what in GOALS
        for beside in BESIDE
    ]


def figure(provider: str, what: str, beside: str, rows: Rows) -> Beside:
    """See `Beside`."""
    ours, theirs = ([row["value"] for row in rows if row["of"] == of] for of in ("ours", beside))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    ratio, goal = statistics.median(ratios), GOALS[what].get(provider, 0.0)
    low, high = interval(ratios)
    best, is_met = (low, ratio <= goal) if what == "us" else (high, ratio >= goal)
    is_missed = best > goal if what == "us" else best < goal
    met = "" if not goal else "yes" if is_met else "no" if is_missed else "not shown"
    values = (statistics.median(ours), statistics.median(theirs), ratio, low, high)
    mine, other, ratio, low, high = (round(value, 3) for value in values)
    return Beside(provider, what, beside, mine, other, ratio, low, high, len(ratios), goal, met)


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the median of that population is with probability SURE, at least: between two of the ordered values, for
    as many lie on each side of it as heads of a coin."""
    n, outside, cut = len(ordered), 0.0, 0
    while cut < (n - 1) // 2 and outside + math.comb(n, cut) / 2**n <= (1 - SURE) / 2:
        outside += math.comb(n, cut) / 2**n
        cut += 1
    return ordered[max(0, cut - 1)], ordered[n - max(1, cut)]


def test_a_row_that_the_kernel_wrote_into_takes_its_block_with_it() -> None:
    row = '{"what": "us", "block": %d, "of": "%s", "value": 1.5}'
    lines = [f"ROW {row % (block, of)}" for block in range(3) for of in ("ours", *BESIDE)]
    lines[0] = f"[    9.1] rdma_rxe: loaded {lines[0]}"
    lines[4] = lines[4][:30] + "[   12.3] veth0: renamed\n" + lines[4][30:]
    whole = [(block, of) for block in (0, 2) for of in ("ours", *BESIDE)]
    assert [(one["block"], one["of"]) for one in rows_in("\n".join(lines))] == whole


@pytest.mark.parametrize(("count", "cut"), [(5, 0), (9, 1), (18, 4)])
def test_where_a_median_is(count: int, cut: int) -> None:
    values = [float(number) for number in range(count)]
    assert interval(values) == (values[cut], values[count - 1 - cut])


@pytest.mark.parametrize(
    ("what", "ratios", "met"),
    [
        ("us", [1.1] * 9, "yes"),
        ("us", [1.3] * 9, "no"),
        ("us", [1.0, 1.1, 1.1, 1.1, 1.3, 1.3, 1.4, 1.5, 1.6], "not shown"),
        ("mib_per_s", [0.95] * 9, "yes"),
        ("mib_per_s", [0.7] * 9, "no"),
        ("mib_per_s", [0.7, 0.7, 0.8, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1], "not shown"),
    ],
)
def test_what_is_missed(what: str, ratios: list[float], met: str) -> None:
    sides = [("ours", ratios), ("yardstick", [1.0] * len(ratios))]
    rows = [{"what": what, "of": of, "value": value} for of, values in sides for value in values]
    assert figure("verbs", what, "yardstick", rows).met == met
