"""`verbs` by a libibverbs of our own: bytes and faults, in processes that find it in place of the machine's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import fake_verbs
from tests.rxe.test_rxe import OF_SOCKETS

pytestmark = pytest.mark.skipif(bool(fake_verbs.missing()), reason=fake_verbs.missing())
BYTES = "tests/unit/test_network_bytes.py"


def inside(*arguments: str) -> None:
    """Run pytest where the fake is found. Fails with what it printed."""
    command = [sys.executable, str(fake_verbs.ROOT / "tests" / "rxe" / "inside.py"), "-q", *arguments]
    done = subprocess.run(
        command, env=fake_verbs.environment(), cwd=fake_verbs.ROOT, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("provider", ["verbs", "shuffle(verbs)"])
def test_bytes(provider: str) -> None:
    left_out = [word for name in OF_SOCKETS for word in ("--deselect", f"{BYTES}::{name}")]
    inside(BYTES, "--provider", provider, *left_out)


def test_faults() -> None:
    inside("tests/fake_verbs/inside_faults.py")
