"""Steps of ranks on emulated GPUs of two hosts whose boxes NICs reach, and a driver that flushes. A pytest plugin."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ep_kernels import jit
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.network.boxes import Flush
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.emulator.build import build
from tests.emulator.direct import Direct
from tests.emulator.machine import without_driver
from tests.gpu.loopback_check import check
from tests.gpu.loopback_network import Joined

FAR_BOXES = 4 * 2 * 2
"""Of two hosts of two ranks: each has an outbox and an inbox for two ranks of the other host, and none of its own."""


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU of this machine is looked at."""
    without_driver(monkeypatch)


@pytest.fixture(scope="module")
def built_kernels() -> None:
    """Compiled side by side, before the clock of any test runs."""

    def is_wanted(of: dict[str, str]) -> bool:
        plain = of.get("X", "u8") == "u8" and (of.get("Y", "bf16"), of.get("C", "bf16")) == ("bf16", "bf16")
        return plain and of.get("LAYOUT", "0") == "0"

    wanted = [v for v in jit.network_variants() if is_wanted(dict(v.constants))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in wanted)))


class Calls:
    """C functions of a driver that flushes; what they were called with."""

    def __init__(self, status: int = 0) -> None:
        self.entered, self.flushed = list[int](), list[tuple[int, int]]()
        self.status = status
        self._enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_enter)
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(self._on_flush)

    def flush(self) -> Flush:
        enter, run = (ctypes.cast(one, ctypes.c_void_p).value for one in (self._enter, self._run))
        assert enter is not None
        assert run is not None
        return Flush(enter, 1234, run)

    def _on_enter(self, context: int) -> int:
        self.entered.append(context)
        return 0

    def _on_flush(self, target: int, scope: int) -> int:
        self.flushed.append((target, scope))
        return self.status


Steps = Callable[..., Any]


@pytest.fixture
def steps() -> Iterator[Steps]:
    """steps(machine, network): some, of a new group, against the reference; the group."""
    made: list[Joined] = []

    def run(machine: Direct, network: NetworkConfig, **fields: Any) -> Any:
        case = RoutingCase(9, 3, 520, (5, 0, 6, 2), "single_none", draw_seed(), max_tokens=6)
        made.append(Joined(machine, 2))
        loop = made[-1](case, mode=Mode.AUTO, layout=Layout.EXPERT_MAJOR, network=network, **fields)
        check(loop, case, Mode.LL)
        check(loop, replace(case, seed=draw_seed()), Mode.HT, phases=(1, 2), backward=True)
        return loop

    yield run
    for joined in made:
        joined.close()
