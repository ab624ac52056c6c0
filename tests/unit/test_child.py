"""One supervised process, with small scripts in the place of real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossdock.child import Child, bound_log, last_words
from crossdock.common.announce import Addresses, parse

LISTEN = "import sys, time, crossdock.common.announce as a; a.announce('h:1', 'h:2', https=False)\n"
SLEEP = "import sys; print('noise'); print('trouble', file=sys.stderr, flush=True)\n" + LISTEN + "time.sleep(600)"


class Watched:
    """A child that says when something about it changed."""

    def __init__(self, code: str, folder: Path) -> None:
        self._changed = threading.Condition()
        self.child = Child("c", [sys.executable, "-c", code], folder / "c.log", lambda _: self._note())

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, until: Callable[[Child], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: until(self.child), timeout=30), self.child.tail()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], Watched]]:
    made: list[Watched] = []

    def start(code: str) -> Watched:
        made.append(Watched(code, tmp_path))
        made[-1].child.start()
        return made[-1]

    yield start
    for watched in made:
        watched.child.kill()
        assert watched.child.join(30)


def listening(child: Child) -> bool:
    return child.addresses is not None


def test_a_child_tells_where_it_listens(run: Callable[[str], Watched]) -> None:
    watched = run(SLEEP)
    watched.wait(listening)
    assert watched.child.addresses == Addresses("h:1", "h:2")
    assert watched.child.restarts == 0


def test_a_killed_child_comes_back_and_its_log_goes_on(run: Callable[[str], Watched]) -> None:
    watched = run(SLEEP)
    watched.wait(listening)
    first = watched.child.pid
    os.kill(first, signal.SIGKILL)
    watched.wait(lambda child: child.restarts == 1 and listening(child))
    assert watched.child.pid != first
    os.kill(watched.child.pid, signal.SIGKILL)
    watched.wait(lambda child: child.restarts == 2 and listening(child))
    assert "trouble" in watched.child.tail()


def test_a_terminated_child_stays_away(run: Callable[[str], Watched]) -> None:
    watched = run(SLEEP)
    watched.wait(listening)
    pid = watched.child.pid
    watched.child.terminate()
    assert watched.child.join(30)
    assert watched.child.restarts == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_last_words_of_a_dead_child_are_told(
    run: Callable[[str], Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.child._FIRST_DELAY_S", 0.01)
    watched = run(LISTEN + "print('early', file=sys.stderr); print('the disk is full', file=sys.stderr); sys.exit(3)")
    watched.wait(lambda child: child.restarts >= 1)
    told = [vars(record)["crossdock_fields"] for record in caplog.records if record.getMessage() == "process ended"]
    assert told[0]["exit_status"] == 3
    assert told[0]["last_words"] == "the disk is full"


INFO = "2026-01-01T00:00:00.000Z info    crossdock.worker rank assigned"


@pytest.mark.parametrize(("line", "said"), [(INFO, ""), ("terminate called after X", "terminate called after X")])
def test_a_child_killed_by_a_signal_is_told_with_its_name_and_without_unrelated_words(
    line: str,
    said: str,
    run: Callable[[str], Watched],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("crossdock.child._FIRST_DELAY_S", 0.01)
    code = f"import os; print({line!r}, file=sys.stderr, flush=True); os.kill(os.getpid(), 7)"
    run(LISTEN + code).wait(lambda child: child.restarts >= 1)
    told = [vars(record)["crossdock_fields"] for record in caplog.records if record.getMessage() == "process ended"]
    assert (told[0]["ended_by"], told[0]["exit_status"]) == ("signal SIGBUS", -signal.SIGBUS)
    assert told[0]["last_words"] == said


def test_bytes_that_are_no_text_do_not_end_the_supervision(run: Callable[[str], Watched]) -> None:
    noise = "import sys; sys.stdout.buffer.write(bytes([255, 10])); sys.stdout.flush()\n"
    watched = run(noise + SLEEP)
    watched.wait(listening)


def test_a_dead_child_whose_own_child_holds_its_stdout_is_started_again(
    run: Callable[[str], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.child._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("crossdock.child._READ_S", 0.01)
    holder = "import subprocess; p = subprocess.Popen(['sleep', '20']); print(p.pid, file=sys.stderr); sys.exit(1)"
    watched = run(LISTEN + holder)
    watched.wait(lambda child: child.restarts >= 1)
    for pid in filter(str.isdigit, watched.child.tail().split()):
        os.kill(int(pid), signal.SIGKILL)


def test_an_error_of_the_supervision_itself_is_told_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    child = Child(
        "c",
        [sys.executable, "-c", LISTEN + "sys.exit(1)"],
        tmp_path / "c.log",
        lambda child: told.append(child.hopeless),
    )
    monkeypatch.setattr(child, "tail", lambda: 1 / 0)
    child.start()
    assert child.join(30)
    assert child.hopeless.startswith("c is no longer supervised: ZeroDivisionError")
    assert told[-1] == child.hopeless, "its gauge is cleared"


def test_a_log_that_grew_is_copied_and_emptied_while_it_is_written(tmp_path: Path) -> None:
    path, copy = tmp_path / "c.log", tmp_path / "c.log.1"
    bound_log(path, 10)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"first line")
        bound_log(path, 0)
        bound_log(path, 11)
        assert not copy.exists()
        bound_log(path, 10)
        assert (path.read_bytes(), copy.read_bytes()) == (b"", b"first line")
        writer.write(b"second line")
        assert path.read_bytes() == b"second line"
        copy.unlink()
        copy.mkdir()  # cannot be written: the log is bounded all the same
        bound_log(path, 10)
        assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("", ""),
        ("out of memory\nKilled", "Killed"),
        ("T error   a.b no room error=x\nT info    a.b stopped host=h", "T error   a.b no room error=x"),
        ("T error   a.b first\nT error   a.b second\nT info    a.b stopped", "T error   a.b second"),
        ("T info    a.b an error was mended\nT info    a.b stopped", "T info    a.b stopped"),
    ],
)
def test_the_last_words_are_those_of_the_last_error(tail: str, said: str) -> None:
    assert last_words(tail) == said


def test_a_child_that_nobody_takes_is_not_started_again(run: Callable[[str], Watched]) -> None:
    watched = run(LISTEN + "print('too many copies', file=sys.stderr); sys.exit(5)")
    watched.wait(lambda child: bool(child.hopeless))
    assert watched.child.join(30)
    assert watched.child.restarts == 0


def test_a_hopeless_child_is_not_started_again(run: Callable[[str], Watched]) -> None:
    watched = run("import sys; print('no such model', file=sys.stderr); sys.exit(2)")
    watched.wait(lambda child: bool(child.hopeless))
    assert watched.child.join(30)
    assert watched.child.restarts == 0
    assert "no such model" in watched.child.tail()


def test_a_child_that_dies_again_and_again_before_it_listens_is_given_up(
    run: Callable[[str], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.child._FIRST_DELAY_S", 0.01)
    watched = run("import sys; sys.exit(1)")
    watched.wait(lambda child: bool(child.hopeless))
    assert watched.child.restarts == 4


def test_exit_status_2_of_a_child_that_once_listened_is_no_reason_to_give_up(run: Callable[[str], Watched]) -> None:
    watched = run(LISTEN + "sys.exit(2)")
    watched.wait(lambda child: child.restarts >= 1)
    assert not watched.child.hopeless


def test_a_command_that_cannot_start_does_not_hang(tmp_path: Path) -> None:
    child = Child("c", [str(tmp_path / "none")], tmp_path / "c.log")
    child.start()
    with pytest.raises(RuntimeError, match="started"):
        _ = child.pid
    child.terminate()
    assert child.join(30)


def test_a_log_that_cannot_be_written_does_not_keep_a_child_from_starting(tmp_path: Path) -> None:
    watched = Watched(SLEEP, tmp_path / "no folder")
    watched.child.start()
    watched.wait(listening)
    watched.child.kill()
    assert watched.child.join(30)


def test_without_a_log_file_a_child_shares_our_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("c", [sys.executable, "-c", SLEEP], None)
    child.start()
    printed = ""
    deadline = time.monotonic() + 30
    while "trouble" not in printed and time.monotonic() < deadline:
        printed += capfd.readouterr().err
    child.kill()
    assert child.join(30)
    assert "trouble" in printed
    assert child.tail() == ""


def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    kept = f"import os, crossdock.child as c; c.die_with({{parent}}); {LISTEN}time.sleep(600)".replace("\n", "; ")
    keeper = (
        "import os, sys, time, pathlib, crossdock.child as c\n"
        f"code = {kept!r}.format(parent=os.getpid())\n"
        f"child = c.Child('c', [sys.executable, '-c', code], pathlib.Path({str(tmp_path)!r}) / 'c.log')\n"
        "child.start()\n"
        "while child.addresses is None: time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        end = os.pidfd_open(pid)
        supervisor.kill()
        try:
            deadline = time.monotonic() + 20
            while not _ended(end) and time.monotonic() < deadline:
                pass
            assert _ended(end)
        finally:
            os.close(end)


def _ended(pidfd: int) -> bool:
    import select

    return bool(select.select([pidfd], [], [], 0.5)[0])


@pytest.mark.parametrize(
    "line",
    [
        'crossdock-ready {"address": 1, "http_address": "a:1"}',
        'crossdock-ready {"address": "a", "http_address": "a:1"}',
        'crossdock-ready {"address": "a:1", "http_address": "a:1", "https": 1}',
        "",
        "hello",
        "crossdock-ready",
        "crossdock-ready {}",
        "crossdock-ready [1]",
        "x crossdock-ready {}",
    ],
)
def test_other_lines_announce_nothing(line: str) -> None:
    assert parse(line) is None
