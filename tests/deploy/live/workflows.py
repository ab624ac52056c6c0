"""The workflows of GitHub are what its runner understands."""

from __future__ import annotations

import subprocess

import pytest

from tests.deploy.bed import tools
from tests.deploy.bed.say import Missing
from tests.house.tree import ROOT


def test_actionlint_finds_nothing_to_complain_about() -> None:
    try:
        actionlint = tools.need("actionlint")["actionlint"]
    except Missing as error:
        pytest.skip(str(error))
    files = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yaml"))
    assert files
    done = subprocess.run(
        [str(actionlint), "-no-color", *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
