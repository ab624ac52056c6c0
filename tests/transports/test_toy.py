"""The toy of docs/adding-a-transport.md: it writes what a transport must write and nothing else, passes the contract
suite with threads for ranks, and is what the page shows."""

from __future__ import annotations

import inspect
import re
import tomllib
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.common import transports as facts
from ep_kernels import MoECommunicator, transports
from ep_kernels.errors import ArgumentError, ConfigError
from ep_kernels.transports import base
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase
from tests.compare import same_bits
from tests.compiled import How, compiled_gradients, compiled_layers
from tests.groups import LonelyGroup
from tests.house.tree import ROOT
from tests.transports import faults, test_contract, test_contract_calls, test_contract_faults
from tests.transports.steps import Inputs
from tests.worlds import RankFailed

TRANSPORTS, MODE = ["threads"], Mode.HT
"""It has one algorithm."""
PATIENCE_S = 1.0
"""Of threads of one process."""
CASE = RoutingCase(5, 2, 64, (4,), "uniform", 7, max_tokens=6)
FOLDER = ROOT / "tests/toy/threads"
NOT_HERE = {
    "test_sleeper_that_wakes_after_a_regroup_harms_nobody": "stops its process",
    "test_nothing_leaks": "counts what its process holds",
    "test_ten_thousand_iterations": "minutes, where ranks share one interpreter",
    "test_stories_with_quirks": "minutes, as those of test_contract.py, which compare the reference with itself",
}
"""Tests of the suite that are not for a toy whose ranks are threads."""


class Threads:
    """As `World`, with a thread for each rank."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))  # of a rank that waits there for one that has failed
        with ThreadPoolExecutor(self.size) as pool:
            ranks = [pool.submit(fn, rank, self.size, store, *args) for rank in range(self.size)]
        errors = [rank.exception(timeout_s) for rank in ranks]
        texts = [f"rank {r}: {''.join(traceback.format_exception(e))}" for r, e in enumerate(errors) if e]
        if texts:
            raise RankFailed("\n".join(texts))
        return [rank.result() for rank in ranks]


@pytest.fixture
def world() -> Callable[[int], Threads]:
    """In the place of the processes of the other transports."""
    return Threads


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the registry."""
    monkeypatch.setattr(transports, "__path__", [*transports.__path__, str(FOLDER.parent)])
    monkeypatch.setattr(faults, "PATIENCE_S", PATIENCE_S)


def _is_for_threads(name: str, value: Any) -> bool:
    """A test of the suite whose ranks come from `world`."""
    return name not in NOT_HERE and name.startswith("test_") and "world" in inspect.signature(value).parameters


for _module in (test_contract_calls, test_contract_faults):
    globals().update({name: value for name, value in vars(_module).items() if _is_for_threads(name, value)})
test_exact_combine, test_overflow_drops = test_contract.test_exact_combine, test_contract.test_overflow_drops


def lonely(layout: Layout, **fields: Any) -> MoECommunicator:
    """A communicator of one rank."""
    return MoECommunicator(CASE.config(LonelyGroup(), transport="threads", layout=layout, mode=Mode.HT, **fields))


def test_it_writes_what_must_be_written_and_nothing_else() -> None:
    toy = type(transports.create(CASE.config(LonelyGroup(), transport="threads")))
    own = {name for name in vars(toy) if not name.startswith("_")} & set(dir(base.Transport))
    assert own == base.Transport.__abstractmethods__
    assert len(own | {"capabilities"}) == 12


def test_one_that_lacks_a_member_cannot_be_made() -> None:
    toy = type(transports.create(CASE.config(LonelyGroup(), transport="threads")))
    cut = type("Cut", (toy,), {"wake": base.Transport.wake})
    with pytest.raises(TypeError, match=r"abstract method.*wake"):
        cut(CASE.config(LonelyGroup()))


def test_the_page_shows_it() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-a-transport.md").read_text(), re.DOTALL)
    assert shown
    text = (FOLDER / "transport.py").read_text()
    assert all(part in text for part in shown)


def test_what_others_must_know_of_it_is_what_it_can() -> None:
    said = facts._parsed("threads", tomllib.loads((FOLDER / facts.FILE_NAME).read_text()))
    with lonely(Layout.FLAT) as comm:
        can = comm.capabilities
    assert (said.device_type, said.cross_host) == (can.device_type, can.cross_host)


@pytest.mark.parametrize(("story", "layout"), [(compiled_layers, Layout.FLAT), (compiled_gradients, Layout.GROUPED)])
def test_compiled(story: Callable[..., None], layout: Layout) -> None:
    with lonely(layout, dtype=torch.float32) as comm:
        story(comm, CASE, How(backend="aot_eager", calls=2))


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.FLAT])
def test_a_trimmed_handle_has_all_rows_that_arrived(layout: Layout) -> None:
    with lonely(layout, exact_shapes=False, expert_alignment=4 if layout is Layout.GROUPED else 1) as comm:
        out, handle = comm.dispatch(*Inputs.of(CASE, comm.config).arguments(0, "cpu"))
        rows = int(out.num_rows)
        with pytest.raises(ArgumentError, match=f"num_rows: expected the {rows} that arrived, or more"):
            comm.trimmed(handle, rows - 1)
        z = comm.combine(out.tokens, handle)
        same_bits(comm.combine(out.tokens[:rows].clone(), comm.trimmed(handle, rows)), z, "z")


def test_bytes_on_the_wire_are_those_of_rows_ids_and_weights() -> None:
    with lonely(Layout.GROUPED, quantize=True, combine_dtype=torch.float8_e4m3fn) as comm:
        row = CASE.hidden_size + 4 * -(-CASE.hidden_size // 128)
        assert comm.wire_bytes(1) == (row + 8 * CASE.topk, row)
        assert comm.ll_max_tokens == base.LL_MAX_TOKENS


def test_a_format_that_a_transport_does_not_make_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"quantize: expected one of \(False, True\) with transport .*, got 'mxfp8'"):
        lonely(Layout.GROUPED, quantize="mxfp8")
