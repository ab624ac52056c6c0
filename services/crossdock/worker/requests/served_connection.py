"""A worker's end of a request buffer whose client is on another host (request_connection.py of the protocol).

The message of a request is checked before its tensors are received, where a step reads them. What of an answer the
socket does not take at once is sent by the thread that waits for sockets: a client that does not read keeps no step
waiting. A request or an answer that is not whole within `request_timeout_s` ends the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from crossdock.protocol.request_buffer import RequestMemory, RequestRows
from crossdock.protocol.request_connection import Receiver, Sender
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.served_buffer import Offer, ServedBuffer, end
from crossdock.worker.steps.request_sockets import RequestSockets
from crossdock.worker.steps.work import Refused

_NEVER = float("inf")
_MANY = 16
"""Messages that no client sends at once: it waits for each answer."""


class ServedConnection(ServedBuffer):
    """One client's connection. Arguments as ServedBuffer; request_sockets: that read it."""

    def __init__(
        self,
        backend: Backend,
        offer: Offer,
        memory: RequestMemory,
        drop: Callable[[ServedBuffer], None],
        request_sockets: RequestSockets,
    ) -> None:
        super().__init__(backend, offer, memory, drop)
        self._sender, self._receiver = Sender(self.sock), Receiver(self.sock)
        self._request_sockets = request_sockets
        self._asked: expert_pb2.ForwardRequest | None = None
        self._is_full = False
        self._read_until = self._sent_until = _NEVER

    @property
    def is_sending(self) -> bool:
        """Whether a part of an answer is not sent yet."""
        return self._sender.pending

    def expire(self, now: float) -> None:
        """Also end the connection if its other end takes too long."""
        super().expire(now)
        if now > min(self._read_until, self._sent_until):
            end(self.sock)

    def _receive(self) -> None:
        if self._is_full and not self._push():
            return
        for _ in range(_MANY):
            if self._asked is None and not self._next():
                break
            if not self._receiver.fill():
                break
            request, self._asked = self._asked, None
            if request is not None:
                self._serve(request)
            if not self._receiver.has_more:
                break
        else:  # or else it could keep this thread, which may be that of the steps
            raise DecodeError(f"message: expected fewer than {_MANY} at once")
        if self._asked is None and not self._receiver.has_more:
            self._read_until = _NEVER
        elif self._read_until == _NEVER:
            self._read_until = self._deadline()

    def _next(self) -> bool:
        """Whether there is another message. Raises EOFError, DecodeError."""
        packet = self._receiver.message()
        if packet is None:
            return False
        request = self._parsed(packet)
        if request.cancel:
            self._receiver.begin()
            self._cancel()
            return True
        if self._work is not None:
            raise DecodeError("id: expected no request before the last one is answered")
        try:
            self._receiver.begin(self._rows_of(request).sent)
        except Refused as refused:  # how many bytes follow is not known
            self._refused(request.id, refused.failure)
            raise EOFError from None
        self._asked = request
        return True

    def _send_packet(self, packet: bytes, rows: RequestRows | None = None) -> None:
        with self._sending:
            if self._closed or self._sender.pending:  # a client that does not wait for answers
                end(self.sock)
                return
            try:
                if not self._sender.start(packet, () if rows is None else (rows.answered,)):
                    self._is_full, self._sent_until = True, self._deadline()
                    self._request_sockets.watch(self.sock, writable=True)
            except OSError:
                self._sender.drop()
                end(self.sock)

    def _push(self) -> bool:
        """Whether the answer is sent now. Raises EOFError."""
        with self._sending:
            try:
                if not self._sender.push():
                    return False
            except OSError as error:
                raise EOFError from error
            self._is_full, self._sent_until = False, _NEVER
            self._request_sockets.watch(self.sock, writable=False)
            return True

    def _close(self) -> None:
        super()._close()
        self._sender.drop()

    def _deadline(self) -> float:
        return time.monotonic() + self._backend.config.request_timeout_s
