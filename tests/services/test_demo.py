"""The demo itself, with one family: real processes, forked, the whole way; and that it can fail."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from crossdock.common.config import ControlConfig
from crossdock.demo import compare, run, stage
from tests.services.cluster import FORM_S, TEST_S

pytestmark = [pytest.mark.timeout(3 * TEST_S), pytest.mark.usefixtures("forked")]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FORM_TIMEOUT_S", FORM_S)
    monkeypatch.setattr(run, "CALL_TIMEOUT_S", FORM_S)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
def test_one_family() -> None:
    printed = Console(file=io.StringIO(), width=200, record=True)
    assert run.run_demo(["mixtral"], printed) == 0, printed.export_text()
    words = printed.export_text()
    for part in ("float32", "128/128", "bfloat16", "rms logit error", "/metrics", "every criterion met"):
        assert part in words
    assert "-/-" not in words


@pytest.mark.slow
def test_one_family_on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two domains on loopback, so rows between them take the network."""
    monkeypatch.setattr(run, "DTYPES", {"float32": torch.float32})
    printed = Console(file=io.StringIO(), width=200, record=True)
    assert run.run_demo(["mixtral"], printed, num_hosts=2) == 0, printed.export_text()
    words = printed.export_text()
    assert "hosts: two domains on loopback (not asked for); shared memory inside, tcp between" in words
    assert "128/128" in words


def test_a_failed_criterion_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model stands for the served one."""

    def served(family: str, folder: Path, name: run.Name, plain: Callable[[], run.Plain], *_: object) -> run.Row:
        said = plain()
        verdict = run.judge_bf16(said.exact, said.rounded, said.rounded)
        return run.Row(family, name, verdict, {phase: {} for phase in run.report.PHASES}, 1.0, [])

    monkeypatch.setattr(run, "DTYPES", {"bfloat16": torch.bfloat16})
    monkeypatch.setattr(run, "_serve", served)
    printed = Console(file=io.StringIO(), width=200, record=True)
    assert run.run_demo(["qwen3_moe"], printed) == 0, printed.export_text()
    monkeypatch.setattr(compare, "MIN_CLEAR_SHARE", 1.1)
    assert run.run_demo(["qwen3_moe"], printed) == 1
    words = printed.export_text()
    assert "failed qwen3_moe bfloat16: only" in words
    assert "logs: " in words


def test_a_service_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker more is waited for than are started."""

    def wanting(world_size: int, **fields: Any) -> ControlConfig:
        return ControlConfig(world_size=world_size + 1, **fields)

    monkeypatch.setattr(stage, "ControlConfig", wanting)
    monkeypatch.setattr(run, "FORM_TIMEOUT_S", 0.2)
    printed = Console(file=io.StringIO(), width=200, record=True)
    assert run.run_demo(["mixtral"], printed) == 1
    assert "failed SupervisorError: group: expected SERVING within 0.2 s" in printed.export_text()
