"""What a finding is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is: OK, SKIPPED (nothing to judge, `what` says why), WARN (works, but slower or with less reserve),
    FAIL (does not work)."""

    OK = "ok"
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: how bad.
        what: what was found, with numbers.
        cause: why that is bad. Empty unless WARN or FAIL.
        cure: what to do. Empty unless WARN or FAIL.
    """

    check: str
    level: Level
    what: str
    cause: str = ""
    cure: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def skipped(check: str, why: str) -> Finding:
    """Not available, or not requested."""
    return Finding(check, Level.SKIPPED, why)


def warn(check: str, what: str, cause: str, cure: str) -> Finding:
    """A finding of level WARN: it works, but worse than it should."""
    return Finding(check, Level.WARN, what, cause, cure)


def fail(check: str, what: str, cause: str, cure: str) -> Finding:
    """A finding of level FAIL: it does not work."""
    return Finding(check, Level.FAIL, what, cause, cure)


def judge(check: str, holds: bool, what: str, cause: str, cure: str, *, level: Level = Level.FAIL) -> Finding:
    """OK, or `level` with cause and cure."""
    return ok(check, what) if holds else Finding(check, level, what, cause, cure)
