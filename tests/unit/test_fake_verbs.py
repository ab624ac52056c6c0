"""`verbs` by a libibverbs of our own: bytes and faults, in processes that find it in place of the machine's."""

from __future__ import annotations

import platform

import pytest

from tests import fake_verbs
from tests.rxe.test_rxe import OF_SOCKETS

pytestmark = pytest.mark.skipif(bool(fake_verbs.missing()), reason=fake_verbs.missing())
BYTES = "tests/unit/test_network_bytes.py"


def inside(*arguments: str) -> None:
    """Run pytest without torch where the fake is found."""
    fake_verbs.LIBRARY.run("tests/rxe/inside.py", "-q", *arguments)


def test_bytes_and_faults() -> None:
    """An idle network among them: less than 1 % of a core."""
    left_out = [word for name in OF_SOCKETS for word in ("--deselect", f"{BYTES}::{name}")]
    inside(BYTES, "tests/fake_verbs/inside_faults.py", "--provider", "verbs", *left_out)


def test_bytes_in_any_order() -> None:
    names = (*OF_SOCKETS, "test_an_idle_network_needs_no_processor")
    left_out = [word for name in names for word in ("--deselect", f"{BYTES}::{name}")]
    inside(BYTES, "--provider", "shuffle(verbs)", *left_out)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64")
def test_ranks_on_emulated_gpus() -> None:
    fake_verbs.LIBRARY.run("-m", "pytest", "-q", "tests/fake_verbs/inside_gpus.py")
