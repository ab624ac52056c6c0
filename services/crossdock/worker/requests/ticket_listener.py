"""A listening socket whose connections send a ticket before a deadline, and few at a time have sent none."""

from __future__ import annotations

import functools
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from crossdock.common import descriptors
from crossdock.protocol.request_connection import TICKET_BYTES

MAX_PENDING = 64
"""Connections that have not sent a ticket, fewer where descriptors are; above it the oldest is closed."""
REDEEM_S = 5.0
"""Time to redeem a ticket, and to send one after connecting."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A connection whose ticket is not whole, until when it may be so, and what came of it."""

    sock: socket.socket
    until: float
    ticket: bytes = b""


class TicketListener:
    """One listening socket. Everything is called by the thread that selects.

    Args:
        sock: listens, and does not block.
        selector: of that thread.
        redeem: called with a ticket and its connection, which is its own from then on.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        redeem: Callable[[bytes, socket.socket], None],
    ) -> None:
        self._sock, self._selector, self._redeem = sock, selector, redeem
        self._pending: dict[_Pending, None] = {}
        self._accepts = False
        self.expire(0.0)

    def expire(self, now: float) -> None:
        """Close connections that are past their deadline, and accept more again."""
        if not self._accepts:
            self._accepts = True
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)
        for pending in [each for each in self._pending if now > each.until]:
            self._drop(pending).close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:  # no descriptor is free, for instance: the connection waits, and nobody else does
            self._accepts = False
            self._selector.unregister(self._sock)
            return
        sock.setblocking(False)
        if len(self._pending) >= descriptors.share(MAX_PENDING, descriptors.TICKETS):
            self._drop(next(iter(self._pending))).close()
        pending = _Pending(sock, time.monotonic() + REDEEM_S)
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._read, pending))

    def _read(self, pending: _Pending) -> None:
        """The first bytes of a connection: a ticket, in one piece or several."""
        if pending not in self._pending:  # it was closed for another since it was selected
            return
        try:
            part = pending.sock.recv(TICKET_BYTES - len(pending.ticket))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        pending.ticket += part
        if not part:
            self._drop(pending).close()
        elif len(pending.ticket) == TICKET_BYTES:
            self._redeem(pending.ticket, self._drop(pending))

    def _drop(self, pending: _Pending) -> socket.socket:
        del self._pending[pending]
        self._selector.unregister(pending.sock)
        return pending.sock
