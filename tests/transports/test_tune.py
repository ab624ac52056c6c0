"""`crossdock tune` with real ranks: what it writes is what the next communicator in AUTO runs by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ep_kernels import tuning
from ep_kernels.types import Layout
from tests.cases import RoutingCase
from tests.transports import tunings
from tests.worlds import World

CASE = RoutingCase(6, 2, 128, (9, 9), max_tokens=16)


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.FLAT])
def test_what_is_measured_is_used_by_all_ranks(
    world: Callable[[int], World], transport: str, tmp_path: Path, layout: Layout
) -> None:
    results = world(2).run(tunings.measured_and_used, transport, CASE, str(tmp_path), layout)
    (record, said), (other, unsaid) = results
    assert tuning.recall(tmp_path, record.key) == record
    assert record.tokens == (1, 2, 4, 8) == tuple(tokens for _, tokens in said)
    assert record.ll_max_tokens == tuning.crossover(record.tokens, record.ll_us, record.ht_us)
    assert (other.ll_us, other.ht_us) == (record.ll_us, record.ht_us), "each rank has the figures of the slowest"
    assert unsaid == [], "rank 0 speaks for all"
