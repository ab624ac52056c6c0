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
    payload = high_throughput.Payload(torch.ones(3, 8))
    finalizer._dispatch(payload, wide[:, :2], weights[:, :2], 8, torch.ones(3, 8))
    assert [part.is_contiguous() for part in given] == [True, True]
    assert torch.equal(given[0], wide[:, :2])


def test_a_scale_of_all_rows_is_one_of_those_that_came(high_throughput: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of a fixed shape hold what an earlier step left there, of any layer."""
    seen = list[torch.Tensor]()

    def quantize(x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(x)
        return x, torch.ones(1)

    for name in ("_to_comm", "_to_compute_sync", "_crossing", "_overlapping"):
        monkeypatch.setattr(high_throughput, name, lambda *_: None)
    monkeypatch.setattr(high_throughput, "_quantize", quantize)
    rows, weights = torch.tensor([[1.0, 2.0], [1000.0, 1000.0]]), torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    finalizer = object.__new__(high_throughput.StandardFinalizer)
    finalizer._dispatch = lambda *_: (rows, None, torch.zeros(2, 2), weights, None)
    scheme = SimpleNamespace(
        quant_dtype=torch.float8_e4m3fn, per_act_token_quant=False, block_shape=None, is_block_quantized=False,
        a1_scale=None,
    )  # fmt: skip
    finalizer.prepare_async(rows, weights, torch.zeros(2, 2), 8, None, False, scheme)()
    assert seen[0].tolist() == [[1.0, 2.0], [0.0, 0.0]]
