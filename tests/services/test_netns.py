"""The network that `make chaos` cuts: hosts in namespaces of their own behind a router. Skipped where the machine
allows none; nothing of its own network is touched."""

from __future__ import annotations

import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.demo import hosts
from crossdock.demo.hosts import become
from tests import tools
from tests.chaos import __main__ as chaos
from tests.chaos.netns import Fabric, Host, NoNamespaces
from tests.chaos.ways import Proxied

WAIT_S = 120.0
_ECHO = """
import socket, sys
kind = socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM
here = socket.socket(socket.AF_INET, kind)
here.bind(("0.0.0.0", 7))
if kind == socket.SOCK_STREAM:
    here.listen()
    print("here", flush=True)
    here, _ = here.accept()
else:
    print("here", flush=True)
while True:
    data, where = here.recvfrom(100)
    print(data.decode(), flush=True)
    here.sendto(data, where) if where else here.sendall(data)
"""
_ASK = """
import socket, sys
there = socket.socket(socket.AF_INET, socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM)
there.settimeout(120)
there.connect((sys.argv[2], 7))
print("connected", flush=True)
for line in sys.stdin:
    words, wait_s = line.split()
    there.settimeout(float(wait_s))
    if words != "listen":
        there.sendall(words.encode())
    try:
        print(there.recv(100).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


class Process:
    """One that reads and writes lines, on a host."""

    def __init__(self, host: Host, code: str, *arguments: str) -> None:
        command = [*host.enter, sys.executable, "-S", "-c", code, *arguments]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.strip())

    def says(self) -> str:
        """Its next line."""
        return self._lines.get(timeout=WAIT_S)

    def told(self, words: str, wait_s: float = WAIT_S) -> str:
        """What it says to that."""
        self.tell(words, wait_s)
        return self.says()

    def tell(self, words: str, wait_s: float = WAIT_S) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{words} {wait_s}\n")
        self.popen.stdin.flush()

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(WAIT_S)


Join = Callable[[str], tuple[Process, Process, Host, Host]]
"""Who asks, who answers, and their hosts."""


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    try:
        made = Fabric()
    except NoNamespaces as error:
        tools.skip("network namespaces", error)
    yield made
    made.close()


@pytest.fixture
def join(fabric: Fabric) -> Iterator[Join]:
    """Somebody who says what he hears, and one who is connected to him, by udp or tcp."""
    started: list[Process] = []

    def make(kind: str) -> tuple[Process, Process, Host, Host]:
        here, there = fabric.host("here", 1), fabric.host("there", 2)
        started.append(Process(there, _ECHO, kind))
        assert started[0].says() == "here"
        started.append(Process(here, _ASK, kind, there.address))
        assert started[1].says() == "connected"
        return started[1], started[0], here, there

    yield make
    for process in started:
        process.end()


def test_a_connection_that_is_cut_neither_closes_nor_answers_and_goes_on_when_mended(
    fabric: Fabric, join: Join
) -> None:
    asks, echo, here, there = join("tcp")
    assert (asks.told("one"), echo.says()) == ("one", "one")
    line = fabric.cut(f"from {here.address} to {there.address}", f"from {there.address} to {here.address}")
    line.cut()
    assert asks.told("two", 0.3) == "silence"
    line.mend()
    assert (asks.told("listen"), echo.says()) == ("two", "two")


@pytest.mark.parametrize(("way", "heard"), [("to", False), ("from", True)])
def test_one_way_is_cut_and_the_other_is_not(fabric: Fabric, join: Join, way: str, heard: bool) -> None:
    asks, echo, _, there = join("udp")
    assert (asks.told("one"), echo.says()) == ("one", "one")
    line = fabric.cut(f"{way} {there.address}")
    line.cut()
    assert asks.told("two", 0.3) == "silence"
    line.mend()
    assert asks.told("three") == "three"
    assert [echo.says() for _ in range(1 + heard)] == (["two", "three"] if heard else ["three"])


def test_who_looks_is_not_cut_off(fabric: Fabric, join: Join) -> None:
    _, echo, here, there = join("udp")
    fabric.cut(f"to {there.address}", f"from {there.address}").cut()
    looks = Process(here, _ASK, "udp", there.looked_at)
    assert looks.says() == "connected"
    assert (looks.told("one"), echo.says()) == ("one", "one")
    looks.end()


def test_a_line_goes_down_and_up_again_after_the_last_of_two(fabric: Fabric, join: Join) -> None:
    asks, echo, _, there = join("tcp")
    assert (asks.told("one"), echo.says()) == ("one", "one")
    fabric.unplug(there)
    fabric.unplug(there)
    fabric.plug(there)
    assert asks.told("two", 0.3) == "silence"
    fabric.plug(there)
    assert (asks.told("listen"), echo.says()) == ("two", "two")


def test_connections_are_reset(fabric: Fabric, join: Join) -> None:
    asks, echo, here, there = join("tcp")
    assert (asks.told("one"), echo.says()) == ("one", "one")
    if not fabric.reset(here, there):
        pytest.skip("this kernel destroys no sockets")
    asks.tell("listen")
    assert asks.popen.wait(WAIT_S) != 0


def test_a_second_address_is_cut_by_itself(fabric: Fabric, join: Join) -> None:
    asks, echo, here, there = join("udp")
    alias = fabric.alias(there, 3)
    fabric.cut(f"from {here.address} to {alias}").cut()
    other = Process(here, _ASK, "udp", alias)
    assert other.says() == "connected"
    assert other.told("lost", 0.3) == "silence"
    assert (asks.told("one"), echo.says()) == ("one", "one")
    other.end()


def test_no_program_is_needed_but_those_that_every_system_has(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat", "nsenter", "sh", "unshare"):
        if (found := shutil.which(name)) is not None:
            (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    host, other = fabric.host("one", 1), fabric.host("two", 2)
    fabric.rename(host, 3)
    fabric.unplug(host)
    fabric.plug(host)
    assert fabric.reset(host, other) == 0
    with pytest.raises(NoNamespaces, match=r"route to 10\.77\.4\.2/32: Network is unreachable"):
        fabric.alias(replace(host, address="10.79.0.1"), 4)


def test_without_unshare_there_are_proxies_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_UNSHARE", (["no-such-unshare"],))
    assert "No such file" in become([], "tests.chaos")
    ways, why = chaos.network("namespaces", 2)
    assert isinstance(ways, Proxied)
    assert "No such file" in why
    ways.close()
