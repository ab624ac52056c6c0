"""The toy of docs/adding-a-transport.md: it writes what a transport must write and nothing else, passes the contract
suite with threads for ranks, and is what the page shows."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import ep_kernels.transports
from ep_kernels.transports.base import Transport
from tests.groups import LonelyGroup
from tests.house.tree import ROOT
from tests.transports import test_contract, test_contract_calls, test_contract_faults
from tests.worlds import RankFailed

TRANSPORTS = ["threads"]
FOLDER = ROOT / "tests/toy/threads"
STOPS_ITS_PROCESS = "test_sleeper_that_wakes_after_a_regroup_harms_nobody"


class Threads:
    """As `World`, with a thread for each rank."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        store = dist.HashStore()
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
    monkeypatch.setattr(ep_kernels.transports, "__path__", [*ep_kernels.transports.__path__, str(FOLDER.parent)])


def _of_any_process(name: str, value: Any) -> bool:
    """A test of the suite whose ranks may be threads: they come from `world`, and none stops its process."""
    is_test = name.startswith("test_") and "world" in inspect.signature(value).parameters
    return is_test and name != STOPS_ITS_PROCESS


for _module in (test_contract, test_contract_calls, test_contract_faults):
    globals().update({name: value for name, value in vars(_module).items() if _of_any_process(name, value)})


def test_it_writes_what_must_be_written_and_nothing_else() -> None:
    toy = type(ep_kernels.transports.create(test_contract_calls.case_of(1).config(LonelyGroup(), transport="threads")))
    own = {name for name in vars(toy) if not name.startswith("_")} & set(dir(Transport))
    assert own | {"capabilities"} == Transport.__abstractmethods__ | {"capabilities"}
    assert len(own) == 11
