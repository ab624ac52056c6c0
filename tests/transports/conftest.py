"""Worlds of rank processes, shared by all tests of the session; transports by folder name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crossdock.common.transports import needs_gpu
from ep_kernels import transports
from ep_kernels.types import Capabilities, Mode
from tests import hosts
from tests.cases import RoutingCase
from tests.groups import LonelyGroup
from tests.worlds import World, pools


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """world(R): the pool of R rank processes."""
    yield from pools()


def _params(over_hosts: str) -> list[Any]:
    alone = [pytest.param(n, marks=pytest.mark.gpu(2)) if needs_gpu(n) else n for n in transports.names()]
    gpus = [pytest.param(name, marks=pytest.mark.gpu(1)) for name in hosts.GPUS]
    return {"none": alone, "short": [*alone, *hosts.SHORT], "full": list(hosts.FULL), "gpus": gpus}[over_hosts]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`transport`: every one in this installation; with --over-hosts, groups over several hosts. A module may name its
    own in TRANSPORTS."""
    if "transport" in metafunc.fixturenames:
        own = getattr(metafunc.module, "TRANSPORTS", None)
        params = own or _params(metafunc.config.getoption("--over-hosts"))
        metafunc.parametrize("transport", params, scope="function")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A module whose transport has one algorithm may name it as MODE: cases of the other would be the same again."""

    def is_other(item: pytest.Item) -> bool:
        mode = getattr(getattr(item, "callspec", None), "params", {}).get("mode")
        only = getattr(getattr(item, "module", None), "MODE", None)
        return isinstance(mode, Mode) and only not in (None, mode)

    left_out = [item for item in items if is_other(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_other(item)]


@pytest.fixture
def capabilities(transport: str) -> Capabilities:
    """What it can do."""
    fields = hosts.overrides_of(transport, 0, 1)
    config = RoutingCase(2, 1, 16, (1,)).config(LonelyGroup(), **fields)
    made = transports.create(config)
    made.close()
    return made.capabilities
