"""Descriptors: what a server's clients may hold of them."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from crossdock.common import descriptors, http, rpc
from crossdock.worker.requests import greeter, request_server


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65536])
def test_all_clients_together_leave_a_third_of_the_descriptors(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    connections = descriptors.share(rpc.MAX_CONNECTIONS, descriptors.CONNECTIONS)
    requests = descriptors.share(request_server.MAX_CONNECTIONS, descriptors.REQUESTS)
    pages = descriptors.share(http._MAX_CONNECTIONS, descriptors.HTTP)
    strangers = descriptors.share(greeter.MAX_STRANGERS, descriptors.STRANGERS)
    assert connections + requests + pages + 2 * strangers <= limit * 2 // 3


@pytest.mark.parametrize(("limits", "after"), [((64, 512), 512), ((512, 512), 512)])
def test_a_server_raises_its_soft_limit_to_the_hard_one(limits: tuple[int, int], after: int) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits}); "
        "from crossdock.common import descriptors; descriptors.raise_limit(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(after), "512"]
