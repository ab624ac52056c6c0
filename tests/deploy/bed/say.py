"""What the bed says while it works, and the error for what a machine lacks."""

from __future__ import annotations

import sys


class Missing(RuntimeError):
    """This machine lacks something that a tier needs; the message says what."""


def say(text: str) -> None:
    """One line to stderr, at once."""
    print(text, file=sys.stderr, flush=True)
