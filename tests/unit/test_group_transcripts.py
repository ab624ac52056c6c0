"""The group machine, as transcripts: tests/testdata/group/*.txt say what happens, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.group_script import replay

FOLDER = Path(__file__).resolve().parent.parent / "testdata" / "group"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert replay(text) == text, (
        f"rewrite with: python -m tests.unit.group_script {path.relative_to(FOLDER.parents[2])}"
    )


def test_every_promised_story_is_there() -> None:
    stories = {path.stem for path in FOLDER.glob("*.txt")}
    assert stories >= {
        "form", "late_worker", "lost_heartbeat", "kill_and_restart", "duplicate_uid", "old_epoch", "drain",
        "fault_report", "form_timeout", "restart_clean", "restart_missing", "restart_contradiction", "mixed_group",
    }  # fmt: skip
