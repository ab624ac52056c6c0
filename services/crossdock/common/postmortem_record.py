"""Post-mortem records: what a rank knew when a wait failed, as a line of JSON in its log and in its heartbeats."""

from __future__ import annotations

import json
from typing import Any

POSTMORTEM = "postmortem"
"""Event of the log line that ends with the record."""
MAX_CHARS = 8192


def parse(text: str) -> dict[str, Any] | None:
    """The record in a line of a log, or the record itself; None: there is none."""
    start = text.find("{")
    marked = text.find(f" {POSTMORTEM} {{")
    if start < 0 or (start > 0 and marked < 0):
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text, marked + len(POSTMORTEM) + 2 if marked >= 0 else start)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("rank"), int) else None
