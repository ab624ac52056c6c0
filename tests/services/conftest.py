"""What tests of real processes share."""

from collections.abc import Iterator

import pytest

from tests.services.forked import forked_children


@pytest.fixture
def forked() -> Iterator[None]:
    """Supervisors in this process fork what they start."""
    with forked_children():
        yield
