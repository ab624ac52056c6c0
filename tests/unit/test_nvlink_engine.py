"""Slots of operations that fail for want of memory: the next one takes the slot that peers expect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase
from tests.emulator.machine import without_driver
from tests.gpu.loopback import Loopback
from tests.gpu.rank_engine import Filled, RankEngine


class Nowhere:
    """A machine that runs nothing."""

    device, num_sms = torch.device("cpu"), 2


CASE = RoutingCase(4, 2, 256, (3,), "uniform", 1, max_tokens=4)


class OnceOutOfMemory:
    """One of torch's allocations, whose call number `failing` raises; others do not."""

    def __init__(self, failing: int, plain: Callable[..., torch.Tensor]) -> None:
        self.left, self.plain = failing, plain

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.plain(*args, **kwargs)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RankEngine:
    without_driver(monkeypatch)
    fields: dict[str, Any] = {"mode": Mode.HT, "layout": Layout.FLAT, "exact_shapes": False}
    return Loopback(lambda group: CASE.config(group, **fields), 1, 2, Nowhere()).engines[0]  # type: ignore[arg-type]


def dispatch(engine: RankEngine) -> Filled:
    x, ids, weights = CASE.x(0, torch.bfloat16), CASE.topk_ids(0), CASE.topk_weights(0)
    return engine.dispatch(DispatchArgs(x, None, ids, weights, Mode.HT, None))


def combine(engine: RankEngine, step: Filled) -> int:
    """The slot that it takes."""
    out, handle = engine.finish(step, None, 0)
    call, _ = engine.combine(CombineArgs(torch.zeros_like(out.tokens), handle, None, True))
    return int(call.args.slot)


def test_a_dispatch_without_memory_takes_no_slot(engine: RankEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (dispatch(engine).slot, dispatch(engine).slot) == (0, 1)
    engine.restart_slots()
    failed = 0
    while True:
        with monkeypatch.context() as patched, contextlib.suppress(torch.OutOfMemoryError):
            patched.setattr(torch, "empty_like", OnceOutOfMemory(failed, torch.empty_like))
            step = dispatch(engine)
            break
        failed += 1
    assert (failed > 0, step.slot, step.seq) == (True, 0, 1)


def test_a_combine_without_memory_takes_no_slot(engine: RankEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = dispatch(engine)
    assert (combine(engine, step), combine(engine, step)) == (0, 1)
    engine.restart_slots()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", OnceOutOfMemory(0, torch.empty_like))
        with pytest.raises(torch.OutOfMemoryError):
            combine(engine, step)
    assert combine(engine, step) == 0
