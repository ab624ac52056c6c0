"""Sockets of requests: who reads a socket, and when; memory that is kept between steps."""

from __future__ import annotations

import select
import socket
import threading

import pytest
import torch

from crossdock.worker.experts.kept_rows import KeptRows
from crossdock.worker.steps.request_sockets import RequestSockets

WAIT_S = 20.0


class Bell:
    """A pair of sockets, one of them a socket of requests that notes what it reads."""

    def __init__(self, request_sockets: RequestSockets) -> None:
        self.client, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.heard: list[bytes] = []
        self.inside = threading.Lock()
        request_sockets.add(self.sock, self.read)

    def read(self) -> None:
        assert self.inside.acquire(blocking=False), "two threads read one socket"
        self.heard.append(self.sock.recv(100))
        self.inside.release()


@pytest.fixture
def request_sockets() -> RequestSockets:
    return RequestSockets()


def is_readable(request_sockets: RequestSockets, wait_s: float = 0.0) -> bool:
    """Whether the thread that selects it would wake up."""
    return bool(select.select([request_sockets], [], [], wait_s)[0])


def test_armed_it_is_readable_and_disarmed_it_is_not(request_sockets: RequestSockets) -> None:
    bell = Bell(request_sockets)
    bell.client.send(b"one")
    assert is_readable(request_sockets)
    request_sockets.disarm()
    assert not is_readable(request_sockets)
    request_sockets.poll()
    assert bell.heard == [b"one"]
    bell.client.send(b"two")
    assert not is_readable(request_sockets)
    request_sockets.arm()
    assert is_readable(request_sockets), "what came before it was armed is found too"
    request_sockets.poll_selected()
    assert (bell.heard, is_readable(request_sockets)) == ([b"one", b"two"], False)


def test_a_socket_that_is_gone_or_fails_ends_no_other(request_sockets: RequestSockets) -> None:
    gone, broken, fine = (Bell(request_sockets) for _ in range(3))

    def fail() -> None:
        broken.sock.recv(100)
        raise ValueError("no")

    request_sockets.remove(broken.sock)
    request_sockets.add(broken.sock, fail)
    request_sockets.remove(gone.sock)
    gone.sock.close()
    for bell in (broken, fine):
        bell.client.send(b"here")
    request_sockets.poll()
    assert fine.heard == [b"here"]
    request_sockets.poll()
    assert (gone.heard, fine.heard) == ([], [b"here"])


def test_two_threads_may_look_at_once(request_sockets: RequestSockets) -> None:
    bells = [Bell(request_sockets) for _ in range(4)]
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            request_sockets.poll()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(200):
        bells[number % 4].client.send(str(number).encode())
    stop.wait(0.05)
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    while is_readable(request_sockets):
        request_sockets.poll_selected()
    assert sorted(int(one) for bell in bells for one in bell.heard) == list(range(200))


def test_rows_are_kept_unless_they_are_huge() -> None:
    kept = KeptRows(torch.device("cpu"))
    first = kept.take(100, 512, torch.float32)
    second = kept.take(200, 512, torch.bfloat16)
    assert (second.shape, second.dtype, second.data_ptr()) == ((200, 512), torch.bfloat16, first.data_ptr())
    larger = kept.take(1000, 512, torch.float32)
    assert larger.shape == (1000, 512)
    assert first.shape == (100, 512), "the old block lives with its tensors"
    small, huge = kept.take(2, 8, torch.float32), kept.take(10_000, 512, torch.float32)
    assert small.data_ptr() == larger.data_ptr() != huge.data_ptr()
    assert kept.take(2, 8, torch.float32) is small
    assert kept.take(900, 512, torch.float32).data_ptr() == larger.data_ptr()
