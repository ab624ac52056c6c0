"""The command `crossdock`: what people run, and how it is shown."""

from __future__ import annotations


def main() -> None:
    from crossdock.cli import app

    app.main()
