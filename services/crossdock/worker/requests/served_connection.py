"""A worker's end of a request connection (frames.py of the protocol).

It is read by one thread at a time (`request_sockets.py`), and answers by the thread that has the answer; what the
socket does not take at once is sent when it can be written. A request is checked before its rows are received, where a
step reads them, and is not read at all while its client's account is full. Rows of a refused one are dropped.
"""

from __future__ import annotations

import functools
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import NamedTuple

import grpc

from crossdock.common import log
from crossdock.common.call_errors import code_number
from crossdock.common.tracing import RequestTrace
from crossdock.protocol import frames
from crossdock.protocol.frames import Forward, FrameError, FrameKind, FrameSocket
from crossdock.protocol.shared_memory import PLACE_BYTES, SharedMemory
from crossdock.worker.requests.admission import REQUEST_BYTES
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.request_slots import RequestSlot, RequestSlots
from crossdock.worker.steps import request_trace
from crossdock.worker.steps.request_sockets import RequestSockets
from crossdock.worker.steps.work import Done, Failure, Refused, Work

_log = log.get(__name__)

MAX_IN_FLIGHT = 32
"""Requests of one connection whose answer has not left."""
_MANY = 64
"""Frames that are read before other connections have their turn."""
_PLACES, _PLACE_BYTES = 16, 8 << 10
"""Places in shared memory for which what a request needs is kept, and most bytes of ids there."""
_GONE = Failure(grpc.StatusCode.CANCELLED, "the client hung up")
_MOST_OTHERS = 1000
"""Frames a second of one connection that are no requests."""
_NEVER = float("inf")


class _Coming(NamedTuple):
    """A request whose rows are being received; without a slot, they are dropped."""

    request: Forward
    slot: RequestSlot | None
    num_bytes: int
    received_ns: int
    trace: RequestTrace | None


class ServedConnection:
    """One client's connection.

    Args:
        slots: memory of their rows.
        client: whose it is; its connections share one account.
        line: carries the frames; it was welcomed.
    """

    def __init__(
        self,
        backend: Backend,
        slots: RequestSlots,
        sockets: RequestSockets,
        client: Hashable,
        line: FrameSocket,
        drop: Callable[[ServedConnection], None],
    ) -> None:
        self.client, self.line = client, line
        self.opened_at = self.used_at = time.monotonic()
        self._backend, self._slots, self._sockets, self._drop = backend, slots, sockets, drop
        self._quota = backend.budget.open(client, self._on_room, self.stalled_s, self.give_up)
        self._shared = list[SharedMemory]()
        self._places: dict[tuple[int, int], RequestSlot] = {}
        self._works: dict[int, Work] = {}
        self._coming: _Coming | None = None
        self._waiting: Forward | None = None
        self._lock, self._watched, self._closed = threading.Lock(), (True, False), False
        self._until, self._num_leaving, self._others = _NEVER, 0, (0.0, 0)
        self.was_sent_away = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is here and no answer waits."""
        return not (self._works or self._coming or self._waiting or self.line.is_sending)

    def stalled_s(self) -> float:
        """How long the client has taken nothing of what waits for it."""
        return time.monotonic() - self.line.moved_at if self.line.is_sending else 0.0

    def read(self) -> None:
        """The socket has something, can be written, is at its end, or there is room again."""
        if self._closed:
            return
        try:
            self.line.push()
            if self._waiting is not None and _is_hung_up(self.line.sock):
                raise EOFError
            self._read()
            self._watch()
            return
        except FrameError as error:
            _log.seldom("request connection ended: not our protocol", why=str(error), client=self.client)
        except (EOFError, OSError):
            pass
        except Exception:  # the client would wait for an answer
            _log.seldom("request connection ended; this is a bug", traceback=traceback.format_exc().strip())
        self._close()

    def expire(self, now: float) -> None:
        """Answer requests that are past their deadline, and end the connection if its other end takes too long; any
        thread. now: monotonic seconds."""
        late = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline: not served in time")
        for work in [work for work in tuple(self._works.values()) if work.deadline_ns <= now * 1e9]:
            self._backend.engine.withdraw(work, late)
        limit = self._backend.config.request_timeout_s
        if now > self._until:
            self.end()
        elif self.stalled_s() > limit:
            self.give_up(f"an answer was not taken within {limit:g} s")
        elif self._waiting is not None:
            self._backend.budget.make_room(self._quota, of_client=True)
            if not self._num_leaving:  # its own questions are not read now
                self._send([frames.plain(FrameKind.PONG)])

    def give_up(self, why: str) -> None:
        """End a connection whose client does not read its answers."""
        if not self._closed:
            self._backend.telemetry.dropped_stream()
            _log.debug("request connection given up: its answers are not read", client=self.client, why=why)
            self.end()

    def go_away(self) -> None:
        self.was_sent_away = True
        self._send([frames.plain(FrameKind.GOAWAY)])

    def welcome(self, frame: bytes) -> None:
        self._send([frame])

    def end(self) -> None:
        """Let the reading thread see the end of it."""
        self.line.shut_down()

    def _close(self) -> None:
        with self._lock:  # no other thread sends from now on
            if self._closed:
                return
            self._closed = True
        self._drop(self)
        for work in tuple(self._works.values()):
            self._backend.engine.withdraw(work, _GONE)
        for shared in self._shared:  # a step may write it still, and nobody reads that
            self._slots.take_back(self.client, shared)
        self._quota.close()

    def _watch(self) -> None:
        """Have this read when there is something to do."""
        with self._lock:
            wanted = self._waiting is None, self.line.is_sending
            if wanted != self._watched and not self._closed:
                self._watched = wanted
                self._sockets.watch(self.line.sock, readable=wanted[0], writable=wanted[1])

    def _on_room(self) -> None:
        self._sockets.again(self.read)

    def _read(self) -> None:
        if (waiting := self._waiting) is not None:
            self._waiting = None
            if not self._forward(waiting):
                return
        for _ in range(_MANY):
            got = self.line.next()
            if got == frames.NOTHING or not self._take(got):
                return
            if not self.line.has_read_more:
                return
        self._sockets.again(self.read)

    def _take(self, got: int) -> bool:
        """Whether what the line says was dealt with; else a request waits for room. Raises FrameError, EOFError."""
        if got == frames.ROWS:
            self._serve()
            return True
        self.used_at = now = time.monotonic()
        if got == FrameKind.FORWARD:
            return self._forward(self.line.forward())
        since, count = self._others
        self._others = (since, count + 1) if now - since < 1 else (now, 1)
        if self._others[1] > _MOST_OTHERS or self._num_leaving > _MANY:
            raise FrameError("frames: expected fewer that are no requests, and a client that reads its answers")
        if got == FrameKind.CANCEL:
            if (work := self._works.get(self.line.state.id)) is not None:
                cancelled = Failure(grpc.StatusCode.CANCELLED, "cancelled by the client")
                self._backend.engine.withdraw(work, cancelled)
        elif got == FrameKind.PING:
            self._send([frames.plain(FrameKind.PONG, self.line.state.id)])
        elif got == FrameKind.MEMORY:
            self._share(frames.memory_of(self.line.frame()))
        else:
            raise FrameError(f"kind: expected one of a client, got {got}")
        return True

    def _forward(self, request: Forward) -> bool:
        """A request whose rows are to come, or are here. False: there is no room for them yet."""
        backend, received_ns = self._backend, time.monotonic_ns()
        if len(self._works) + self._num_leaving >= MAX_IN_FLIGHT:
            raise FrameError(f"forward: expected at most {MAX_IN_FLIGHT} requests in flight")
        if request.place != frames.NOWHERE:
            self._check_place(request)
        num_bytes, slot = REQUEST_BYTES + request.num_bytes, None
        if not self._quota.has_room(num_bytes):
            self._waiting = request
            self._quota.wait(num_bytes)
            if not self._quota.has_room(num_bytes):  # none was made in between
                return False
            self._waiting = None
        self._quota.stop_waiting()
        trace = request_trace.begin(backend.tracer, request, None, received_ns)
        try:
            backend.check_rate(self.client)
            backend.engine.expect()  # not before: it wakes all ranks
            if request.id in self._works:
                raise Refused(Failure(grpc.StatusCode.INVALID_ARGUMENT, f"id: {request.id} is in flight here"))
            backend.validator.check_frame(request)
            self._quota.charge(num_bytes)
            slot = self._slots.take(request.num_tokens) if request.place == frames.NOWHERE else self._at(request)
        except Refused as refused:
            self._refuse(request, refused.failure, trace)
        self._coming = _Coming(request, slot, num_bytes, received_ns, trace)
        if self.line.rows_to(0, None) if slot is None else self.line.rows_to(slot.address, slot.memory):
            self._serve()
        else:
            self._until = time.monotonic() + backend.config.request_timeout_s
        return True

    def _share(self, num_bytes: int) -> None:
        """Give the client memory of that size, for requests from now on, or say that there is none. What it had before
        is taken back then, unless a request may be there."""
        made = self._slots.share(self.client, num_bytes) if self.line.sock.family == socket.AF_UNIX else None
        if made is None:
            self._send([frames.memory(0)])
            return
        shared, descriptor = made
        self._places.clear()
        works = tuple(self._works.values()) + tuple(self._backend.engine.running_of(self))
        for each in [each for each in self._shared if not any(each.has(work.x) for work in works)]:
            self._shared.remove(each)
            self._slots.take_back(self.client, each)
        self._shared.append(shared)
        self._send([frames.memory(num_bytes)], descriptor=descriptor)

    def _check_place(self, request: Forward) -> None:
        """Raises FrameError."""
        most, have = self.line.state.max_rows_bytes, self._shared[-1].num_bytes if self._shared else 0
        if request.num_bytes > most or request.place + request.num_bytes > have or request.place % PLACE_BYTES:
            raise FrameError(f"place: expected rows in the {have} bytes that this connection shares, got {request}")

    def _at(self, request: Forward) -> RequestSlot:
        """Where its rows are; as a rule others of that size were there before, and are no more."""
        shared, num_tokens = self._shared[-1], request.num_tokens
        kept = self._places.pop((shared.address + request.place, num_tokens), None)
        return kept or self._slots.at(shared, request.place, num_tokens)

    def _serve(self) -> None:
        """The rows of the request that was coming are here."""
        coming, self._coming, self._until = self._coming, None, _NEVER
        if coming is None or coming.slot is None:
            return
        (request, _, num_bytes, received_ns, trace), slot = coming, coming.slot
        backend, reply = self._backend, functools.partial(self._reply, request.id, slot, num_bytes)
        work: Work | None = None
        try:
            backend.validator.check_taken(slot)
            self._works[request.id] = work = backend.work_of(request, slot, self.client, self, reply, trace)
            request_trace.admitted(work, received_ns)
            backend.engine.submit(work)
        except Refused as refused:
            if work is not None and self._works.pop(request.id, None) is None:
                return  # answered meanwhile: it was late
            self._slots.give_back(slot)
            self._quota.release(num_bytes)
            self._refuse(request, refused.failure, trace)

    def _refuse(self, request: Forward, failure: Failure, trace: RequestTrace | None) -> None:
        self._send([_error(request.id, failure)])
        self._backend.telemetry.answered(failure.code, 0, 0.0, trace=trace, why=failure.message)

    def _reply(self, number: int, slot: RequestSlot, num_bytes: int, answer: Done | Failure) -> None:
        """Any thread. After a failure a step may still read and write the slot, so no other request gets it."""
        work = self._works.pop(number)
        if isinstance(answer, Done):
            shape = slot.num_tokens, slot.hidden, slot.dtype
            about = frames.Answer(*answer.timing, *shape, answer.model, slot.is_shared)
            self._send([frames.answer(number, about), slot.answered], slot, num_bytes)
        else:
            self._send([_error(number, answer)])
            self._quota.release(num_bytes)
        code, why = (grpc.StatusCode.OK, "") if isinstance(answer, Done) else (answer.code, answer.message)
        queue_s = answer.timing.queue_ns * 1e-9 if isinstance(answer, Done) else 0.0
        seconds = (time.monotonic_ns() - work.arrived_ns) * 1e-9
        self._backend.telemetry.answered(code, work.num_tokens, seconds, queue_s, work.trace, why)

    def _send(
        self,
        parts: list[bytes | memoryview],
        slot: RequestSlot | None = None,
        num_bytes: int = 0,
        descriptor: int = -1,
    ) -> None:
        with self._lock:
            if self._closed:
                return
            self._num_leaving += 1
        try:
            if not self.line.send(parts, functools.partial(self._left, slot, num_bytes), descriptor):
                self._watch()
        except OSError:
            self.end()

    def _left(self, slot: RequestSlot | None, num_bytes: int) -> None:
        """A frame has left."""
        with self._lock:
            self._num_leaving -= 1
        if slot is not None and not slot.is_shared:
            self._slots.give_back(slot)
        elif slot is not None and slot.ids.nbytes <= _PLACE_BYTES and len(self._places) < _PLACES:
            self._places[slot.address, slot.num_tokens] = slot
        self._quota.release(num_bytes)


def _is_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _error(number: int, failure: Failure) -> bytes:
    about = frames.Error(code_number(failure.code), failure.epoch, failure.lost_ranks, failure.message)
    return frames.error(number, about)
