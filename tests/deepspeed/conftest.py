"""Rank processes that import DeepSpeed, made once; transports, as in tests/collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives.conftest import pytest_generate_tests
from tests.worlds import World

__all__ = ["pytest_generate_tests"]


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """Two ranks."""
    pool = World(2)
    yield pool
    pool.close()
