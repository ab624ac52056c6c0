"""The benchmark of experts on a GPU: what is a missed goal, and which bytes bound a step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.experts import EXPERTS, FORMATS, HIDDEN, INNER, Groups, Row, bound_bytes, missed
from crossdock.worker.checkpoints.weights import Stack


def row(format: str, rows: int, ratio: float) -> Row:
    return Row(format, rows, 1.0, 1.0, 1, ratio, 1.0, 1.0, 1, 0.0)


def test_goals_by_number_of_rows() -> None:
    met = [row("fp8 blocks", 256, 1.6), row("fp8 blocks", 16384, 1.3), row("mxfp4", 256, 0.5), row("bf16", 256, 1.0)]
    assert missed(met) == []
    late = [row("fp8 blocks", 1024, 1.59), row("fp8 blocks", 4096, 1.2)]
    assert missed(late) == [
        "fp8 blocks, 1024 rows: 1.59 of bf16, goal 1.6",
        "fp8 blocks, 4096 rows: 1.2 of bf16, goal 1.3",
    ]


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp8 blocks", 8 + 32 / 128**2), ("mxfp4", 4.25)])
def test_bytes_of_a_step(name: str, bits: float) -> None:
    weights = (
        Stack.empty(FORMATS[name], (EXPERTS, 2 * INNER, HIDDEN), torch.bfloat16, "meta", parts=2),
        Stack.empty(FORMATS[name], (EXPERTS, HIDDEN, INNER), torch.bfloat16, "meta"),
    )
    none = torch.empty(0)
    groups = Groups(none, none, none, (5, 0, 3, *[0] * (EXPERTS - 3)))
    rows = 8 * (4 * HIDDEN + 2 * INNER * (1 if name == "fp8 blocks" else 2))
    assert bound_bytes(weights, groups) == pytest.approx(2 * 3 * HIDDEN * INNER * bits / 8 + rows, rel=1e-6)
