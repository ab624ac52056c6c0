"""The data port and those who are no members: whatever they send or do not send, it stays, and members get in."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ep_kernels.errors import AbortedError, ClosedError, PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig, dialer, greeting, handshake, listener
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.handshake import Greeting, KeyPair
from ep_kernels.network.listener import Listener, Registration
from ep_kernels.network.network import Network
from tests.unit.network_ends import MEMBER, WAIT_S, End, as_member, greet_as, hello_of, join, ticket_of

TOKEN, SECRET = 77, b"s" * handshake.SECRET_BYTES
SHORT_S = 0.3


class Port:
    """A listener with one registration, and who was admitted by it."""

    def __init__(self) -> None:
        self.listener = Listener("127.0.0.1:0")
        self.admitted: list[Greeting] = []
        self._changed = threading.Condition()
        self.keys = KeyPair()
        self.listener.open(TOKEN, Registration(SECRET, self.keys.pair, self._admit))

    def ticket(self, secret: bytes = SECRET, token: int = TOKEN) -> NetworkTicket:
        return ticket_of(self.listener.address, token, secret, self.keys.public)

    def hello(self, token: int = TOKEN, rank: int = 0) -> Greeting:
        return hello_of(self.ticket(token=token), rank, 1, of=MEMBER)

    def _admit(self, hello: Greeting, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self.admitted.append(hello)
            self._changed.notify_all()

    def dial(self) -> socket.socket:
        return socket.create_connection(self.listener.address, WAIT_S)

    def greet(self, secret: bytes = SECRET, token: int = TOKEN, rank: int = 0) -> None:
        """A member's handshake. Raises ValueError, OSError."""
        with self.dial() as connection:
            greet_as(connection, self.ticket(secret, token), self.hello(token, rank), MEMBER)

    def counted(self, why: str, number: int = 1) -> None:
        """Wait until so many were refused with this reason."""
        until = time.monotonic() + WAIT_S
        while self.listener.refused.get(why, 0) < number:
            assert time.monotonic() < until, self.listener.refused
            time.sleep(0.002)

    def is_open(self) -> None:
        """A member gets in."""
        before = len(self.admitted)
        self.greet(rank=5)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.admitted) > before, WAIT_S)
        assert self.admitted[-1].rank == 5


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(listener, "HANDSHAKE_S", SHORT_S)
    made = Port()
    yield made
    made.is_open()
    made.listener.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it, before long."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_garbage(port: Port) -> None:
    with port.dial() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"\x00\xff" * 50_000)
        assert is_closed(connection)
    port.counted("no hello")


def test_refused_connections_are_logged_and_do_not_fill_the_log(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(12):
        with port.dial() as connection:
            connection.sendall(b"\x1b" * handshake.HELLO_BYTES)
            assert is_closed(connection)
    port.counted("no hello", 12)
    where = "{}:{}".format(*port.listener.address)
    assert caplog.messages == [f"data port {where}: refused {number} connections: no hello" for number in (1, 10)]


@pytest.mark.parametrize("said", [0, 1, handshake.HELLO_BYTES - 1])
def test_silence_ends(port: Port, said: int) -> None:
    begun = time.monotonic()
    with port.dial() as connection:
        connection.sendall(port.hello().encode()[:said])
        assert is_closed(connection)
    assert SHORT_S * 0.9 <= time.monotonic() - begun < WAIT_S
    port.counted("silent")


def test_a_byte_now_and_then_wins_no_time(port: Port) -> None:
    begun = time.monotonic()
    with port.dial() as connection:
        with contextlib.suppress(OSError):
            for byte in port.hello().encode():
                connection.sendall(bytes([byte]))
                time.sleep(SHORT_S / 5)
        assert is_closed(connection)
    assert time.monotonic() - begun < WAIT_S
    port.counted("silent")


def test_silence_after_the_challenge(port: Port) -> None:
    with port.dial() as connection:
        connection.sendall(port.hello().encode())
        assert len(connection.recv(100)) == handshake.CHALLENGE_BYTES
        assert is_closed(connection)
    port.counted("silent")


def test_wrong_token(port: Port) -> None:
    with pytest.raises((ValueError, OSError)):
        port.greet(token=TOKEN + 1)
    port.counted("unknown group")


def test_wrong_secret(port: Port) -> None:
    with pytest.raises((ValueError, OSError)):
        port.greet(secret=b"t" * handshake.SECRET_BYTES)
    port.counted("wrong secret")
    assert port.admitted == []


def test_a_recorded_handshake_is_refused(port: Port) -> None:
    raw = port.hello().encode()
    with port.dial() as connection:
        connection.sendall(raw)
        challenge, pair = connection.recv(handshake.CHALLENGE_BYTES), MEMBER.pair(port.keys.public)
        recorded = handshake.membership(SECRET, raw, challenge) + handshake.ownership(pair, raw, challenge)
        connection.sendall(recorded)
        assert len(connection.recv(100)) == handshake.MAC_BYTES
    with port.dial() as connection:
        connection.sendall(raw)
        connection.recv(handshake.CHALLENGE_BYTES)
        connection.sendall(recorded)
        assert is_closed(connection)
    port.counted("wrong secret")


def test_no_answer_without_a_proof(port: Port) -> None:
    """Nobody learns from the port whether a token is known."""
    for token in (TOKEN, TOKEN + 1):
        with port.dial() as connection:
            connection.sendall(port.hello(token).encode())
            assert len(connection.recv(100)) == handshake.CHALLENGE_BYTES
            connection.sendall(b"x" * handshake.PROOF_BYTES)
            assert is_closed(connection)


def test_who_listens_there_must_own_the_key() -> None:
    """A dialer gives its bytes to the process of the ticket only."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        one.settimeout(WAIT_S)

        def serve() -> None:
            connection, _ = one.accept()
            with connection:
                connection.recv(handshake.HELLO_BYTES)
                connection.sendall(b"c" * handshake.CHALLENGE_BYTES)
                connection.recv(handshake.PROOF_BYTES)
                connection.sendall(b"a" * handshake.MAC_BYTES)

        thread = threading.Thread(target=serve)
        thread.start()
        ticket = ticket_of(one.getsockname(), TOKEN, SECRET, KeyPair().public)
        with (
            socket.create_connection(one.getsockname(), WAIT_S) as connection,
            pytest.raises(ValueError, match="does not own the key"),
        ):
            greet_as(connection, ticket, hello_of(ticket, 0, 1, of=MEMBER), MEMBER)
        thread.join()


def test_a_thousand_pending_connections_at_once() -> None:
    """They displace each other; ranks that join meanwhile do, sooner or later."""
    with End(0) as one, End(1) as two:
        pending = [socket.socket() for _ in range(1000)]
        address = two.network.listener.address
        for other in pending[:500]:
            other.setblocking(False)
            other.connect_ex(address)

        def more() -> None:
            for number, other in enumerate(pending[500:]):
                other.setblocking(False)
                other.connect_ex(address)
                if number % 2:
                    with contextlib.suppress(OSError):
                        other.send(b"GET / HTTP/1.1\r\n" * 8)

        thread = threading.Thread(target=more)
        thread.start()
        join(one, two)
        thread.join()
        assert one.kinds(1) == two.kinds(0) == [3]
        for other in pending:
            other.close()
        assert two.network.listener._thread.is_alive()
        assert sum(two.network.listener.refused.values()) > 0


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = "{}:{}".format(*taken.getsockname())
        with pytest.raises(TransportError, match=rf"network\.listen: cannot listen on {place}: Address already in use"):
            Network(NetworkConfig(listen=place))
    with pytest.raises(TransportError, match=r"network\.listen: cannot listen on no\.such\.host\.invalid:0"):
        Network(NetworkConfig(listen="no.such.host.invalid:0"))


@pytest.mark.parametrize(("rank", "peer"), [(1, 0), (2, 0), (0, 7)])
def test_a_member_that_claims_to_be_another_is_refused(rank: int, peer: int) -> None:
    """Rank 1 is dialled by lower ranks alone, and is nobody else."""
    with End(1) as end:
        for connection in as_member(end, rank, peer=peer):
            assert is_closed(connection)
            connection.close()
        assert end.channel.up() == 0
        end.has_refused("not admitted", 2)


def test_a_rank_that_is_left_out_is_taken_for_no_other() -> None:
    """It has the tickets of all, and so their secrets; the connections that it would replace stand."""
    with End(0, 3) as one, End(1, 3) as left, End(2, 3) as two:
        join(one, left, two)
        for end in (one, two):
            end.channel.leave(1, 5)
        for connection in as_member(two, 0, of=left.network.keys):
            assert is_closed(connection)
            connection.close()
        two.has_refused("not admitted", 2)
        assert one.kinds(2) == two.kinds(0) == [3]
        one.push(2, 0, 8, 7)
        two.until(lambda _: two.arrived(0) == [7])


def test_a_key_is_its_owners() -> None:
    """A public key alone, as all members have it, proves nothing."""
    thief: Any = SimpleNamespace(public=MEMBER.public, pair=KeyPair().pair)
    with End(1) as end:
        end.channel.expect({0: ticket_of(("127.0.0.1", 1), key=MEMBER.public)})
        with pytest.raises((ValueError, OSError)):
            as_member(end, 0, of=thief)
        end.has_refused("not its key", 1)


def test_a_rank_that_is_left_out_waits_until_it_is_named_again() -> None:
    """None of its bytes reaches a mirror meanwhile."""
    with End(0) as one, End(1) as two:
        join(one, two)
        two.channel.leave(0, 5)
        one.until(lambda _: one.kinds(1) == [3, 2])
        with pytest.raises(PeerTimeout, match="it took the connection and has not joined yet"):
            one.channel.connect({1: two.ticket()}, SHORT_S)
        one.push(1, 0, 8, 7)
        assert two.kinds(0) == [3]
        assert two.channel.up() == 0
        two.channel.connect({0: one.ticket()}, WAIT_S)
        two.until(lambda _: two.arrived(0) == [7])
        assert two.kinds(0) == [3, 3]


def test_who_came_as_a_rank_before_its_ticket_was_known_is_not_joined() -> None:
    with End(1) as end:
        early = as_member(end, 0, of=KeyPair())
        end.poll(lambda: bool(end.channel._waiting), WAIT_S)
        end.channel.expect({0: ticket_of(("127.0.0.1", 1), key=MEMBER.public)})
        for connection in early:
            assert is_closed(connection)
            connection.close()
        assert end.channel.up() == 0


@pytest.mark.parametrize("lost", [0, 1, handshake.CONTROL_ROLE])
def test_a_lost_answer_spoils_no_bring_up(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener has admitted what the dialer makes anew."""
    with End(0, lanes=2) as one, End(1, lanes=2) as two:
        send, left = two.network.listener._send, [lost]

        def lossy(pending: Any, words: bytes) -> bool:
            if len(words) == handshake.MAC_BYTES and pending.hello.role in left:
                left.clear()
                pending.connection.shutdown(socket.SHUT_RDWR)
                return True
            return send(pending, words)

        monkeypatch.setattr(two.network.listener, "_send", lossy)
        join(one, two)
        assert not left
        one.push(1, 0, 8, 7)
        two.until(lambda _: two.arrived(0) == [7])
        assert not two.channel._unjoined(), "these would stay open"


@pytest.mark.parametrize(("lanes", "others"), [(1, 4), (4, 1), (3, 2)])
def test_of_two_numbers_of_lanes_the_smaller_is_used(lanes: int, others: int) -> None:
    with End(0, lanes=lanes) as one, End(1, lanes=others) as two:
        libraries = [Library(end, lambda: None) for end in (one, two)]
        join(one, two)
        assert [len(lib.joined_fds) - 1 for lib in libraries] == [min(lanes, others)] * 2


def test_more_lanes_than_there_is_room_for_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with End(1, lanes=2) as end:
        ticket = end.ticket()
        with socket.create_connection((ticket.address, ticket.port), WAIT_S) as connection:
            greet_as(connection, ticket, hello_of(ticket, 0, 1, lanes=3, of=MEMBER), MEMBER)
            assert is_closed(connection)
        end.has_refused("not admitted", 1)
        assert "rank 0 brings 3 lanes, this rank has 2 (network.lanes)" in caplog.text


def test_versions_must_be_equal() -> None:
    with End(0) as one, End(1) as two:
        other = msgspec.structs.replace(two.ticket(), wire=handshake.WIRE + 1)
        with pytest.raises(TransportError, match=rf"version {other.wire} of .* at rank 1, {other.wire - 1} at"):
            one.channel.connect({1: other}, 1.0)


def test_a_peer_that_is_not_there_is_named() -> None:
    with End(0) as one, End(1) as two:
        ticket = two.ticket()
        two.close()
        with pytest.raises(TransportError, match=r"not reached .*refused") as error:
            one.channel.connect({1: ticket}, 0.3)
        assert "rank 1" in str(error.value)
        assert f"127.0.0.1:{ticket.port}" in str(error.value)


def test_an_address_that_cannot_be_is_named_at_once() -> None:
    """As network.advertise of another rank may be."""
    with End(0) as one:
        begun, name = time.monotonic(), "a" * 70
        with pytest.raises(TransportError, match=f"{name}:1 is not reached .*label too long"):
            one.channel.connect({1: ticket_of((name, 1))}, WAIT_S)
        assert time.monotonic() - begun < WAIT_S / 2


def test_a_rank_behind_an_address_of_another_machine_dials_from_its_own() -> None:
    """As behind NAT: what it advertises is no address that it could bind."""
    with End(0, devices=("lo",), advertise="192.0.2.7") as one, End(1) as two:
        assert one.ticket().address == "192.0.2.7"
        two.channel.expect({0: one.ticket()})
        one.channel.connect({1: two.ticket()}, 5.0)
        assert one.channel.up() == 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("place", ["127.0.0.1", "::1"])
def test_a_port_of_every_interface_takes_both_families(place: str) -> None:
    with End(0) as one, End(1, listen="[::]:0") as two:
        ticket = msgspec.structs.replace(two.ticket(), address=place)
        two.channel.expect({0: one.ticket()})
        one.channel.connect({1: ticket}, 5.0)
        assert one.channel.up() == 2


def test_a_ticket_of_an_earlier_life_is_refused() -> None:
    with End(0) as one, End(1) as two:
        old = ticket_of(two.network.listener.address)
        with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{old.port} is not .*data port.*: "):
            one.channel.connect({1: old}, 5.0)
        assert one.channel.up() == 0


def test_who_does_not_come_is_named() -> None:
    with (
        End(1) as end,
        pytest.raises(TransportError, match=r"ranks \[0\] did not connect to the data port of rank 1"),
    ):
        end.channel.connect({0: end.ticket()}, 0.2)


def test_closing_ends_a_connect() -> None:
    with End(1) as end:
        closing = threading.Timer(0.2, end.channel.close)
        closing.start()
        begun = time.monotonic()
        with pytest.raises(ClosedError):
            end.channel.connect({0: end.ticket()}, WAIT_S)
        assert time.monotonic() - begun < WAIT_S / 2
        closing.join()


ENDS: dict[str, tuple[Callable[[End, int], None], type[TransportError]]] = {
    "close": (lambda end, _: end.channel.close(), ClosedError),
    "abort": (lambda end, _: end.channel.abort("enough"), AbortedError),
    "give_up": (lambda end, rank: end.channel.give_up([rank]), PeerTimeout),
}
"""What ends a connect with a rank, and in which error."""


def ends_soon(end: End, tickets: dict[int, NetworkTicket], how: str, rank: int) -> None:
    """A connect that would wait for long."""
    act, error = ENDS[how]
    acting = threading.Timer(0.2, act, (end, rank))
    acting.start()
    begun = time.monotonic()
    with pytest.raises(error) as raised:
        end.channel.connect(tickets, 10 * WAIT_S)
    assert time.monotonic() - begun < WAIT_S / 2
    acting.join()
    if isinstance(raised.value, PeerTimeout):
        assert (raised.value.peer, raised.value.given_up) == (rank, True)
    begun = time.monotonic()
    with pytest.raises(error):
        end.channel.connect(tickets, 10 * WAIT_S)
    assert time.monotonic() - begun < WAIT_S / 2, "and any later one"


@pytest.mark.parametrize("how", ENDS)
def test_waiting_for_a_rank_is_ended(how: str) -> None:
    with End(1) as end:
        ends_soon(end, {0: end.ticket()}, how, 0)


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("backlog", [0, 8], ids=["syn", "hello"])
def test_dialling_a_host_that_does_not_answer_is_ended(backlog: int, how: str) -> None:
    """Neither to a SYN, since the queue of its port is full, nor to a hello; and another one that answers nothing."""
    with End(0, 3) as end, contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog)) for _ in range(2)]
        for port in ports:
            for _ in range(2 if backlog == 0 else 0):
                filling = stack.enter_context(socket.socket())
                filling.setblocking(False)
                filling.connect_ex(port.getsockname())
        tickets = {1 + n: ticket_of(port.getsockname()) for n, port in enumerate(ports)}
        ends_soon(end, tickets, how, 2)


def test_a_name_service_that_does_not_answer_outlasts_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    try:
        with End(0, 3) as end:
            tickets = {rank: ticket_of(("host-a", 1)) for rank in (1, 2)}
            monkeypatch.setattr(dialer.socket, "getaddrinfo", lambda *_, **__: answers.wait())
            begun = time.monotonic()
            with pytest.raises(PeerTimeout, match=r"host-a:1 is not reached .the name service does not answer"):
                end.channel.connect(tickets, SHORT_S)
            assert SHORT_S <= time.monotonic() - begun < WAIT_S / 2
            ends_soon(end, tickets, "abort", 2)
    finally:
        answers.set()


def test_a_port_that_answers_slowly_takes_no_longer_than_the_deadline() -> None:
    """Bytes of a handshake, each in time for a deadline of its own."""

    def drip(port: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = port.accept()
            with connection:
                for _ in range(handshake.CHALLENGE_BYTES):
                    time.sleep(0.15)
                    connection.sendall(b"c")

    with End(0) as end, socket.create_server(("127.0.0.1", 0)) as port:
        slow = threading.Thread(target=drip, args=(port,))
        slow.start()
        begun = time.monotonic()
        with pytest.raises(PeerTimeout, match="rank 1"):
            end.channel.connect({1: ticket_of(port.getsockname())}, 0.4)
        assert 0.3 < time.monotonic() - begun < 1.2
        slow.join()


def test_a_forked_child_holds_no_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that greets nor one that has come and waits for the rank's others; peers see the parent's end."""
    monkeypatch.setattr(Network, "_shared", {})
    with (
        End(1, 3, shared=True) as end,
        socket.create_server(("127.0.0.1", 0)) as silent,
        contextlib.ExitStack() as stack,
    ):
        ticket = end.ticket()
        half = stack.enter_context(socket.create_connection((ticket.address, ticket.port), WAIT_S))
        greet_as(half, ticket, hello_of(ticket, 0, 1, of=MEMBER), MEMBER)
        End.poll(lambda: bool(end.channel._arrived), WAIT_S)
        there = ticket_of(silent.getsockname())
        dialling = threading.Thread(target=ends_soon, args=(end, {2: there}, "abort", 2))
        dialling.start()
        stack.enter_context(silent.accept()[0])
        child = os.fork()
        if child == 0:
            ports = {silent.getsockname()[1], half.getsockname()[1]}
            os._exit(len([peer for peer in peers_of_this_process() if peer[1] in ports]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dialling.join()


def peers_of_this_process() -> list[tuple[str, int]]:
    """Other ends of its connections."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            found.append(copy.getpeername())
    return [peer for peer in found if isinstance(peer, tuple)]


class Library:
    """The library, of which `during_close` happens while it closes a channel, as another thread would do it."""

    def __init__(self, end: End, during_close: Callable[[], None]) -> None:
        self._lib, self._during_close, self.closed, self.joined = end.network.lib, during_close, 0, 0
        self.joined_fds: list[int] = []
        end.channel._lib = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def cn_close(self, pointer: int) -> None:
        self.closed += 1
        assert self.closed == 1, "closed twice"
        self._during_close()
        self._lib.cn_close(pointer)

    def cn_join(self, pointer: int, rank: int, control: int, lanes: Any, num_lanes: int) -> int:
        self.joined += 1
        self.joined_fds = [control, *lanes]
        return int(self._lib.cn_join(pointer, rank, control, lanes, num_lanes))


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(2.0, 10), (40.0, 40), (3600.0, 3600), (11.01, 11.01)])
def test_a_connection_is_no_less_patient_than_its_rank(timeout_s: float, patience_s: float) -> None:
    """Of a host that answers nothing for less than the deadline nothing is lost: neither by bytes that it does not
    acknowledge, nor by keepalive."""
    with End(0, timeout_s=timeout_s) as one, End(1) as two:
        lib = Library(one, lambda: None)
        join(one, two)
        for fd in lib.joined_fds:
            with socket.socket(fileno=os.dup(fd)) as connection:
                read = functools.partial(connection.getsockopt, socket.IPPROTO_TCP)
                assert read(socket.TCP_USER_TIMEOUT) == round(patience_s * 1e3)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    probes_s = read(socket.TCP_KEEPINTVL) * read(socket.TCP_KEEPCNT)
                    assert patience_s <= read(socket.TCP_KEEPIDLE) + probes_s <= patience_s + 6
                    assert fd == lib.joined_fds[0]


def test_a_channel_is_closed_once_by_two_threads() -> None:
    with End(1) as end:
        in_use = end.network.in_use
        lib = Library(end, end.channel.close)
        end.channel.close()
        assert lib.closed == 1
        assert end.network.in_use == in_use - 1


def test_nobody_joins_a_channel_that_closes() -> None:
    """A member's last connection may be admitted just before the token is shut: the channel's memory may be freed."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)

    def admit() -> None:
        for role, connection in zip((0, handshake.CONTROL_ROLE), ours, strict=True):
            with contextlib.suppress(ClosedError):
                end.channel._admit(hello_of(end.ticket(), 0, 1, role, of=MEMBER), connection)

    with End(1) as end:
        end.channel.expect({0: ticket_of(("127.0.0.1", 1), key=MEMBER.public)})
        lib = Library(end, admit)
        end.channel.close()
        assert lib.joined == 0
        assert not end.channel._arrived, "these would stay open"
        assert end.channel.push(0, 0, 8, 0), "nothing after close"
        assert end.channel.up() == 0
    for connection in (*ours, *theirs):
        connection.close()


def test_a_host_out_of_descriptors_to_watch_refuses_one_and_goes_on(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, full = port.listener._selector.register, [OSError(errno.ENOSPC, "No space left on device")]

    def limited(*args: Any) -> Any:
        if full:
            raise full.pop()
        return register(*args)

    monkeypatch.setattr(port.listener._selector, "register", limited)
    with port.dial() as connection:
        assert is_closed(connection)
    port.counted("no room")


def test_without_a_thread_the_port_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = "{}:{}".format(*taken.getsockname())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(TransportError, match="can't start new thread"):
            Listener(place)
    Listener(place).close()


def test_providers_must_be_equal() -> None:
    with (
        End(0) as one,
        End(1, provider="shuffle(tcp)") as two,
        pytest.raises(TransportError, match=r"provider 'shuffle\(tcp\)' of rank 1, 'tcp' of this rank"),
    ):
        one.channel.connect({1: two.ticket()}, 1.0)


@pytest.mark.parametrize(
    ("near_us", "control", "is_bounded"), [(1 << 30, False, True), (1 << 30, True, False), (0, False, False)]
)
def test_the_send_buffer_to_a_near_peer_is_bounded(
    near_us: int, control: bool, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel grows the others as they need it."""
    monkeypatch.setattr(greeting, "NEAR_US", near_us)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        small = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert small < before
        greeting.prepare(connection, 10.0, control=control)
        after = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert (after > small) == is_bounded, (small, after)
