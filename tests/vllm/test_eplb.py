"""vLLM's expert-parallel load balancer moves experts between steps of a layer over the `cpu` transport."""

from __future__ import annotations

import pytest

from tests import tools
from tests.vllm import balanced
from tests.vllm.layers import CLASSES, Case
from tests.worlds import World

tools.require("vllm")


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("plugin", "backend"), CLASSES)
def test_a_layer_whose_experts_move(four: World, plugin: str, backend: str, missing: bool) -> None:
    results = four.run(balanced.run, Case(plugin, backend, missing=missing), timeout_s=600)
    maps, made = results[0]
    assert all(other == (maps, made) for other in results), "ranks agree"
    assert all(sorted(set(placed)) == list(range(balanced.NUM_LOGICAL)) for placed in maps)
    assert len(set(map(tuple, maps))) > 2, "experts have moved"
    assert maps[1].count(5) == max(map(maps[1].count, range(6))), "the loaded one has most copies"
    assert set(made) == {1}, "nothing of ours is made anew for it"
