"""A pytest plugin: `-p tests.gpu.shard --shard 2/3` keeps every third test, the second of each three. `--now FILE`
keeps in it the name of the test that runs, for whoever finds the session ended."""

from __future__ import annotations

from pathlib import Path

import pytest

_now: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """--shard and --now."""
    parser.addoption("--now", type=Path)
    parser.addoption("--shard", default="1/1", help="I/N: of the tests that are left, those number I, I + N, ...")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After everybody else's choice."""
    index, count = map(int, config.getoption("--shard").split("/"))
    kept = items[index - 1 :: count]
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % count != index - 1])
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Where to."""
    _now[:] = [config.getoption("--now")] if config.getoption("--now") else []


def pytest_runtest_logstart(nodeid: str) -> None:
    """Before each test."""
    for path in _now:
        path.write_text(nodeid, encoding="utf-8")
