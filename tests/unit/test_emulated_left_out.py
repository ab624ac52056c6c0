"""A rank that was left out wakes and launches what the survivors had given up, on emulated GPUs; and what survivors
wait for before they use their buffers again."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi
from ep_kernels.types import Layout, Mode
from tests.emulator.machine import Emulated, without_driver
from tests.gpu import loopback_left_out as story
from tests.gpu.loopback import Loopback
from tests.gpu.loopback_check import check, combine_of
from tests.tools import needs

pytestmark = [
    needs("g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64"),
    pytest.mark.timeout(600),
]
LAYOUTS = [Layout.FLAT, Layout.EXPERT_MAJOR]
"""Rows of sources lie side by side in both, per rank or per expert; each kernel takes seconds to compile."""
EXACT = "2"


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mode", "before"), [(Mode.HT, 0), (Mode.HT, 1), (Mode.HT, 5), (Mode.AUTO, 4)])
def test_late_dispatch(mode: Mode, before: int, layout: Layout) -> None:
    loop, case = story.three(layout, mode, Emulated())
    story.wakes_in_a_dispatch(loop, case, Mode.HT, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [Mode.HT, Mode.AUTO])
def test_late_dispatch_with_a_handle(mode: Mode, layout: Layout) -> None:
    loop, case = story.three(layout, mode, Emulated())
    story.wakes_in_a_dispatch(loop, case, Mode.HT, 3, cached=True)


@pytest.mark.parametrize("cached", [False, True])
def test_late_ll_dispatch(cached: bool) -> None:
    loop, case = story.three(Layout.EXPERT_MAJOR, Mode.AUTO, Emulated())
    story.wakes_in_a_dispatch(loop, case, Mode.LL, 4, cached)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mode", [Mode.HT, Mode.LL])
def test_late_combine(mode: Mode, exact: bool) -> None:
    loop, case = story.three(Layout.EXPERT_MAJOR, mode, Emulated(), exact_combine=exact)
    story.wakes_in_a_combine(loop, case, mode)


def flag(loop: Loopback, at: int, kind: str, of: int) -> torch.Tensor:
    """int64 [1]: the word of rank `of` in the region of rank `at`."""
    flags = loop.memory[at].data[: loop.engines[at].tables.world.map.counts].view(torch.int64)
    return flags[abi.FLAGS.index(kind) * loop.size + of :][:1]


@pytest.mark.parametrize("mode", [Mode.HT, Mode.LL])
def test_every_operation_says_when_it_has_sent(mode: Mode) -> None:
    """Also one that gave up."""
    loop, case = story.three(Layout.EXPERT_MAJOR, mode, Emulated(), timeout_s=0.02)
    handles = check(loop, case, mode)
    check(loop, replace(case, seed=case.seed + 1), mode)
    for rank in range(3):
        assert [int(flag(loop, rank, kind, rank)) for kind in ("SENT", "COMBINE_SENT")] == [2, 2]
    loop.launch(combine_of(loop, handles)[:1])
    assert loop.engines[0].tables.host.fault() is not None
    assert int(flag(loop, 0, "COMBINE_SENT", 0)) == 3


def test_all_go_on_together_after_it() -> None:
    loop, case = story.three(Layout.FLAT, Mode.AUTO, Emulated())
    story.wakes_in_a_dispatch(loop, case, Mode.HT, 2)
    story.regroup(loop, story.ALL, story.EPOCH + 1)
    handles = check(loop, case, Mode.HT)
    for mode in (Mode.HT, Mode.LL, Mode.HT, Mode.HT):
        check(loop, replace(case, seed=case.seed + 1), mode)
    check(loop, case, Mode.HT, again=replace(case, seed=case.seed + 2), previous=handles)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_survivors_wait_for_what_a_rank_had_begun(op: str) -> None:
    """And do not go on while that may still write to them."""
    loop, case = story.three(Layout.FLAT, Mode.HT, Emulated())
    check(loop, case, Mode.HT)
    begun, sent = ("STARTED", "SENT") if op == "dispatch" else ("COMBINE_STARTED", "COMBINE_SENT")
    for rank in story.SURVIVORS:  # past its waits, and far from its end
        flag(loop, rank, begun, 0).fill_(2)
    with pytest.raises(TransportError, match=f"rank 0 was left out, but its {op} 2 has not ended"):
        story.regroup(loop)
    flag(loop, 0, sent, 0).fill_(2)
    story.regroup(loop)
    story.go_on(loop, case, Mode.HT)


def test_a_rank_that_waits_for_another_that_is_left_out_ends() -> None:
    loop, case = story.three(Layout.FLAT, Mode.HT, Emulated())
    check(loop, case, Mode.HT)
    loop.engines[0].tables.set_active([True, False, True])  # it waits for rank 2 alone
    story.regroup(loop, [False, True, False])
    loop.launch([loop.engines[0].barrier()])
    said = f"barrier: the group has gone on in epoch {story.EPOCH} without this rank and rank 2"
    assert str(loop.engines[0].tables.host.fault()) == said
