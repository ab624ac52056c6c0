"""Two ends of a network without ranks: memory that is sent from, mirrors that are written, and what has arrived."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ep_kernels.network import NetworkConfig, handshake
from ep_kernels.network.greeting import NetworkTicket, greet
from ep_kernels.network.handshake import CONTROL_ROLE, KEY_BYTES, SECRET_BYTES, Greeting, KeyPair
from ep_kernels.network.network import Channel, ChannelMemory, Network

ARRIVED, DOWN, LEFT_OUT, UP = range(4)
"""`cd::NetEvent`."""
SIZE = 1 << 16
WAIT_S = 20.0
MEMBER = KeyPair()
"""Of ranks that a test speaks for."""
JOINED = struct.pack("=IIQ", 3, 0, 0)
"""Of a control connection (native/peers.cpp)."""
IN_GUEST = Path("/sys/class/infiniband/rxe0").exists()
"""tests/rxe, on an emulated processor."""
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64)
Event = tuple[int, int, int]
"""(rank, kind, value)."""


def devices_of(provider: str, rank: int) -> dict[str, Any]:
    """Fields for a rank's own end of the cable, where there is one (tests/rxe)."""
    # The kernel's connection manager refuses two devices of one machine: both ends of its connections are one device.
    end = 0 if "verbs;" in provider else rank % 2
    if not Path(f"/sys/class/infiniband/rxe{end}").exists():
        return {}
    fields: dict[str, Any] = {} if "tcp" in provider else {"devices": (f"rxe{end}",)}
    return {**fields, "listen": f"10.77.0.{end + 1}:0"} if "libfabric" in provider else fields


class End:
    """One rank's end of a network.

    Attributes:
        own: what it sends from; `boxed`: what goes to rank r, from r * size on.
        network: one of its own, or (`shared`) the process's.
        events: what its handler was called with, in order.
        may_hear: else its proxy stands still at the next event.
    """

    def __init__(
        self,
        rank: int,
        ranks: int = 2,
        size: int = SIZE,
        *,
        timeout_s: float = WAIT_S,
        shared: bool = False,
        boxed: bool = False,
        **fields: Any,
    ) -> None:
        self.rank, self.size = rank, size
        self.own = ctypes.create_string_buffer(size * ranks if boxed else size)
        self._landing = ctypes.create_string_buffer(b"\xee" * (size * ranks), size * ranks)
        self.events: list[Event] = []
        self.may_hear = threading.Event()
        self.may_hear.set()
        self._changed = threading.Condition()
        self._handler = _Handler(self._on_event)
        config = NetworkConfig(**{"listen": "127.0.0.1:0", **devices_of(fields.get("provider", "tcp"), rank), **fields})
        self.network = Network.of(config) if shared else Network(config)
        handler = ctypes.cast(self._handler, ctypes.c_void_p).value
        assert handler is not None
        own, landing = ctypes.addressof(self.own), ctypes.addressof(self._landing)
        memory = ChannelMemory(own, len(self.own), landing, size, handler, 0, size if boxed else 0)
        self.channel = Channel(self.network, rank, ranks, memory, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self.channel.close()
        self.channel.free()
        self.network.close()

    def ticket(self) -> NetworkTicket:
        return self.channel.ticket()

    def mirror(self, rank: int) -> bytes:
        """Of that rank's memory."""
        return self._landing.raw[rank * self.size : (rank + 1) * self.size]

    def push(self, rank: int, offset: int, num_bytes: int, imm: int) -> None:
        """Waits while the ring is full."""
        while not self.channel.push(rank, offset, num_bytes, imm):
            time.sleep(0.0001)

    def quiet(self, rank: int, timeout_s: float = WAIT_S) -> None:
        """Wait until everything for that rank is sent."""
        self.poll(lambda: self.channel.is_quiet(1 << rank), timeout_s)

    def until(self, seen: Callable[[list[Event]], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until the events are such."""
        with self._changed:
            assert self._changed.wait_for(lambda: seen(self.events), timeout_s), self.events[-10:]

    def arrived(self, rank: int) -> list[int]:
        """Immediates of that rank."""
        return [value for who, kind, value in self.events if (who, kind) == (rank, ARRIVED)]

    def kinds(self, rank: int) -> list[int]:
        """Kinds of the other events of that rank."""
        return [kind for who, kind, _ in self.events if who == rank and kind != ARRIVED]

    def has_refused(self, why: str, number: int) -> None:
        """Wait until its data port has refused so many for this reason, and no others."""
        self.poll(lambda: self.network.listener.refused == {why: number}, WAIT_S)

    @staticmethod
    def poll(done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `done`."""
        until = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < until
            time.sleep(0.001)

    def _on_event(self, context: Any, rank: int, kind: int, value: int) -> None:
        self.may_hear.wait(WAIT_S)
        with self._changed:
            self.events.append((rank, kind, value))
            self._changed.notify_all()


def join(*ends: End) -> None:
    """Connections between all of them."""
    tickets = {end.rank: end.ticket() for end in ends}
    threads = [
        threading.Thread(target=end.channel.connect, args=({r: t for r, t in tickets.items() if r != end.rank}, WAIT_S))
        for end in ends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        assert end.channel.up() == sum(1 << other.rank for other in ends if other is not end)


def ticket_of(
    place: tuple[str, int], token: int = 5, secret: bytes = bytes(SECRET_BYTES), key: bytes = bytes(KEY_BYTES)
) -> NetworkTicket:
    """Of one lane by tcp, of nobody unless said otherwise."""
    return NetworkTicket("tcp", *place, token, secret.hex(), key.hex(), 1)


def hello_of(ticket: NetworkTicket, rank: int, peer: int, role: int = 0, *, lanes: int = 1, of: KeyPair) -> Greeting:
    """What a rank says first."""
    return handshake.hello(ticket.token, rank, peer, role, lanes, of.public)


def greet_as(
    connection: socket.socket, ticket: NetworkTicket, hello: Greeting, of: KeyPair, timeout_s: float = 5.0
) -> None:
    """The handshake with the owner of the ticket. Raises ValueError, OSError."""
    greet(connection, hello, ticket, of.pair(bytes.fromhex(ticket.key)), time.monotonic() + timeout_s)


def as_member(
    end: End, rank: int, *, peer: int | None = None, of: KeyPair | None = None, joins: bool = True
) -> list[socket.socket]:
    """Sockets of a rank that has proved membership and then speaks by itself: lane 0, control. `of`: whose key it has;
    None: that of a rank which the end admits. `joins`: it has said there that it has joined."""
    ticket, made = end.ticket(), []
    if of is None:
        of = MEMBER
        end.channel.expect({rank: ticket_of(("127.0.0.1", 1), key=of.public)})
    for role in (0, CONTROL_ROLE):
        connection = socket.create_connection((ticket.address, ticket.port), WAIT_S)
        hello = hello_of(ticket, rank, end.rank if peer is None else peer, role, of=of)
        greet_as(connection, ticket, hello, of)
        made.append(connection)
    if joins:
        made[1].sendall(JOINED)
    return made
