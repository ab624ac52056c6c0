"""What a rank's process shares with children that it forked, and with peers that have its memory: who may end what.
Parts of the nvlink transport that need no GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver")
from ep_kernels.transports.base import EXCHANGE_WORDS
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.memory import mailbox, memory, sharing
from ep_kernels.transports.nvlink.memory.domain import PeerWatch

SOON_S = 20.0


@contextlib.contextmanager
def child(act: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """A forked child that does that, then lives until the block ends. No hook of a communicator runs in it.

    What is garbage at the fork stays as it is: a child that collected gRPC's would wait for threads it does not have.
    """
    told, tell = os.pipe()
    ended, end = os.pipe()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.close(told)
        with contextlib.suppress(BaseException):
            act()
            os.write(tell, b"1")
        os.close(tell)
        os.read(ended, 1)
        os._exit(0)
    gc.unfreeze()
    os.close(tell)
    os.close(ended)
    try:
        assert select.select([told], [], [], SOON_S)[0], "it hangs"
        assert os.read(told, 1) == b"1", "it failed"
        yield
    finally:
        os.close(told)
        os.close(end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def await_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_a_death_is_told_once() -> None:
    told = list[int]()
    peers = [sleeper(), sleeper()]
    before = len(os.listdir("/proc/self/fd"))
    watch = PeerWatch({4: peers[0].pid, 2: peers[1].pid, 7: 0}, told.append)
    assert watch.ranks == {4, 2}, "7 is not visible here"
    peers[0].kill()
    peers[0].wait()
    assert await_true(lambda: told == [4])
    watch.close()
    watch.close()
    peers[1].kill()
    peers[1].wait()
    assert told == [4]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_watch_ends_while_a_child_has_its_pipe() -> None:
    watch = PeerWatch({}, print)
    with child():
        begun = time.monotonic()
        watch.close()
        assert time.monotonic() - begun < SOON_S


def test_a_child_that_closes_a_watch_does_not_end_it() -> None:
    told, peer = list[int](), sleeper()
    watch = PeerWatch({1: peer.pid}, told.append)
    with child(watch.close_in_child):
        peer.kill()
        peer.wait()
        assert await_true(lambda: told == [1])
    watch.close()


def test_a_child_keeps_nothing_of_the_pages_and_its_parent_all() -> None:
    box, other = (mailbox.Mailbox(rank, lambda _: False) for rank in (0, 1))
    for one in (box, other):
        one.attach([box.fd, other.fd])

    def close_in_child() -> None:
        box.close_in_child()
        other.close_in_child()
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [link for link in links if "crossdock-mailbox" in link]

    with child(close_in_child):
        thread = threading.Thread(target=other.exchange, args=([7] * EXCHANGE_WORDS, SOON_S))
        thread.start()
        assert box.exchange([5] * EXCHANGE_WORDS, SOON_S)[1] == (7,) * EXCHANGE_WORDS
        thread.join()
    box.close()
    other.close()


def test_a_descriptor_server_serves_on_when_a_child_closes_it() -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read, write])
    with child(server.close_in_child):
        fds, _ = sharing.fetch(1, server.address, 2, 5)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < SOON_S
    for fd in (read, write, *fds):
        os.close(fd)


def test_what_a_descriptor_server_lent_comes_back() -> None:
    """Whoever is done hangs up, though its own child has a copy of the connection."""
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    server = sharing.DescriptorServer([read], lends=True)
    loans = [sharing.borrow(1, server.address, 1, 5) for _ in range(2)]
    server.close()
    with child():
        for _, _, lease in loans:
            assert server.is_lent()
            sharing.give_back(lease)
        assert not server.is_lent()
    for fds, _, _ in loans:
        os.close(fds[0])
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(read)
    os.close(write)


BORROW = """
import sys, time
from ep_kernels.transports.nvlink.memory import sharing
loan = sharing.borrow(0, bytes.fromhex(sys.argv[1]), 1, 20)
print("have it", flush=True)
time.sleep(600)
"""


def test_what_a_dead_process_had_comes_back() -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read], lends=True)
    borrower = subprocess.Popen([sys.executable, "-c", BORROW, server.address.hex()], stdout=subprocess.PIPE)
    assert borrower.stdout is not None
    assert borrower.stdout.readline() == b"have it\n"
    server.close()
    assert server.is_lent()
    borrower.kill()
    borrower.wait()
    assert await_true(lambda: not server.is_lent())
    borrower.stdout.close()
    os.close(read)
    os.close(write)


def test_a_descriptor_server_that_does_not_lend_hangs_up() -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read])
    fds, _, lease = sharing.borrow(1, server.address, 1, 5)
    assert lease.recv(1) == b""
    server.close()
    assert not server.is_lent()
    lease.close()
    for fd in (read, write, *fds):
        os.close(fd)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device, which is idle."""
    fake = SimpleNamespace(device=lambda device: contextlib.nullcontext(), synchronize=lambda device: None)
    monkeypatch.setattr(memory.torch, "cuda", fake)


@pytest.mark.usefixtures("idle")
def test_a_mapping_is_its_parents() -> None:
    """Its last view may die in a child, whose driver has no context: only the parent unmaps."""
    read, write = os.pipe()
    mapping = [memory.Mapping(1, 2, 0, lambda: os.write(write, b"x"))]

    def drop() -> None:
        mapping.clear()
        gc.collect()

    with child(drop):
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    drop()
    assert os.read(read, 2) == b"x"
    os.close(read)
    os.close(write)


@pytest.mark.usefixtures("idle")
def test_a_lease_is_given_back_when_the_mapping_is_gone() -> None:
    read, write = os.pipe()
    server, freed = sharing.DescriptorServer([read], lends=True), list[str]()
    fds, _, lease = sharing.borrow(1, server.address, 1, 5)
    server.close()
    mapping = [memory.Mapping(1, 2, 0, lambda: freed.append(f"lent: {server.is_lent()}"), lease)]

    def close_in_child() -> None:
        mapping[0].close_in_child()

    with child(close_in_child):
        assert server.is_lent()
        mapping.clear()
        gc.collect()
        assert freed == ["lent: True"], "unmapped first"
        assert not server.is_lent()
    for fd in (read, write, *fds):
        os.close(fd)


@pytest.mark.usefixtures("idle")
def test_a_region_is_kept_until_all_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_lent", deque())
    lent, freed = {"a", "b"}, list[str]()
    for name in "ab":
        mapping = memory.Mapping(1, 2, 0, functools.partial(freed.append, name))
        memory.keep(mapping, functools.partial(lent.__contains__, name))
    del mapping
    memory.free_returned()
    assert freed == []
    lent.remove("b")
    memory.free_returned()
    assert freed == ["b"]
    lent.remove("a")
    memory.free_returned()
    memory.free_returned()
    assert freed == ["b", "a"]


def test_a_reader_of_the_parent_calls_no_driver_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_retired", deque())
    calls = list[str]()
    monkeypatch.setattr(driver, "call", lambda name, *args: calls.append(name))
    monkeypatch.setattr(driver, "_ended", lambda *reader: calls.append("ended") is None)
    reader = [driver.Reader("memory")]
    calls.clear()

    def drop() -> None:
        reader.clear()
        gc.collect()

    def drop_quietly() -> None:
        drop()
        assert calls == []
        assert len(driver._retired) == 1, "what a copy may still be written to is kept"

    with child(drop_quietly):
        pass
    drop()
    assert calls == ["ended"]
    assert not driver._retired
