"""Worlds of rank processes, shared by all tests of the session; transports by folder name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ep_kernels import transports
from ep_kernels.types import Capabilities
from tests.cases import RoutingCase
from tests.groups import LonelyGroup
from tests.worlds import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """world(R): the pool of R rank processes."""
    pools: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in pools:
            pools[size] = World(size)
        return pools[size]

    yield of_size
    for pool in pools.values():
        pool.close()


ON_GPUS = ("nvlink",)
NOT_YET = {
    "test_sleeper_hears_that_it_was_left_out": "a left-out rank is not told yet",
    "handles_of_different_steps": "handles of different steps are not told apart yet",
}
"""Parts of the contract that transports on GPUs do not promise yet, by a word of the test's name."""


def _params() -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.gpu(2)) if n in ON_GPUS else n for n in transports.names()]


@pytest.fixture(params=_params())
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport in this installation. Ranks past the number of GPUs share them."""
    for word, why in NOT_YET.items():
        if request.param in ON_GPUS and word in request.node.name:
            pytest.skip(f"{request.param}: {why}")
    return str(request.param)


@pytest.fixture
def capabilities(transport: str) -> Capabilities:
    """What it can do."""
    config = RoutingCase(2, 1, 16, (1,)).config(LonelyGroup(), transport=transport)
    made = transports.create(config)
    made.close()
    return made.capabilities
