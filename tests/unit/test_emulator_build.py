"""Libraries of emulated kernels are compiled once: a later run finds them, unless what they are made of differs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulator import build
from tests.tools import needs

pytestmark = needs("g++")
ANSWER = 'extern "C" int answer() {{ return {}; }}\n'


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Names of what was compiled, with a folder of its own for what comes of it."""
    found, run = [], subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        if not {"--version", "c++-header"} & set(command):  # standard headers are no kernel
            found.append(command)
        return run(command, **options)

    monkeypatch.setattr(build, "MADE", tmp_path / "made")
    monkeypatch.setattr(build.subprocess, "run", counted)
    build._surroundings.cache_clear()
    yield found
    build._surroundings.cache_clear()


def test_the_same_is_compiled_once(compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 1, 2):
        assert build.compiled(ANSWER.format(number), "it").answer() == number
    assert len(compilations) == 2
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    build._surroundings.cache_clear()
    assert build.compiled(ANSWER.format(1), "it").answer() == 1
    assert len(compilations) == 3


def test_what_does_not_compile_leaves_nothing(compilations: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"it: .*error"):
            build.compiled("int answer(", "it")
    assert len(compilations) == 2
    assert {path.name.partition("-")[0] for path in build.MADE.iterdir()} == {"standard"}


def test_what_nobody_has_used_for_long_goes(compilations: list[Any]) -> None:
    build.compiled(ANSWER.format(1), "old")
    build.compiled(ANSWER.format(2), "young")
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(next(build.MADE.glob("old-*")), (long_ago, long_ago))
    build._surroundings.cache_clear()
    build.compiled(ANSWER.format(2), "young")
    assert {path.name.partition("-")[0] for path in build.MADE.iterdir()} == {"young", "standard"}
