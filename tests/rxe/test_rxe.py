"""RDMA in a guest: bytes, faults and yardsticks of `verbs` and `libfabric` over Soft-RoCE. Run by `make test-rxe`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import facts
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
TIMEOUT_S = 600.0
BLOCKS, BANDWIDTH, LATENCY = 5, 0.9, 1.2
"""Of the yardstick: least bandwidth, greatest latency (of libfabric's none is asked for)."""
NAMES = ("ours", "yardstick")


@dataclass(frozen=True, slots=True)
class Beside:
    """Medians of the blocks, and ours by the yardstick's."""

    provider: str
    us: float
    yardstick_us: float
    latency: float
    mib_per_s: float
    yardstick_mib_per_s: float
    bandwidth: float

    @property
    def is_met(self) -> bool:
        """Whether the targets are."""
        return self.bandwidth >= BANDWIDTH and (self.latency <= LATENCY or self.provider != "verbs")


@pytest.fixture(autouse=True)
def asked(request: pytest.FixtureRequest) -> None:
    """Only where it is asked for, and can run."""
    if not request.config.getoption("--rxe"):
        pytest.skip("a guest takes minutes: make test-rxe")
    if why := guest.missing():
        pytest.skip(why)


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


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_yardsticks(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    bare = guest.BUILT / "bare_fabric"
    source = guest.HERE / "bare_fabric.cpp"
    include = guest.ROOT / "ep_kernels" / "network" / "native"
    command = ["g++", "-std=c++17", "-O2", f"-I{include}", str(source), "-ldl", "-o", str(bare)]
    subprocess.run(command, check=True, timeout=120)
    printed = inside(tmp_path, "yardsticks.py", [str(bare), str(BLOCKS)])
    rows = [json.loads(line[4:]) for line in printed.splitlines() if line.startswith("ROW ")]
    found = [beside(provider, rows) for provider in dict.fromkeys(row["provider"] for row in rows)]
    print(*found, sep="\n")
    if out := pytestconfig.getoption("--rxe-out"):
        config = {"blocks": BLOCKS, "guest": "QEMU without KVM, 2 processors, Soft-RoCE over veth"}
        facts.keep(Path(out), "yardsticks", Beside, found, facts.of_control(["--rxe"], config, "tests.rxe"))
    assert all(one.is_met for one in found), found


def beside(provider: str, rows: list[dict[str, Any]]) -> Beside:
    """The medians of a provider's rows."""
    here = {name: [row for row in rows if (row["provider"], row["of"]) == (provider, name)] for name in NAMES}
    us = [statistics.median(row["us"] for row in here[name]) for name in NAMES]
    rate = [statistics.median(row["mib_per_s"] for row in here[name]) for name in NAMES]
    return Beside(provider, *(round(value, 3) for value in (*us, us[0] / us[1], *rate, rate[0] / rate[1])))
