"""Ring, proxy and providers through Python: bytes land where they were, each message once, whoever is slow or gone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing as mp
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ep_kernels.errors import ArgumentError
from ep_kernels.network import greeting
from ep_kernels.network.greeting import NetworkTicket
from tests.tools import needs
from tests.unit.network_ends import ARRIVED, DOWN, IN_GUEST, JOINED, LEFT_OUT, UP, WAIT_S, End, Event, as_member, join

PROVIDERS = ["tcp", "shuffle(tcp)"]
OF_LIBRARIES = [pytest.param("libfabric(tcp;ofi_rxm)", marks=needs("libfabric"))]
MANY = [("tcp", 1), ("tcp", 3), ("shuffle(tcp)", 2)]
ONE = ["tcp"]
UNTOUCHED = b"\xee"
MARK = 0xCD17 << 48
STRIPE = 256 << 10
"""Of `cd::Outbox` with several lanes: the bytes of one go one way, and no message crosses two."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ends`: by each provider. `carrier`: one of them, or of libraries that are here. `many`: a provider and lanes.
    `one_provider`: a single one, sockets if we may."""
    given = metafunc.config.getoption("--provider") or []
    if "ends" in metafunc.fixturenames:
        metafunc.parametrize("ends", given or PROVIDERS, indirect=True)
    if "many" in metafunc.fixturenames:
        metafunc.parametrize("many", [(name, lanes) for name in given for lanes in (1, 3)] or MANY)
    if "carrier" in metafunc.fixturenames:
        metafunc.parametrize("carrier", given or [*PROVIDERS, *OF_LIBRARIES])
    if "one_provider" in metafunc.fixturenames:
        metafunc.parametrize("one_provider", given or ONE)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    """Two, joined."""
    with End(0, provider=request.param) as one, End(1, provider=request.param) as two:
        join(one, two)
        yield one, two


def last(events: list[Event]) -> Event:
    return events[-1] if events else (-1, -1, 0)


def fill(end: End, seed: int) -> None:
    """Random bytes as its memory."""
    ctypes.memmove(end.own, random.Random(seed).randbytes(end.size), end.size)


def test_bytes_land_at_equal_offsets(ends: tuple[End, End]) -> None:
    one, two = ends
    fill(one, 1)
    pieces = [(0, 1), (8, 4000), (5000, 20_000), (one.size - 7, 7)]
    for number, (offset, num_bytes) in enumerate(pieces):
        one.push(1, offset, num_bytes, 0xF0000000 + number)
    two.until(lambda events: len(events) == 1 + len(pieces))
    assert sorted(two.arrived(0)) == [0xF0000000 + number for number in range(len(pieces))]
    expected = bytearray(UNTOUCHED * one.size)
    for offset, num_bytes in pieces:
        expected[offset : offset + num_bytes] = one.own.raw[offset : offset + num_bytes]
    assert two.mirror(0) == bytes(expected)
    assert two.mirror(1) == UNTOUCHED * two.size
    assert one.mirror(1) == UNTOUCHED * one.size, "nothing was sent this way"


def test_messages_without_bytes(ends: tuple[End, End]) -> None:
    one, two = ends
    for imm in range(100):
        one.push(1, 0, 0, imm)
        two.push(0, 0, 0, imm)
    for end, rank in ((one, 1), (two, 0)):
        end.until(lambda events: len(events) == 101)
        assert Counter(end.arrived(rank)) == Counter(range(100))
        assert end.mirror(rank) == UNTOUCHED * end.size


def test_twenty_thousand_messages_each_arrive_once(many: tuple[str, int]) -> None:
    provider, lanes = many
    draw, number = random.Random(7), 20_000 if "tcp" in provider else 4000
    fields: dict[str, Any] = {"provider": provider, "lanes": lanes}
    if lanes > 1:
        fields["size"] = 8 * STRIPE
    with End(0, **fields, seed=3) as one, End(1, **fields, seed=4) as two:
        join(one, two)
        fill(one, 2)
        for imm in range(number):
            num_bytes = draw.choice((0, 1, 16, 100, 3000, draw.randrange(20_000)))
            offset = draw.randrange(one.size - num_bytes + 1)
            one.push(1, offset, min(num_bytes, STRIPE - offset % STRIPE), imm)
        two.until(lambda events: len(events) > number, 60)
        one.quiet(1)
        arrived = two.arrived(0)
        assert Counter(arrived) == Counter(range(number))
        if provider in {"tcp", "shuffle(tcp)"}:
            assert (arrived != sorted(arrived)) == (lanes > 1 or "shuffle" in provider)
        got = two.mirror(0)
        assert all(byte in (mine, 0xEE) for byte, mine in zip(got, one.own.raw, strict=True))
        sent, received = one.channel.traffic()[1], two.channel.traffic()[0]
        assert sent.sent_messages == received.received_messages == number


def test_whether_connections_stand_is_known_while_the_proxy_stands_still() -> None:
    """As where a driver or a library does: else ranks would take standing connections for lost, and dial anew."""
    with End(0) as one, End(1) as two:
        join(one, two)
        one.may_hear.clear()
        two.push(0, 0, 4, 1)
        time.sleep(0.2)  # the handler is within the proxy's mutex by then
        assert one.channel.up() == 2
        assert [peer.received_messages for peer in one.channel.traffic()] == [0, 0]
        one.may_hear.set()
        one.until(lambda events: one.arrived(1) == [1])


def test_a_message_larger_than_every_buffer(one_provider: str) -> None:
    size = 32 << 20 if one_provider == "tcp" else 4 << 20
    with End(0, size=size, provider=one_provider) as one, End(1, size=size, provider=one_provider) as two:
        join(one, two)
        fill(one, 3)
        one.push(1, 0, size, 1)
        two.push(0, 0, size, 2)
        for end, rank in ((one, 1), (two, 0)):
            end.until(lambda events: len(events) == 2)
            assert end.arrived(rank)
        assert two.mirror(0) == one.own.raw


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("=QII", MARK | (1 << 16) - 3, 4, 9) + b"evil",
        struct.pack("=QII", MARK | (1 << 16), 1, 9) + b"e",
        struct.pack("=QII", MARK | (1 << 48) - 1, 0xFFFFFFFF, 9) + b"e",
        struct.pack("=QII", MARK | 0, 0xFFFFFFFF, 9) + b"evil",
        struct.pack("=QII", 0, 4, 9) + b"evil",
        b"\0" * 16,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_frame_outside_of_the_mirror_ends_the_connection(frame: bytes) -> None:
    with End(1) as end:
        lane, control = as_member(end, 0)
        end.until(lambda events: events == [(0, UP, 0)])
        lane.sendall(struct.pack("=QII", MARK | 10, 2, 5) + b"ok" + frame)
        end.until(lambda events: (0, DOWN, 71) in events)  # EPROTO
        assert end.events[1:] == [(0, ARRIVED, 5), (0, DOWN, 71)]
        assert end.mirror(0) == UNTOUCHED * 10 + b"ok" + UNTOUCHED * (end.size - 12)
        assert end.mirror(1) == UNTOUCHED * end.size
        assert end.channel.up() == 0
        lane.close()
        control.close()


def test_an_order_outside_of_the_own_memory_is_not_carried_out(ends: tuple[End, End]) -> None:
    one, two = ends
    one.push(1, one.size - 3, 4, 1)
    one.until(lambda events: last(events)[1:] == (DOWN, errno.EINVAL))
    two.until(lambda events: last(events)[1] == DOWN)
    assert two.arrived(0) == []
    assert f"cannot be carried out (Invalid argument): 4 bytes at {one.size - 3} to rank 1 of 2" in one.channel.why(1)


@pytest.mark.parametrize("rank", [2, 63, 64, 127])
@pytest.mark.parametrize("is_device", [False, True])
def test_a_descriptor_of_no_rank_ends_all_connections(rank: int, is_device: bool) -> None:
    """It may have been meant for any; nothing beside the peers is read, in memory that ends where the ranks do."""
    with End(0, provider="tcp", spin_us=1_000_000) as one, End(1, provider="tcp") as two:  # nothing wakes the proxy
        ring = one.channel.for_device(STRIPE).ring if is_device else one.channel.outbox
        join(one, two)
        first = (ctypes.c_uint64 * 2).from_address(ring)
        first[0], first[1] = 8, 1 << 63 | rank << 48  # bytes, then what makes it valid (native/ring.hpp)
        for end in (one, two):
            end.until(lambda events: last(events)[1] == DOWN)
        assert last(one.events) == (1, DOWN, errno.EINVAL)
        assert f"(Invalid argument): 8 bytes at 0 to rank {rank} of 2" in one.channel.why(1)
        assert two.arrived(0) == []


def test_a_push_to_no_rank_is_refused() -> None:
    with End(0, provider="tcp") as end:
        for rank in (-1, 2, 256):
            with pytest.raises(ArgumentError, match=rf"rank: expected 0\.\.1, got {rank}"):
                end.channel.push(rank, 0, 8, 1)


@pytest.mark.parametrize("outside", [-8, -4, 65532, 1 << 40])
def test_what_goes_to_a_rank_lies_in_its_box(outside: int, one_provider: str) -> None:
    """It lands where it lay in the box; what lies outside, even in part, is not sent."""
    with End(0, boxed=True, provider=one_provider) as one, End(1, boxed=True, provider=one_provider) as two:
        join(one, two)
        ctypes.memmove(one.own, random.Random(5).randbytes(2 * one.size), 2 * one.size)
        one.push(1, one.size + 100, 200, 1)
        one.push(1, 0, 0, 2)
        two.until(lambda _: sorted(two.arrived(0)) == [1, 2])
        sent = one.own.raw[one.size + 100 : one.size + 300]
        assert two.mirror(0) == UNTOUCHED * 100 + sent + UNTOUCHED * (two.size - 300)
        one.push(1, one.size + outside, 8, 3)
        two.until(lambda events: last(events)[1] == DOWN)
        assert sorted(two.arrived(0)) == [1, 2]


def test_a_connection_that_an_end_gives_up_never_stood() -> None:
    """It has proved membership, and could not join: the owner hears of it neither that it stands nor of its end."""
    with End(1) as end:
        pointer, lib = end.channel.pointer, end.network.lib
        for _ in range(2):
            given_up = as_member(end, 0, joins=False)
            End.poll(lambda: lib.cn_joined(pointer) == 1, WAIT_S)
            assert end.channel.up() == 0
            for connection in given_up:
                connection.close()
            End.poll(lambda: lib.cn_joined(pointer) == 0, WAIT_S)
        assert end.events == []
        late = as_member(end, 0, joins=False)
        with late[0] as lane, late[1] as control:
            lane.sendall(struct.pack("=QII", MARK, 0, 5))  # before the word comes that it has joined
            end.until(lambda events: events == [(0, UP, 0), (0, ARRIVED, 5)])
            control.sendall(JOINED)
            lane.sendall(struct.pack("=QII", MARK, 0, 6))
            end.until(lambda _: end.arrived(0) == [5, 6])
            assert end.kinds(0) == [UP]


def test_one_that_stood_has_ended_though_the_one_in_its_place_never_stood() -> None:
    with End(1) as end:
        first = as_member(end, 0)
        end.until(lambda events: events == [(0, UP, 0)])
        second = as_member(end, 0, joins=False)
        End.poll(lambda: end.channel.up() == 0, WAIT_S)
        assert end.events == [(0, UP, 0)], "who dials anew may join yet"
        for connection in (*second, *first):
            connection.close()
        end.until(lambda _: end.kinds(0) == [UP, DOWN])


def test_half_a_message_is_no_message() -> None:
    with End(1) as end:
        lane, control = as_member(end, 0)
        lane.sendall(struct.pack("=QII", MARK, 1000, 5) + b"x" * 999)
        lane.close()
        end.until(lambda events: last(events)[1] == DOWN)
        assert end.arrived(0) == []
        control.close()


def test_who_lost_its_connections_may_come_again(ends: tuple[End, End]) -> None:
    one, two = ends
    one.channel.leave(1, 9)
    two.until(lambda events: last(events) == (0, LEFT_OUT, 9))
    assert one.channel.up() == two.channel.up() == 0
    assert one.kinds(1) == [UP], "who leaves needs no news of it"
    one.push(1, 0, 10, 1)  # to nobody: given up at once
    one.quiet(1)
    join(one, two)
    one.push(1, 0, 10, 2)
    two.until(lambda events: last(events) == (0, ARRIVED, 2))
    assert two.arrived(0) == [2]


def test_connections_that_the_other_end_has_lost_are_made_anew(ends: tuple[End, End]) -> None:
    """As `set_active` does it whose words say that they have ended there, though they seem to stand here."""
    tickets = [end.ticket() for end in ends]
    for _ in range(3):
        with ThreadPoolExecutor(2) as both:
            made = [both.submit(ends[r].channel.connect, {1 - r: tickets[1 - r]}, WAIT_S, [1 - r]) for r in range(2)]
        assert [one.result() for one in made] == [None, None]
    ends[0].until(lambda _: ends[0].kinds(1).count(UP) == 4)
    for end in ends:
        end.push(1 - end.rank, 0, 8, 5)
        ends[1 - end.rank].until(lambda _, end=end: ends[1 - end.rank].arrived(end.rank) == [5])


def test_close_delivers_what_was_sent(ends: tuple[End, End]) -> None:
    one, two = ends
    fill(one, 4)
    for imm in range(200):
        one.push(1, 0, one.size, imm)
        two.push(0, 0, two.size, imm)  # unread bytes in a socket would reset it
    one.quiet(1)
    one.close()
    two.until(lambda events: len(two.arrived(0)) == 200)
    until = time.monotonic() + WAIT_S
    while two.channel.up() and time.monotonic() < until:
        time.sleep(0.005)
    assert two.channel.up() == 0
    assert two.kinds(0) == [UP], "an end in order is no loss"
    assert two.mirror(0) == one.own.raw


def test_close_delivers_to_a_peer_that_is_behind(carrier: str) -> None:
    """All of it is under way before the peer looks, and this end closes as soon as it counts as sent."""
    number = 64
    with End(0, provider=carrier) as one, End(1, provider=carrier) as two:
        join(one, two)
        for imm in range(number):
            two.push(0, 0, two.size, imm)  # what is unread as a socket closes resets it
        two.may_hear.clear()
        for imm in range(number):
            one.push(1, 0, one.size, imm)
        threading.Timer(0.3, two.may_hear.set).start()
        one.quiet(1)
        one.close()
        two.until(lambda events: len(two.arrived(0)) == number)
        assert two.kinds(0) == [UP]


def test_what_was_sent_may_be_read_for_as_long_as_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket closed with unread bytes in it resets the connection, and what its peer has not received yet is lost."""
    monkeypatch.setattr(greeting, "LEAST_PATIENCE_S", 0.2)
    for timeout_s in (0.1, 1.0):
        with End(1, timeout_s=timeout_s) as end:
            lane, control = as_member(end, 0)
            end.until(lambda events: events == [(0, UP, 0)])
            begun = time.monotonic()
            end.channel.close()
            assert lane.recv(1) == b"", "nothing more comes"
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while time.monotonic() < begun + WAIT_S:
                    lane.sendall(b"x")
                    time.sleep(0.01)
            took_s = time.monotonic() - begun
            assert max(timeout_s, 0.2) <= took_s < max(timeout_s, 0.2) + 3.0
            lane.close()
            control.close()


def live(pipe: Connection, how: str, provider: str) -> None:
    """A process that is rank 1; `how` it ends."""
    end = End(1, 3, shared=True, provider=provider)
    pipe.send(end.ticket())
    tickets: dict[int, NetworkTicket] = pipe.recv()
    end.channel.connect(tickets, WAIT_S)
    pipe.send("joined")
    if how == "forks" and os.fork() == 0:
        assert end.channel.up() == 0
        pipe.send("child")
        time.sleep(60)
        os._exit(0)
    pipe.recv()
    os._exit(0)


class Other:
    """Rank 1 as a process of its own."""

    def __init__(self, *ends: End, how: str = "", provider: str = "tcp") -> None:
        context = mp.get_context("spawn")  # without torch, which the network must not need
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=live, args=(there, how, provider), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(60)
        ticket = self.pipe.recv()
        self.pipe.send({end.rank: end.ticket() for end in ends})
        for end in ends:
            end.channel.connect({1: ticket}, WAIT_S)
        assert self.pipe.poll(WAIT_S)
        assert self.pipe.recv() == "joined"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self, stack: contextlib.ExitStack) -> None:
        """Stop it, and kill it at the end whatever fails: pytest would wait at its exit for a stopped process."""
        stack.callback(self.kill)
        os.kill(self.pid, signal.SIGSTOP)


def test_a_peer_that_stands_still_delays_nobody_else(one_provider: str) -> None:
    with (
        End(0, 3, provider=one_provider) as one,
        End(2, 3, provider=one_provider) as three,
        contextlib.ExitStack() as stack,
    ):
        other = Other(one, three, provider=one_provider)
        join_pair(one, three)
        other.stop(stack)
        begun = time.monotonic()
        for imm in range(2000):  # 128 MB that nobody reads
            one.push(1, 0, one.size, imm)
            if imm % 10 == 0:
                one.push(2, 0, 8, imm)
        three.until(lambda events: len(three.arrived(0)) == 200)
        assert time.monotonic() - begun < WAIT_S
        one.quiet(2)  # a completion may come after the bytes
        assert not one.channel.is_quiet(1 << 1)
        one.channel.leave(1, 1)
        one.quiet(1)


def join_pair(one: End, other: End) -> None:
    """Connections between those two, whoever else there is."""
    thread = threading.Thread(target=other.channel.connect, args=({one.rank: one.ticket()}, WAIT_S))
    thread.start()
    one.channel.connect({other.rank: other.ticket()}, WAIT_S)
    thread.join()


@pytest.mark.parametrize("how", ["", "forks"])
def test_a_dead_process_is_seen_at_once_whatever_its_child_does(how: str, one_provider: str) -> None:
    with End(0, 3, provider=one_provider) as end:
        other = Other(end, how=how, provider=one_provider)
        if how:
            assert other.pipe.poll(WAIT_S)
            assert other.pipe.recv() == "child"
        begun = time.monotonic()
        other.kill()
        end.until(lambda events: last(events)[:2] == (1, DOWN))
        assert time.monotonic() - begun < 1.0
        assert end.channel.up() == 0


def test_a_proxy_wakes_when_kernels_are_launched(one_provider: str) -> None:
    """It sleeps though its ring is of a GPU, which cannot wake it; after `wake` it looks for work for `spin_us`, and
    for half a millisecond at least: kernels that it cannot see may be within an operation."""
    with End(0, provider=one_provider, spin_us=0) as one:
        asleep = ctypes.c_uint32.from_address(one.channel.for_device(STRIPE).popped + 64)  # native/ring.hpp
        time.sleep(0.1)
        assert asleep.value == 1, "also between two looks at the ring"
        longest_s, until = 0.0, time.monotonic() + WAIT_S
        while longest_s < 400e-6 and time.monotonic() < until:
            one.channel.wake()
            time.sleep(50e-6)
            begun = time.monotonic()
            while not asleep.value:
                longest_s = max(longest_s, time.monotonic() - begun)
        assert longest_s >= 400e-6


def rest(pipe: Connection, provider: str) -> None:
    """Two joined ends that have nothing to do, and then two into whose rings a GPU may push: shares of a processor."""
    shares = []
    for of_gpu in (False, True):
        with End(0, provider=provider) as one, End(1, provider=provider) as two:
            for end in (one, two):
                if of_gpu:
                    end.channel.for_device(1 << 30)
            join(one, two)
            one.push(1, 0, 100, 1)
            two.until(lambda events: (0, ARRIVED, 1) in events)
            time.sleep(0.7)
            shares.append(min(share_of_processor(0.5) for _ in range(4)))
    pipe.send(shares)


def share_of_processor(seconds: float) -> float:
    """What this process takes of one meanwhile. A host that is short of processors makes each wake-up dearer."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (time.monotonic() - begun)


def test_an_idle_network_needs_no_processor(one_provider: str) -> None:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=rest, args=(there, one_provider), daemon=True)
    process.start()
    assert here.poll(60)
    host, gpu = here.recv()
    slower = 8 if IN_GUEST else 1  # an emulated processor; 0.10 of it was seen where there were devices
    assert host < slower * 0.01
    assert gpu < slower * 2 * 0.015, "of each of two proxies; 0.012 was seen"
    process.join()


def test_a_closed_channel_takes_no_more_connections(ends: tuple[End, End]) -> None:
    """Another thread may still leave, or join, what this one has closed."""
    one, _ = ends
    pointer, lanes = one.channel.pointer, (ctypes.c_int32 * 1)(0)
    one.channel.close()
    assert one.network.lib.cn_join(pointer, 1, 0, lanes, 1) == errno.ECANCELED
    one.network.lib.cn_leave(pointer, 1, 2)
    assert one.network.lib.cn_up(pointer) == 0


class Held(End):
    """The proxy stands still at each message that has come until it may go on."""

    def __init__(self, rank: int, **fields: Any) -> None:
        self.may_go_on = threading.Semaphore(0)
        super().__init__(rank, **fields)

    def _on_event(self, context: Any, rank: int, kind: int, value: int) -> None:
        super()._on_event(context, rank, kind, value)
        if kind == ARRIVED:
            self.may_go_on.acquire(timeout=WAIT_S)


def test_what_comes_is_read_while_much_is_to_be_sent() -> None:
    """Else a rank would have sent all of its rows before it sees what it needs to place the others'."""
    with Held(1, size=8 << 20) as end:
        lane, control = as_member(end, 0)
        with lane, control:
            End.poll(lambda: end.channel.up() == 1, WAIT_S)
            lane.settimeout(0.5)
            lane.sendall(struct.pack("=QII", MARK, 0, 1))
            end.until(lambda _: end.arrived(0) == [1])
            for number in range(32):
                end.push(0, number * STRIPE, STRIPE, number)
            lane.sendall(struct.pack("=QII", MARK, 0, 2))
            end.may_go_on.release()
            end.until(lambda _: end.arrived(0) == [1, 2])
            sent = drained(lane)
            end.may_go_on.release()
            assert 0 < sent <= 4 * STRIPE, "of 32"


def drained(connection: socket.socket) -> int:
    """Bytes that come until there is a pause."""
    total = 0
    with contextlib.suppress(TimeoutError):
        while got := connection.recv(1 << 20):
            total += len(got)
    return total


def test_shuffle_delays_bytes_that_a_nic_has_read() -> None:
    """What is written to their place after the proxy has taken a write does not arrive with it."""
    count, size = 64, 1024
    with End(0, provider="shuffle(tcp)", lanes=2) as one, End(1, provider="shuffle(tcp)", lanes=2) as two:
        join(one, two)
        for turn in range(1, 21):
            one.own[: count * size] = bytes([turn]) * (count * size)
            for i in range(count):
                one.push(1, i * size, size, i)
            while one.channel.traffic()[1].sent_messages < count * turn:
                pass
            one.own[: count * size] = bytes([0xFF]) * (count * size)
            two.until(lambda events, turn=turn: len(two.arrived(0)) == count * turn)  # type: ignore[misc]
            assert two.mirror(0)[: count * size] == bytes([turn]) * (count * size)
