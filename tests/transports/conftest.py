"""Worlds of rank processes, shared by all tests of the session; transports by folder name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crossdock.common.transports import needs_gpu
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


def _params() -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.gpu(2)) if needs_gpu(n) else n for n in transports.names()]


@pytest.fixture(params=_params())
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport in this installation. Ranks past the number of GPUs share them."""
    return str(request.param)


@pytest.fixture
def capabilities(transport: str) -> Capabilities:
    """What it can do."""
    config = RoutingCase(2, 1, 16, (1,)).config(LonelyGroup(), transport=transport)
    made = transports.create(config)
    made.close()
    return made.capabilities
