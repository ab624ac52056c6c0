"""In the guest: what goes wrong on a real cable ends in a named error, and connections made anew work again."""

from __future__ import annotations

import errno
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig, providers
from tests.unit.network_ends import ARRIVED, DOWN, UP, End, Event, as_member, join

RETRIES_S = 15.0
"""After which a write to a peer that is not there has failed: 8 tries, each up to 4 x 67 ms, on a slow machine."""
CARD_BYTES = 56


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def netem(*words: str) -> None:
    """Delay, loss: of both ends of the cable; none: as before."""
    for device in ("v0", "v1"):
        command = ["tc", "qdisc", "replace", "dev", device, "root", *(("netem", *words) if words else ("pfifo",))]
        subprocess.run(command, check=True, timeout=10)


@pytest.fixture
def cable() -> Iterator[None]:
    """Whole again afterwards."""
    yield
    netem()
    for device in ("v0", "v1"):
        ip("link", "set", device, "up")


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with End(0, provider="verbs") as one, End(1, provider="verbs") as two:
        join(one, two)
        one.push(1, 0, 8, 0)
        two.push(0, 0, 8, 0)
        two.until(lambda events: (0, ARRIVED, 0) in events)
        one.until(lambda events: (1, ARRIVED, 0) in events)
        yield one, two


def down(events: list[Event]) -> bool:
    return any(kind == DOWN for _, kind, _ in events)


def again(one: End, two: End) -> None:
    """Connections are made anew, and carry what is sent."""
    for end in (one, two):
        end.events.clear()
    join(one, two)
    one.push(1, 0, 5000, 77)
    two.until(lambda events: (0, ARRIVED, 77) in events)
    assert two.mirror(0)[:5000] == one.own.raw[:5000]


def test_a_cut_cable_is_a_named_error_and_a_whole_one_works_again(ends: tuple[End, End], cable: None) -> None:
    one, two = ends
    netem("loss", "100%")
    one.push(1, 0, 5000, 1)
    one.until(down, RETRIES_S)
    assert (1, DOWN, errno.ETIMEDOUT) in one.events
    assert "transport retry counter exceeded" in one.channel.why(1)
    one.quiet(1)  # what was out is given up
    two.until(down)  # its peer has closed the lane
    netem()
    again(one, two)


def test_a_port_that_goes_down_is_named_in_the_error(ends: tuple[End, End], cable: None) -> None:
    one, two = ends
    ip("link", "set", "v0", "down")
    time.sleep(0.3)
    one.push(1, 0, 5000, 1)
    one.until(down, RETRIES_S)
    assert "before that: port error (port 1)" in one.channel.why(1)
    one.quiet(1)
    two.until(down)
    ip("link", "set", "v0", "up")
    ip("route", "replace", "10.77.0.2", "dev", "v0", "src", "10.77.0.1", "table", "100")  # went with the link
    ip("neighbour", "replace", "10.77.0.2", "lladdr", "02:00:00:00:00:02", "dev", "v0", "nud", "permanent")
    time.sleep(0.5)
    again(one, two)


def test_a_cable_that_is_back_before_the_retries_are_used_up_ends_nothing(ends: tuple[End, End], cable: None) -> None:
    one, two = ends
    netem("loss", "100%")
    one.push(1, 0, 5000, 1)
    time.sleep(0.1)
    netem()
    two.until(lambda events: (0, ARRIVED, 1) in events, RETRIES_S)
    assert one.kinds(1) == two.kinds(0) == [UP]


@pytest.mark.parametrize("provider", ["verbs", "libfabric(tcp;ofi_rxm)", "tcp"])
def test_delay_and_loss_cost_time_and_nothing_else(provider: str, cable: None) -> None:
    netem("delay", "1ms", "loss", "1%", "limit", "10000")
    number = 300
    with (
        End(0, provider=provider, listen="10.77.0.1:0") as one,
        End(1, provider=provider, listen="10.77.0.2:0") as two,
    ):
        join(one, two)
        for imm in range(number):
            one.push(1, imm * 100, 3000, imm)
            two.push(0, imm * 100, 3000, imm)
        for end, rank in ((one, 1), (two, 0)):
            end.until(lambda events: sum(kind == ARRIVED for _, kind, _ in events) == number, 60)
            assert sorted(end.arrived(rank)) == list(range(number))
            end.quiet(rank, 30)
        assert one.kinds(1) == two.kinds(0) == [UP]


@pytest.mark.parametrize("words", [b"\0" * CARD_BYTES, b"GET / HTTP/1.1\r\n" * 4, b"\xff" * (CARD_BYTES + 1)])
def test_a_card_that_is_none_ends_the_lane(words: bytes) -> None:
    with End(1, provider="verbs") as end:
        lane, control = as_member(end, 0)
        end.until(lambda events: events == [(0, UP, 0)])
        lane.sendall(words)
        end.until(lambda events: (0, DOWN, errno.EPROTO) in events)
        assert "card" in end.channel.why(0)
        lane.close()
        control.close()


def test_a_peer_that_never_answers_holds_nothing_up() -> None:
    """It joined and sent no card: writes wait for it, and end with it."""
    with End(1, provider="verbs") as end:
        lane, control = as_member(end, 0)
        end.until(lambda events: events == [(0, UP, 0)])
        end.push(0, 0, 100, 1)
        time.sleep(0.3)
        assert not end.channel.is_quiet(1)
        lane.close()
        end.until(down)
        end.quiet(0)
        control.close()


def test_a_queue_pair_that_is_not_there_is_a_named_error() -> None:
    with End(1, provider="verbs") as end:
        lane, control = as_member(end, 0)
        card = bytearray(receive(lane, CARD_BYTES))
        card[4:8] = (0xABCDE).to_bytes(4, "little")  # its own card, with the number of no queue pair
        lane.sendall(bytes(card) + b"\x01")
        end.until(lambda events: events == [(0, UP, 0)])
        end.push(0, 0, 100, 1)
        end.until(down, RETRIES_S)
        assert (0, DOWN, errno.ETIMEDOUT) in end.events
        assert "retry counter exceeded" in end.channel.why(0)
        control.close()


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        found += connection.recv(num_bytes - len(found))
    return found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"devices": ("mlx5_9",)}, "expected one of the devices mlx5_9, found none"),
        ({"devices": ("rxe0:2",)}, "expected one of the devices rxe0:2, found none"),
        ({"gid_index": 200}, "has no GID 200"),
    ],
)
def test_what_cannot_be_used_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TransportError, match=words):
        providers.check(NetworkConfig(provider="verbs", **fields))


def test_what_is_found_and_chosen_is_told() -> None:
    found = {port.name: port for port in providers.devices("verbs")}
    assert set(found) == {"rxe0:1", "rxe1:1"}
    assert (found["rxe0:1"].gid, found["rxe0:1"].state) == ("::ffff:10.77.0.1", "active")
    said = providers.check(NetworkConfig(provider="verbs", devices=("rxe1",), mtu=1024))
    assert said.startswith("verbs: rxe1:1 (RoCE, from network.devices), GID ")
    assert said.endswith("::ffff:10.77.0.2 (RoCE v2 with an IPv4 address), MTU 1024")
    assert 0 < providers.ping(NetworkConfig(provider="verbs"), 20).median_us < 1e6


def test_a_port_that_is_down_is_named(cable: None) -> None:
    ip("link", "set", "v1", "down")
    time.sleep(0.5)
    with pytest.raises(TransportError, match="port 1 of rxe1 is down, expected active"):
        providers.check(NetworkConfig(provider="verbs", devices=("rxe1",)))


def test_too_little_memory_that_may_be_locked_is_named() -> None:
    """In a process without the right to lock any amount."""
    code = (
        "import resource, sys; sys.path.insert(0, 'tests/rxe'); import inside; "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); "
        "from ep_kernels.network import NetworkConfig, providers; providers.check(NetworkConfig(provider='verbs'))"
    )
    unable = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    command = [*unable, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "this rank needs 131072 bytes of locked memory, RLIMIT_MEMLOCK is 65536; raise it" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
