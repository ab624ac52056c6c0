"""In a process with the fake libibverbs: each thing that goes wrong at a queue pair, a queue, a port or a device ends
in a named error, and connections made anew, with new queue pairs, carry bytes again. Run by test_fake_verbs.py."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Iterator

import pytest

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig, providers
from tests import fake_verbs
from tests.fake_verbs import Fake
from tests.unit.network_ends import ARRIVED, DOWN, UP, End, Event, join

SOON_S = 3.0
IMM = 77


@pytest.fixture(autouse=True)
def fake() -> Iterator[Fake]:
    with fake_verbs.healed() as made:
        yield made


@pytest.fixture
def ends(fake: Fake) -> Iterator[tuple[End, End]]:
    """Joined, each by a device of its own; what fails does so soon."""
    for device in (0, 1):
        fake.set(device, patience_ms=200)
    with End(0, provider="verbs", devices=("fake0",)) as one, End(1, provider="verbs", devices=("fake1",)) as two:
        join(one, two)
        carries(one, two, 5)
        yield one, two


def carries(one: End, two: End, imm: int) -> None:
    """Bytes of both arrive."""
    one.push(1, 0, 5000, imm)
    two.push(0, 0, 40, imm)
    for end, other in ((one, two), (two, one)):
        end.until(lambda events: (other.rank, ARRIVED, imm) in events, SOON_S)  # noqa: B023
    assert two.mirror(0)[:5000] == one.own.raw[:5000]


def is_down(events: list[Event]) -> bool:
    return any(kind == DOWN for _, kind, _ in events)


def ends_named(one: End, two: End, error: int, words: str) -> None:
    """Both see the end, `one` by that name; what was out is given up; and then all is as new."""
    one.until(is_down, SOON_S)
    assert (1, DOWN, error) in one.events
    assert words in one.channel.why(1)
    one.quiet(1, SOON_S)
    two.until(is_down, SOON_S)
    assert one.channel.up() == two.channel.up() == 0


def again(one: End, two: End, imm: int = IMM) -> None:
    """Connections are made anew, and carry what is sent."""
    for end in (one, two):
        end.events.clear()
    join(one, two)
    carries(one, two, imm)
    assert one.kinds(1) == two.kinds(0) == [UP]


def test_a_peer_that_is_not_ready_for_ever(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(1, not_ready=1000)
    one.push(1, 0, 5000, 1)
    ends_named(one, two, errno.ENOBUFS, "RNR retry counter exceeded")
    fake.heal()
    again(one, two)


def test_a_peer_that_is_not_ready_for_a_while(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(1, not_ready=4)
    carries(one, two, IMM)
    assert one.kinds(1) == two.kinds(0) == [UP]


def test_a_cut_cable(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(0, cut=1)
    begun = time.monotonic()
    for imm in range(200):  # more than the window: what waits is given up, too
        one.push(1, 0, 5000, imm)
    ends_named(one, two, errno.ETIMEDOUT, "transport retry counter exceeded")
    assert time.monotonic() - begun < SOON_S
    fake.heal()
    again(one, two, 777)


@pytest.mark.parametrize(("timeout_s", "is_said"), [(1.5, True), (2.0, False)])
def test_a_deadline_that_is_over_before_the_retries_is_said(
    timeout_s: float, is_said: bool, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    with End(0, provider="verbs", devices=("fake0",), timeout_s=timeout_s):
        words = "timeout_s is 1.5, and verbs repeats a packet for up to 1.9 s: a broken link ends in the deadline"
        assert (words in caplog.text) == is_said


def test_a_port_that_goes_down_is_named(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(0, port_down=1)
    fake.event(0, fake_verbs.PORT_DOWN)
    one.push(1, 0, 5000, 1)
    ends_named(one, two, errno.ETIMEDOUT, "before that: port error (port 1)")
    fake.heal()
    fake.event(0, fake_verbs.PORT_UP)
    again(one, two)


def test_a_port_that_flaps_ends_nothing(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(0, patience_ms=3000)
    for number in range(3):
        fake.set(0, port_down=1)
        fake.event(0, fake_verbs.PORT_DOWN)
        one.push(1, 0, 5000, 100 + number)
        time.sleep(0.05)
        fake.set(0, port_down=0)
        fake.event(0, fake_verbs.PORT_UP)
        two.until(lambda events: (0, ARRIVED, 100 + number) in events, SOON_S)  # noqa: B023
    assert one.kinds(1) == two.kinds(0) == [UP]


@pytest.mark.parametrize("busy", [False, True])
def test_a_queue_pair_in_error(busy: bool, ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(1, not_ready=int(busy) * 5)
    for imm in range(100 * busy):
        one.push(1, 0, 5000, imm)
    fake.event(0, fake_verbs.PAIR_FATAL)
    one.until(is_down, SOON_S)
    assert one.events[-1] == (1, DOWN, errno.EIO)
    assert "local work queue catastrophic error" in one.channel.why(1)
    one.quiet(1, SOON_S)
    two.until(is_down, SOON_S)
    fake.heal()
    again(one, two)


def test_a_device_in_error_is_opened_anew(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.event(0, fake_verbs.DEVICE_FATAL)
    ends_named(one, two, errno.ENODEV, "verbs: local catastrophic error")
    again(one, two)
    fake.event(1, fake_verbs.DEVICE_FATAL)
    two.until(is_down, SOON_S)
    one.until(is_down, SOON_S)
    again(one, two)


def test_a_completion_queue_that_overran(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.event(0, fake_verbs.QUEUE_ERROR)
    ends_named(one, two, errno.ENODEV, "verbs: CQ error")
    again(one, two)


def test_a_device_that_is_gone_and_comes_back(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(0, absent=1)
    fake.event(0, fake_verbs.DEVICE_FATAL)
    ends_named(one, two, errno.ENODEV, "verbs: local catastrophic error")
    for _ in range(3):
        with pytest.raises(
            TransportError, match="rank 1 cannot be joined: verbs: expected one of the devices fake0, found"
        ):
            one.channel.connect({1: two.ticket()}, SOON_S)
    assert two.kinds(0) == [UP, DOWN], "what the other end gave up never stood"
    fake.heal()
    again(one, two)


def test_a_peer_that_cannot_join_is_named_at_once(
    ends: tuple[End, End], fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = ends
    fake.set(1, absent=1)
    fake.event(1, fake_verbs.DEVICE_FATAL)
    two.until(is_down, SOON_S)
    one.until(is_down, SOON_S)
    begun = time.monotonic()
    with pytest.raises(PeerTimeout, match="it ended the connection before it had joined"):
        one.channel.connect({1: two.ticket()}, 10 * SOON_S)
    assert time.monotonic() - begun < SOON_S
    assert one.kinds(1) == [UP, DOWN]
    words = "not admitted: network: rank 0 cannot be joined: verbs: expected one of the devices fake1"
    End.poll(lambda: words in caplog.text, SOON_S)
    fake.heal()
    again(one, two)


def test_a_write_where_none_is_allowed(ends: tuple[End, End], fake: Fake) -> None:
    one, two = ends
    fake.set(1, denied=1)
    one.push(1, 0, 100, 1)
    ends_named(one, two, errno.EACCES, "remote access error")
    assert two.arrived(0) == [5]
    again(one, two)


def test_lanes_end_together_and_come_again(fake: Fake) -> None:
    fields = {"provider": "verbs", "lanes": 3}
    with End(0, devices=("fake0",), **fields) as one, End(1, devices=("fake1",), **fields) as two:
        join(one, two)
        for turn in range(3):
            carries(one, two, turn)
            fake.event(turn % 2, fake_verbs.PAIR_FATAL)
            one.until(is_down, SOON_S)
            two.until(is_down, SOON_S)
            for end in (one, two):
                end.events.clear()
            join(one, two)
        carries(one, two, IMM)


@pytest.mark.parametrize("lanes", [(1, 16), (16, 1), (4, 3)])
def test_unequal_numbers_of_lanes_overrun_no_queue(lanes: tuple[int, int], fake: Fake) -> None:
    """A completion queue has room for the lanes of its own side."""
    stripe, fields = 256 << 10, {"provider": "verbs", "size": 16 * (256 << 10)}
    with (
        End(0, lanes=lanes[0], devices=("fake0",), **fields) as one,
        End(1, lanes=lanes[1], devices=("fake1",), **fields) as two,
    ):
        join(one, two)
        for imm in range(1600):
            for end, other in ((one, 1), (two, 0)):
                end.push(other, imm % 16 * stripe, 64, imm)
        for end, other in ((one, 1), (two, 0)):
            end.until(lambda _: len(end.arrived(other)) == 1600)  # noqa: B023
            assert end.kinds(other) == [UP]


@pytest.mark.parametrize("after", [0, 1])
def test_a_registration_that_is_refused(after: int, fake: Fake) -> None:
    """Of the region when the rank starts, of a mirror when it joins."""
    fake.set(0, refused=errno.ENOMEM, granted=after)
    with End(1, provider="verbs", devices=("fake1",)) as two:
        if after == 0:
            with pytest.raises(
                TransportError, match="network: verbs: 65536 bytes cannot be registered: Cannot allocate"
            ):
                End(0, provider="verbs", devices=("fake0",))
            return
        with End(0, provider="verbs", devices=("fake0",)) as one:
            with pytest.raises(
                TransportError, match="rank 1 cannot be joined: verbs: 65536 bytes cannot be registered"
            ):
                one.channel.connect({1: two.ticket()}, SOON_S)
            fake.heal()
            join(one, two)
            carries(one, two, IMM)


def test_too_little_memory_that_may_be_locked(fake: Fake) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fake.set(0, refused=errno.ENOMEM)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        with pytest.raises(
            TransportError, match=r"needs 131072 bytes of locked memory, RLIMIT_MEMLOCK is 65536; raise"
        ):
            End(0, provider="verbs")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_what_cannot_be_used_is_named(fake: Fake) -> None:
    for fields, words in (
        ({"devices": ("fake0",), "gid_index": 9}, "port 1 of fake0 has no GID 9"),
        ({"devices": ("mlx5_0",)}, "expected one of the devices mlx5_0, found none of them"),
        ({"devices": ("fake1:2",)}, "expected one of the devices fake1:2, found none"),
    ):
        with pytest.raises(TransportError, match=words):
            providers.check(NetworkConfig(provider="verbs", **fields))
    fake.set(0, port_down=1)
    with pytest.raises(TransportError, match="port 1 of fake0 is down, expected active"):
        providers.check(NetworkConfig(provider="verbs", devices=("fake0",)))
    fake.set(1, max_completions=16)
    with pytest.raises(TransportError, match="completion queue holds 16 entries, too few for 1 lanes"):
        providers.check(NetworkConfig(provider="verbs"))
    fake.set(0, absent=1)
    fake.set(1, absent=1)
    with pytest.raises(TransportError, match="verbs: no RDMA device here"):
        providers.check(NetworkConfig(provider="verbs"))


def test_what_is_chosen_is_told(fake: Fake) -> None:
    assert [port.name for port in providers.devices("verbs")] == ["fake0:1", "fake1:1"]
    fake.set(0, port_down=1)
    said = providers.check(NetworkConfig(provider="verbs"))
    assert said.startswith("verbs: fake1:1 (RoCE, the first active port), GID 1 ::ffff:")
    assert 0 < providers.ping(NetworkConfig(provider="verbs"), 20).median_us < 1e6


def test_a_wrong_gid_of_the_peer_is_a_named_error(fake: Fake) -> None:
    """The link-local GID of a device that nothing answers at: that of a process that is gone."""
    fake.set(0, patience_ms=200)
    with End(0, provider="verbs", gid_index=0) as one, End(1, provider="verbs", devices=("fake1",)) as two:
        assert "GID 0 fe80::" in one.channel.about
        join(one, two)
        fake.set(1, cut=1)
        one.push(1, 0, 100, 1)
        ends_named(one, two, errno.ETIMEDOUT, "transport retry counter exceeded")
