"""A pytest plugin: `-p tests.gpu.shard --shard 2/3` keeps every third test, the second of each three."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """--shard."""
    parser.addoption("--shard", default="1/1", help="I/N: of the tests that are left, those number I, I + N, ...")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After everybody else's choice."""
    index, count = map(int, config.getoption("--shard").split("/"))
    kept = items[index - 1 :: count]
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % count != index - 1])
    items[:] = kept
