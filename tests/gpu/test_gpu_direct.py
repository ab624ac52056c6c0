"""Boxes in GPU memory, on a GPU, with a libibverbs of our own in place of a NIC (tests/fake_verbs)."""

from __future__ import annotations

import pytest

from tests import fake_verbs

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(bool(fake_verbs.missing()), reason=fake_verbs.missing()),
    pytest.mark.timeout(400),
]


def test_rows_through_gpu_memory() -> None:
    print(fake_verbs.LIBRARY.run("-m", "pytest", "-q", "-rs", "-s", "tests/fake_verbs/inside_cuda.py", may_skip=True))
