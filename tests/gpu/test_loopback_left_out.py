"""A rank that was left out wakes and launches what the survivors had given up: many ranks on one GPU."""

from __future__ import annotations

import pytest

from ep_kernels.types import Layout, Mode
from tests.gpu import loopback_left_out as story

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("before", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.HT, Mode.AUTO])
def test_late_dispatch(mode: Mode, layout: Layout, before: int) -> None:
    loop, case = story.three(layout, mode)
    story.wakes_in_a_dispatch(loop, case, Mode.HT, before)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.HT, Mode.AUTO])
def test_late_dispatch_with_a_handle(mode: Mode, layout: Layout) -> None:
    loop, case = story.three(layout, mode)
    story.wakes_in_a_dispatch(loop, case, Mode.HT, 5, cached=True)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_late_ll_dispatch(layout: Layout, cached: bool) -> None:
    loop, case = story.three(layout, Mode.AUTO)
    story.wakes_in_a_dispatch(loop, case, Mode.LL, 4, cached)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mode", [Mode.HT, Mode.LL])
def test_late_combine(mode: Mode, exact: bool) -> None:
    loop, case = story.three(Layout.EXPERT_MAJOR, mode, exact_combine=exact)
    story.wakes_in_a_combine(loop, case, mode)
