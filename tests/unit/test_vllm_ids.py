"""What the plugin makes of vLLM's tensors before the data plane checks them; vLLM's own names are stand-ins here."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdock.vllm_plugin import compat

PARTS = ("base", "managers", "high_throughput")


@pytest.fixture
def high_throughput(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over names that do nothing."""
    stand_in = {"Standard": None, "__init__": lambda *_, **__: None}
    monkeypatch.setattr(compat, "find", lambda name: type(name, (), stand_in))
    for part in PARTS:
        monkeypatch.delitem(sys.modules, f"crossdock.vllm_plugin.{part}", raising=False)
    yield importlib.import_module("crossdock.vllm_plugin.high_throughput")
    for part in PARTS:
        sys.modules.pop(f"crossdock.vllm_plugin.{part}", None)


def test_ids_that_are_columns_of_a_wider_table_are_dispatched(high_throughput: Any) -> None:
    """As of a router that appends shared experts; one rank that refused them would leave the others waiting."""
    given = list[torch.Tensor]()

    class Calls:
        """Of deep_ep."""

        def kind(self, *_: object, **__: object) -> None:
            """Of no communicator."""

        def dispatch(self, payload: object, *parts: Any, keep: bool) -> Any:
            """Remembers ids and weights."""
            given.extend(parts[:2])
            ids = torch.zeros(1, 2, dtype=torch.int64)
            return SimpleNamespace(
                x=None, scales=None, topk_idx=ids, topk_weights=None, counts=None, counted=[1], handle=None
            )

    finalizer = object.__new__(high_throughput.HighThroughputFinalizer)
    finalizer._calls, finalizer._first_expert, finalizer._timeouts = Calls(), 0, contextlib.nullcontext()
    finalizer._fixed, finalizer._link = False, SimpleNamespace(pool=SimpleNamespace(size=64))  # so shapes are exact
    finalizer._keep = lambda handle: None
    wide, weights = torch.arange(12, dtype=torch.int32).view(3, 4), torch.rand(3, 4)
    finalizer._dispatch((torch.ones(3, 8), None), wide[:, :2], weights[:, :2], 8, torch.ones(3, 8))
    assert [part.is_contiguous() for part in given] == [True, True]
    assert torch.equal(given[0], wide[:, :2])
