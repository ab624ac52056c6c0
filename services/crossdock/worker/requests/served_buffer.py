"""A worker's end of a request buffer, with at most one request in the engine; here of a client of this host.

It is read by one thread at a time (`request_sockets.py`), and answers by the thread that has the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from crossdock.common import log
from crossdock.common.tracing import RequestTrace
from crossdock.protocol.request_buffer import MAX_PACKET_BYTES, RepeatedRequests, RequestMemory, RequestRows
from crossdock.protocol.v1 import expert_pb2
from crossdock.worker.requests.answers import fill, response_of
from crossdock.worker.requests.backend import Backend
from crossdock.worker.steps import request_trace
from crossdock.worker.steps.work import Done, Failure, Refused, Work

_log = log.get(__name__)

_MAX_TEXT = 1024
_GONE = Failure(grpc.StatusCode.CANCELLED, "the client closed its request buffer")


@dataclass(slots=True, eq=False)
class Offer:
    """A buffer that was offered; `sock` once its ticket was redeemed.

    Attributes:
        client: whose it is.
        num_bytes: its size.
        tcp: its client is on another host.
        progress: records traffic on its call.
        loop: of that call.
        until: when its ticket expires, monotonic seconds.
        ended: set when the buffer is gone; of `loop`.
    """

    client: Hashable
    num_bytes: int
    tcp: bool
    progress: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    until: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    sock: socket.socket | None = None


class ServedBuffer:
    """One client's buffer.

    Args:
        backend: where requests go.
        offer: whose `sock` is there.
        memory: of its requests.
        drop: called once by the reading thread, when it has ended.
    """

    def __init__(
        self, backend: Backend, offer: Offer, memory: RequestMemory, drop: Callable[[ServedBuffer], None]
    ) -> None:
        assert offer.sock is not None
        self.offer, self.sock = offer, offer.sock
        self._backend, self._memory, self._drop = backend, memory, drop
        self._work: Work | None = None
        self._requests = RepeatedRequests()
        self._rows: RequestRows | None = None
        self._sending, self._closed = threading.Lock(), False
        self._done = expert_pb2.ForwardResponse()

    @property
    def is_sending(self) -> bool:
        """Whether a part of an answer is not sent yet."""
        return False

    def read(self) -> None:
        """The socket has something, or is at its end."""
        try:
            self._receive()
            return
        except EOFError:
            pass
        except DecodeError as error:
            _log.seldom("request buffer ended: unreadable request", why=str(error))
        except Exception:  # the client would wait for an answer
            _log.seldom("request buffer ended; this is a bug", traceback=traceback.format_exc().strip())
        work = self._work
        self._close()
        if work is not None:
            self._backend.engine.withdraw(work, _GONE)
        self._memory.give_back()

    def expire(self, now: float) -> None:
        """Answer a request that is past its deadline; any thread. now: monotonic seconds."""
        work = self._work
        if work is not None and work.deadline_ns <= now * 1e9:
            late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline: not served in time")
            self._backend.engine.withdraw(work, late)

    def _receive(self) -> None:
        """Read what is there. Raises EOFError: the end; DecodeError: not a request."""
        try:
            packet = self.sock.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            raise EOFError
        request = self._parsed(packet)
        if request.cancel:
            self._cancel()
        elif self._work is not None:
            self._refuse(request)
        else:
            self._serve(request)

    def _close(self) -> None:
        with self._sending:  # no other thread sends to a number that is another socket's by then
            self._closed = True
            self._drop(self)

    def _parsed(self, packet: bytes) -> expert_pb2.ForwardRequest:
        """Valid until the next one. Raises DecodeError."""
        self.offer.progress()
        request, repeats = self._requests.request_of(packet)
        self._rows = self._rows if repeats else None
        return request

    def _cancel(self) -> None:
        """Withdraw the request in flight. Without one, it counts as a request of the client."""
        work = self._work
        if work is not None:
            self._backend.engine.withdraw(work, Failure(grpc.StatusCode.CANCELLED, "cancelled by the client"))
            return
        try:
            self._backend.check_rate(self.offer.client)
        except Refused:  # it has no answer that could carry the error
            end(self.sock)

    def _refuse(self, request: expert_pb2.ForwardRequest) -> None:
        """A request before the last one is answered, which counts as one of the client."""
        failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "id: expected no request before the last one is answered")
        try:
            self._backend.check_rate(self.offer.client)
        except Refused as refused:
            failure = refused.failure
        self._send(request.id, failure)

    def _serve(self, request: expert_pb2.ForwardRequest) -> None:
        """A request whose tensors are in the memory."""
        backend, received_ns = self._backend, time.monotonic_ns()
        tracer, trace = backend.tracer, None
        if tracer is not None:
            trace = request_trace.begin(tracer, request, None, received_ns)
        try:
            backend.check_rate(self.offer.client)
            backend.engine.expect()  # not before: it wakes all ranks
            self._work = work = self._work_of(request, trace)
            request_trace.admitted(work, received_ns)
            backend.engine.submit(work)
        except Refused as refused:
            self._work = None
            self._refused(request.id, refused.failure, trace)

    def _refused(self, request_id: int, failure: Failure, trace: RequestTrace | None = None) -> None:
        self._send(request_id, failure)
        self._backend.telemetry.answered(failure.code, 0, 0.0, trace=trace, why=failure.message)

    def _work_of(self, request: expert_pb2.ForwardRequest, trace: RequestTrace | None) -> Work:
        """Raises Refused."""
        rows = self._rows or self._rows_of(request)
        tokens, reply = self._backend.validator.taken(rows), functools.partial(self._reply, request.id, rows)
        return self._backend.work_of(request, tokens, self.offer.client, self, reply, trace, rows)

    def _rows_of(self, request: expert_pb2.ForwardRequest) -> RequestRows:
        """Places of the request's tensors. Raises Refused."""
        if self._rows is None:
            self._rows = self._backend.validator.rows_in(request, self._memory)
        return self._rows

    def _reply(self, request_id: int, rows: RequestRows, answer: Done | Failure) -> None:
        """Any thread."""
        work = self._work
        if isinstance(answer, Done):  # one at a time
            rows.routing.turn()  # the step's record has its ids, and the next request may be here before it is written
            self._work = None
            self._done.id, self._done.model = request_id, answer.model
            fill(self._done.timing, answer.timing)
            self._send_packet(self._done.SerializeToString(), rows)
        else:  # a step may still read and write its rows: it stays, so that no other request gets that memory
            self._send(request_id, answer)
            end(self.sock)
        if work is None:
            return
        code, why = (grpc.StatusCode.OK, "") if isinstance(answer, Done) else (answer.code, answer.message)
        queue_s = answer.timing.queue_ns * 1e-9 if isinstance(answer, Done) else 0.0
        seconds = (time.monotonic_ns() - work.arrived_ns) * 1e-9
        self._backend.telemetry.answered(code, work.num_tokens, seconds, queue_s, work.trace, why)

    def _send(self, request_id: int, failure: Failure) -> None:
        response = response_of(request_id, failure)
        response.error.message = response.error.message[:_MAX_TEXT]
        self._send_packet(response.SerializeToString())

    def _send_packet(self, packet: bytes, rows: RequestRows | None = None) -> None:
        """rows: with those of the answer."""
        with self._sending:
            try:
                if not self._closed:
                    self.sock.send(packet)
            except OSError:  # it does not read, or is gone
                end(self.sock)


def end(sock: socket.socket) -> None:
    """Let the thread see the end of a connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
