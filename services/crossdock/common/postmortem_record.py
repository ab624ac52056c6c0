"""Post-mortem records: what a rank knew when a wait failed, as a line of JSON in its log and in its heartbeats."""

from __future__ import annotations

import json
from typing import Any

POSTMORTEM = "postmortem"
"""Event of the log line that ends with the record."""
MAX_CHARS = 8192
MAX_NUMBER = 1 << 53
"""Largest number that a record may hold: larger ones are no sequence number and no time."""
_NUMBERS = ("unix_s", "waited_s")
_INTS = ("rank", "epoch", "peer", "expected", "seen")
_NEEDED = ("rank",)


def parse(text: str) -> dict[str, Any] | None:
    """The record in a line of a log, or the record itself; None: there is none, or one with wrong types. Its texts may
    hold any character: escapes of JSON become what they stand for."""
    start = text.find("{")
    marked = text.find(f" {POSTMORTEM} {{")
    if start < 0 or (start > 0 and marked < 0):
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text, marked + len(POSTMORTEM) + 2 if marked >= 0 else start)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_record(found) else None


def _is_record(found: dict[str, Any]) -> bool:
    """Whether what is compared, sorted or turned into a time is a number."""
    ints = all(type(found[name]) is int and abs(found[name]) < MAX_NUMBER for name in _INTS if name in found)
    return ints and all(name in found for name in _NEEDED) and all(is_number(found.get(name, 0)) for name in _NUMBERS)


def is_number(value: object) -> bool:
    """Whether the value is a finite number of a plausible size."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER  # type: ignore[arg-type]
