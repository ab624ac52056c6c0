"""Descriptors: what a server's clients may hold of them, and what a request buffer takes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from crossdock.common import descriptors, http, rpc
from crossdock.protocol.request_buffer import SharedMemory
from crossdock.worker import process
from crossdock.worker.requests import ticket_listener


def test_shared_memory_keeps_no_descriptor() -> None:
    before, held = len(os.listdir("/proc/self/fd")), []
    for _ in range(8):
        memory, fd = SharedMemory.make(4096)
        os.close(fd)
        held.append(memory)
    assert len(os.listdir("/proc/self/fd")) == before
    held[0].rows(1, 4, 1, torch.float32).x.fill_(1)


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65536])
def test_all_clients_together_leave_a_third_of_the_descriptors(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    connections = descriptors.share(rpc.MAX_CONNECTIONS, descriptors.CONNECTIONS)
    buffers = descriptors.share(process._MAX_CALLS, descriptors.CALLS)
    pages = descriptors.share(http._MAX_CONNECTIONS, descriptors.HTTP)
    tickets = descriptors.share(ticket_listener.MAX_PENDING, descriptors.TICKETS)
    assert connections + buffers + pages + 2 * tickets <= limit * 2 // 3


@pytest.mark.parametrize(("limits", "after"), [((64, 512), 512), ((512, 512), 512)])
def test_a_server_raises_its_soft_limit_to_the_hard_one(limits: tuple[int, int], after: int) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits}); "
        "from crossdock.common import descriptors; descriptors.raise_limit(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(after), "512"]
