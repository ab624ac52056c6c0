"""Worlds of rank processes, shared by all tests of the session; transports that have collectives, by folder name."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from crossdock.common.transports import needs_gpu
from ep_kernels import transports
from tests.worlds import World, pools

NAMES = [n for n in transports.names() if importlib.util.find_spec(f"ep_kernels.transports.{n}.collectives")]


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """world(R): the pool of R rank processes."""
    yield from pools()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`transport`: every one with collectives; those of GPUs need one for each rank."""
    if "transport" in metafunc.fixturenames:
        params = [pytest.param(n, marks=pytest.mark.gpu(2)) if needs_gpu(n) else n for n in NAMES]
        metafunc.parametrize("transport", params)
