"""What `make chaos` stands on: proxies that hold back and reset, outages that are counted, a short run that judges."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossdock.common.addresses import split_address
from tests.chaos.load import GAP_S, NUM_BATCHES, Load
from tests.chaos.proxy import Network, Proxy
from tests.services.cluster import write_model
from tests.services.control_world import lasting_port

WAIT_S = 120.0


@pytest.fixture
def way() -> Iterator[tuple[Proxy, socket.socket]]:
    """A proxy to somebody who says again what he hears, and a connection through it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        network, here = Network(), f"127.0.0.1:{lasting_port()}"
        proxy = network.proxy(here, f"127.0.0.1:{listener.getsockname()[1]}")
        with socket.create_connection(split_address(here), WAIT_S) as connection:
            yield proxy, connection
        network.close()


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(100):
            connection.sendall(data)


def test_a_proxy_that_is_cut_holds_back_until_it_is_mended(way: tuple[Proxy, socket.socket]) -> None:
    proxy, connection = way
    connection.sendall(b"one")
    assert connection.recv(100) == b"one"
    proxy.cut()
    connection.sendall(b"two")
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    connection.settimeout(WAIT_S)
    proxy.mend()
    assert connection.recv(100) == b"two"


def test_a_proxy_that_is_reset_ends_its_connections(way: tuple[Proxy, socket.socket]) -> None:
    proxy, connection = way
    connection.sendall(b"one")
    assert connection.recv(100) == b"one"
    proxy.reset()
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(100) == b""


def test_outages_are_the_gaps_between_right_answers(tmp_path: Path) -> None:
    load = Load("127.0.0.1:1", write_model(tmp_path), 1)
    load.tally.good_at = [0.1, 0.2, 3.2, 3.3]
    assert load.outage_s(0.0, 3.4) == pytest.approx(3.0)
    assert load.outage_s(0.0, 3.3 + 2 * GAP_S) == pytest.approx(3.0 + 2 * GAP_S)
    assert load.outage_s(10.0, 12.0) == pytest.approx(2.0)


def test_an_answer_that_differs_is_wrong(tmp_path: Path) -> None:
    load = Load("127.0.0.1:1", write_model(tmp_path), 1)
    for number in range(NUM_BATCHES):
        right = load._expected[number].float()
        assert load._judge(number, right) == ""
        assert "other rows" in load._judge(number, right + 1e-3)
        assert "other rows" in load._judge(number, torch.full_like(right, float("nan")))
