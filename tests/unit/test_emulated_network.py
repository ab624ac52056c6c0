"""Kernels whose ranks are on two hosts, run on the CPU, with the real proxy and TCP between them, against the
reference."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase, cases, draw_seed
from tests.emulator.build import build, compiler
from tests.emulator.machine import Emulated, without_driver
from tests.gpu.loopback import BOTH, Loopback
from tests.gpu.loopback_check import check, combine_of

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64"),
    pytest.mark.timeout(300),
]
SPLIT = (1, 2)
NETWORK = NetworkConfig(listen="127.0.0.1:0", advertise="127.0.0.1")
SHUFFLED = NetworkConfig(listen="127.0.0.1:0", advertise="127.0.0.1", provider="shuffle(tcp)", lanes=2)
LAYOUTS = [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR]


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled side by side, before the clock of any test runs."""
    wanted = [v for v in jit.network_variants() if _is_wanted(dict(v.constants))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in wanted)))


def _is_wanted(of: dict[str, str]) -> bool:
    return of.get("LAYOUT", "0") in ("0", "2") and all(of.get(name, "u8") in ("u8", "bf16", "0", "1") for name in "XYC")


@pytest.fixture
def loops() -> Iterator[list[Loopback]]:
    """What a test joins is parted at its end."""
    made: list[Loopback] = []
    yield made
    for loop in made:
        loop.close()


def join(loops: list[Loopback], case: RoutingCase, nodes: int = 2, **fields: Any) -> Loopback:
    """The ranks of a case on so many hosts."""
    fields = {"network": NETWORK, "timeout_s": 20.0, **fields}
    loop = Loopback(lambda group: case.config(group, **fields), case.num_ranks, 3, Emulated(), nodes)
    loops.append(loop)
    return loop


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("network", [NETWORK, SHUFFLED], ids=["tcp", "shuffled"])
def test_routing(network: NetworkConfig, layout: Layout, loops: list[Loopback]) -> None:
    """Two hosts of two: uneven tokens, none at all, all to one, without experts."""
    steps = cases(4, 9, hidden_size=136, num_experts=9, topk=3)
    loop = join(loops, steps[0], network=network, mode=Mode.LL, layout=layout)
    for case in steps:
        check(loop, case, Mode.LL)
