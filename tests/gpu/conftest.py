"""One pool of rank processes, a rank per GPU, for all GPU tests of a session; how they reach each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests import hosts
from tests.worlds import World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`transport`: over NVLink alone; with --over-hosts gpus, over two hosts."""
    if "transport" in metafunc.fixturenames:
        over_hosts = metafunc.config.getoption("--over-hosts") == "gpus"
        metafunc.parametrize("transport", hosts.GPUS if over_hosts else ("nvlink",))


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[], World]]:
    """world(): one rank per GPU, at most eight; made late, since the parent must not touch CUDA."""
    pools: list[World] = []

    def all_gpus() -> World:
        if not pools:
            pools.append(World(min(8, torch.cuda.device_count())))
        return pools[0]

    yield all_gpus
    for pool in pools:
        pool.close()
