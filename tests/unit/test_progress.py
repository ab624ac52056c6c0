"""The bar of a loading worker, on a terminal: whoever stops it in the middle keeps a cursor."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from crossdock.worker.group import worker_status

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    made = io.StringIO()
    monkeypatch.setattr(worker_status, "Console", lambda stderr: Console(file=made, force_terminal=True))
    return made


def test_a_bar_is_gone_when_all_is_loaded(screen: io.StringIO) -> None:
    bar = worker_status.LoadingBar()
    for done in (1, 5, 10):
        bar.show(done, 10)
    said = screen.getvalue()
    assert "loading experts" in said
    assert (said.count(HIDE), said.count(SHOW)) == (1, 1)


def test_closing_in_the_middle_gives_the_cursor_back_and_draws_no_more(screen: io.StringIO) -> None:
    bar = worker_status.LoadingBar()
    bar.show(1, 10)
    assert screen.getvalue().count(SHOW) == 0
    bar.close()
    said = screen.getvalue()
    assert (said.count(HIDE), said.count(SHOW)) == (1, 1)
    bar.show(2, 10)
    bar.close()
    assert screen.getvalue() == said
