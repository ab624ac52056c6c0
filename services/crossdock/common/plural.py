"""Plurals in text."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """1 host, 2 hosts."""
    return f"{count} {what}{'' if count == 1 else 's'}"
