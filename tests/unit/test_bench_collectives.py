"""What the benchmark of collectives makes of its measurements, and what it calls wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.collective_backends import CollectiveCase
from benchmarks.gpu.collective_tables import BACKENDS, Session, Taken, bound_us, cases, wrong

GATHER = CollectiveCase("all_gather", 16 << 20)


def test_every_operation_has_three_backends_at_every_size() -> None:
    backends: dict[tuple[str, int], set[str]] = {}
    for name, case in cases(8, quick=False):
        assert name in BACKENDS
        backends.setdefault((case.op, case.num_bytes), set()).add(name)
    assert all(len(found) >= 3 and "crossdock" in found for found in backends.values())
    assert {op for op, _ in backends} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_a_ratio_is_to_our_best_of_the_same_operation() -> None:
    taken = [
        Taken("crossdock", CollectiveCase("all_gather", 16 << 20, num_sms=8), [[80.0], [82.0]]),
        Taken("crossdock", CollectiveCase("all_gather", 16 << 20, num_sms=32), [[60.0], [60.0]]),
        Taken("nccl", GATHER, [[90.0], [90.0]]),
        Taken("nccl", CollectiveCase("all_gather", 1 << 20), [[9.0]]),
    ]
    session = SimpleNamespace(taken={(one.backend, one.case): one for one in taken}, _ranks=4)
    lines = Session.lines(session)  # type: ignore[arg-type]
    assert [(line.ratio, line.ratio_to) for line in lines] == [("", ""), ("", ""), (1.5, "crossdock sms=32"), ("", "")]
    assert [line.spread_pct for line in lines] == [2.5, 0.0, 0.0, ""]
    assert lines[1].gbps == pytest.approx(3 * (16 << 20) / 60e3, rel=1e-2)


def test_the_bound_counts_bytes_that_leave_a_gpu() -> None:
    assert bound_us(GATHER, 8) == pytest.approx(7 * (16 << 20) / 343e3)
    assert bound_us(CollectiveCase("all_reduce", 8 << 20), 4) == pytest.approx(2 * 3 / 4 * (8 << 20) / 350e3)
    assert bound_us(CollectiveCase("reduce_scatter", 1 << 20), 2) == pytest.approx((1 << 20) / 350e3)


def test_what_is_wrong() -> None:
    reduce, want = CollectiveCase("all_reduce", 8), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    near = torch.tensor([1.0, 2.015625], dtype=torch.bfloat16)
    assert wrong("nccl", reduce, near, want) == ""
    assert wrong("crossdock", reduce, near, want) == "other bits than the definition"
    assert wrong("nccl", GATHER, near, want) == "other bits than the definition"
    assert wrong("nccl", reduce, want * float("nan"), want).startswith("off by nan")
    assert wrong("crossdock", reduce, want.clone(), want) == ""
