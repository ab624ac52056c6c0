"""Rank processes that import SGLang's dispatchers, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds import World


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four ranks."""
    pool = World(4)
    yield pool
    pool.close()
