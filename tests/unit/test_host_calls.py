"""What an operation of the `cpu` transport costs its host: calls of Python functions, which no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ep_kernels
from ep_kernels import Layout, Mode, MoECommunicator
from ep_kernels.collectives import CollectiveConfig, Collectives
from tests.cases import RoutingCase
from tests.groups import LonelyGroup

ROOT = str(Path(ep_kernels.__file__).parent)


def calls(operation: Callable[[], Any]) -> list[str]:
    """Files and names of the product's functions that the third of three like operations calls."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.append(f"{Path(code.co_filename).relative_to(ROOT)}: {code.co_name}")

    operation(), operation()
    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return found


COLLECTIVES: dict[str, tuple[int, Callable[[Collectives, torch.Tensor, torch.Tensor], Any]]] = {
    "gathered": (37, lambda coll, x, out: coll.all_gather(x).wait()),
    "into out": (42, lambda coll, x, out: coll.all_gather(x, out=out).wait()),
    "scattered": (38, lambda coll, x, out: coll.reduce_scatter(x).wait()),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_pays_for_no_choice_and_no_plan_that_cpu_has_not(name: str) -> None:
    most, operation = COLLECTIVES[name]
    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        x, out = torch.randn(4, 6), torch.empty(4, 6)
        found = calls(lambda: operation(coll, x, out))
    assert len(found) <= most, "\n".join(found)
    assert not any(call in ("collectives/collectives.py: find", "collectives/collectives.py: keep") for call in found)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_and_width_of_ids_has_the_short_way(layout: Layout, dtype: torch.dtype) -> None:
    """One record and one native call for each operation."""
    case = RoutingCase(8, 2, 64, (5,), max_tokens=5)
    with MoECommunicator(case.config(LonelyGroup(), transport="cpu", layout=layout, mode=Mode.LL)) as comm:
        x, weights = torch.randn(5, 64).bfloat16(), torch.rand(5, 2)
        ids = torch.rand(5, 8).argsort(1)[:, :2].to(dtype).contiguous()  # twice the same may overflow an expert's rows
        dispatched = calls(lambda: comm.dispatch(x, ids, weights))
        out, handle = comm.dispatch(x, ids, weights)
        y = torch.zeros(out.tokens.shape, dtype=torch.bfloat16)
        combined = calls(lambda: comm.combine(y, handle))
    assert len(dispatched) <= 29 + (not layout.per_expert), "\n".join(dispatched)
    assert len(combined) <= 16, "\n".join(combined)
