"""Megatron's flex dispatcher over the `cpu` transport, forward and backward, four ranks of 16, 5, 0 and 9 tokens."""

from __future__ import annotations

import pytest

from tests import tools
from tests.engines import record
from tests.megatron.layers import Case, run
from tests.worlds import World

tools.require("megatron")


@pytest.mark.parametrize(
    "case",
    [Case(), Case(asynchronous=True), Case(capacity=2.0), Case(tokens=(0, 0, 0, 3))],
    ids=str,
)
def test_gradients_are_those_of_plain_all_to_all(four: World, case: Case, pytestconfig: pytest.Config) -> None:
    from megatron.core import __version__  # type: ignore[import-not-found]

    results = four.run(run, case, timeout_s=300)
    assert max(max(differences) for differences, _ in results) > 0, "sums of other orders"
    record(pytestconfig, "Megatron-Core", __version__, results[0][1])
