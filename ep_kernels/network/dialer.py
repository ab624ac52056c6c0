"""The dialling side of the data port: connections to ranks of other hosts, until a deadline or an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import handshake
from ep_kernels.network.address import source_of
from ep_kernels.network.greeting import NetworkTicket, greet, seconds_left
from ep_kernels.network.handshake import CONTROL_ROLE, Greeting, KeyPair
from ep_kernels.network.network_config import NetworkConfig

_DIALS = 16
"""Peers dialled at the same time."""
_RETRY_S = 0.05
_ATTEMPTS = 8
"""A data port under a flood of connections may close a member's before its proof; the next one may get in."""

Roles = dict[int, socket.socket]
"""Connections with a rank: lanes, and CONTROL_ROLE."""


class Dialer:
    """Makes one rank's connections.

    Args:
        ended: what ends a dial of that rank from now on; None: nothing does. Looked at every 50 ms.
    """

    def __init__(
        self, config: NetworkConfig, keys: KeyPair, rank: int, ended: Callable[[int], Exception | None]
    ) -> None:
        self._config, self._keys, self._rank, self._ended = config, keys, rank, ended
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # until they are joined

    def dial(self, peers: dict[int, NetworkTicket], until: float, join: Callable[[int, Roles], None]) -> None:
        """Make the connections with these ranks, side by side, and hand each rank's to `join`.

        Raises:
            PeerTimeout: a rank that was not reached, and what to check; the other dials are ended.
        """
        failed = threading.Event()

        def one(rank: int, ticket: NetworkTicket) -> None:
            try:
                roles = self._roles(_Dial(rank, ticket, until, failed))
                try:
                    join(rank, roles)
                finally:
                    self._forget(*roles.values())
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(min(_DIALS, len(peers)), thread_name_prefix="crossdock-network-dial") as pool:
            made = [pool.submit(one, rank, ticket) for rank, ticket in peers.items()]
            left = set(made)
            while left:
                left = wait(left, _RETRY_S, FIRST_EXCEPTION).not_done
                if failed.is_set() or any(map(self._ended, peers)):
                    self._interrupt()
        errors = [error for dial in made if (error := dial.exception())]
        if errors:
            raise next((error for error in errors if not isinstance(error, _OtherFailed)), errors[0])

    def close_in_child(self) -> None:
        """In a forked child, which has no thread that dials: close its copies."""
        for connection in self._open:
            connection.close()

    def _interrupt(self) -> None:
        """Whoever connects or greets just now looks whether it is to go on."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _roles(self, dial: _Dial) -> Roles:
        """All connections, in order. Where one fails all are made anew: if its answer alone was lost, the listener has
        it, and with the last one has joined them."""
        began, failed = time.monotonic(), 0
        while True:
            made: Roles = {}
            try:
                for hello in self._hellos(dial):
                    made[hello.role] = self._reach(dial, began)
                    greet(made[hello.role], hello, dial.ticket, self._keys.pair(dial.key), dial.until)
                    made[hello.role].setblocking(False)
                return made
            except BaseException as error:
                self._drop(made)
                if isinstance(error, TransportError) or not isinstance(error, OSError | ValueError):
                    raise
                self._go_on(dial)
                failed += 1
                if failed == _ATTEMPTS or time.monotonic() + _RETRY_S > dial.until:
                    text = f"{dial.ticket.address}:{dial.ticket.port} is not its data port: {error}"
                    raise unreached(dial.rank, time.monotonic() - began, text) from error
            time.sleep(_RETRY_S)

    def _hellos(self, dial: _Dial) -> Iterator[Greeting]:
        lanes = min(self._config.lanes, dial.ticket.lanes)
        for role in (*range(lanes), CONTROL_ROLE):
            yield handshake.hello(dial.ticket.token, self._rank, dial.rank, role, lanes, self._keys.public)

    def _drop(self, roles: Roles) -> None:
        self._forget(*roles.values())
        for connection in roles.values():
            connection.close()

    def _reach(self, dial: _Dial, began: float) -> socket.socket:
        ticket = dial.ticket
        while True:
            try:
                return self._connect(dial)
            except (OSError, UnicodeError, OverflowError) as error:  # of a name or a port that cannot be
                self._go_on(dial)
                if seconds_left(dial.until) <= _RETRY_S or not isinstance(error, OSError):
                    why = getattr(error, "strerror", None) or str(error)
                    text = (
                        f"{ticket.address}:{ticket.port} is not reached ({why}); open the data port between the hosts, "
                        "or set network.advertise on that rank to an address of it"
                    )
                    raise unreached(dial.rank, time.monotonic() - began, text) from error
            time.sleep(_RETRY_S)

    def _connect(self, dial: _Dial) -> socket.socket:
        """To the first address of the ticket's that answers. Raises what `dial` ends with, OSError, UnicodeError."""
        failed = OSError("no address")
        for family, kind, protocol, _, address in self._resolve(dial):
            connection = socket.socket(family, kind, protocol)
            try:
                with self._lock:
                    self._go_on(dial)
                    self._open.add(connection)
                connection.settimeout(seconds_left(dial.until))
                if own := source_of(self._config, family):
                    connection.bind((own, 0))
                connection.connect(address)
            except BaseException as error:
                self._forget(connection)
                connection.close()
                if not isinstance(error, OSError):
                    raise
                failed = error
            else:
                return connection
        raise failed

    def _resolve(self, dial: _Dial) -> list[Any]:
        """What getaddrinfo knows, asked by a thread of its own, for its answer has no deadline and no end. Raises as
        `_connect`."""
        answer: Future[list[Any]] = Future()

        def ask() -> None:
            try:
                place = (dial.ticket.address, dial.ticket.port)
                answer.set_result(socket.getaddrinfo(*place, type=socket.SOCK_STREAM))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="crossdock-network-resolve", daemon=True).start()
        while not wait([answer], min(_RETRY_S, seconds_left(dial.until))).done:
            self._go_on(dial)
            if time.monotonic() > dial.until:
                raise OSError("the name service does not answer")
        return answer.result()

    def _go_on(self, dial: _Dial) -> None:
        if error := self._ended(dial.rank):
            raise error
        if dial.failed.is_set():
            raise _OtherFailed

    def _forget(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(connections)


class _OtherFailed(Exception):
    """Another dial of the same call has failed."""


class _Dial:
    """One rank's connections in one `dial`: `failed` once those with another rank have failed."""

    def __init__(self, rank: int, ticket: NetworkTicket, until: float, failed: threading.Event) -> None:
        self.rank, self.ticket, self.until, self.failed = rank, ticket, until, failed
        self.key = bytes.fromhex(ticket.key)


def unreached(rank: int, waited_s: float, why: str) -> PeerTimeout:
    """The error of a connection with a rank that was not made."""
    return PeerTimeout(peer=rank, op="connect", phase="connection", expected=1, seen=0, waited_s=waited_s, end=why)
