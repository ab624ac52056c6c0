"""A client's end of a request connection: calls in flight to one worker, answered in any order.

Any thread sends. Of the threads that wait for an answer one reads for all (it leads), and hands over when it has its
own; of a client for asyncio the event loop reads. Rows are sent from where their caller has them, and received in the
tensor that `forward` returns; large ones of one host go through memory that both ends map (shared_rows.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import select
import threading
import time
from array import array
from collections import deque

import torch

from crossdock.client.errors import ClientError, InvalidRequest, Overloaded, Unavailable, from_answer
from crossdock.client.shared_rows import RowsPlace, SharedRows
from crossdock.client.shares import ForwardCall, Share
from crossdock.common.tracing import current_traceparent
from crossdock.protocol import frames, wire
from crossdock.protocol.frames import Frame, FrameError, FrameKind, FrameSocket
from crossdock.protocol.v1 import expert_pb2

QUIET_S, ALIVE_S = 1.0, 3.0
"""Without a byte for so long the worker is asked for one, and counts as silent if none comes in the time after."""
IDLE_S = 0.1
"""An unused connection is looked at before it is used again after so long: it may have ended."""
_SMALL_BYTES = 64 << 10
"""A request up to this is joined and goes through the socket: that costs less than views, and than shared memory."""
_FEW = 64
"""Ids for which Python is faster than numpy."""
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
_WRITE_S = 0.05


class Flight:
    """One share of a call, on its way.

    Args:
        batch: the call.
        share: of its rows.
        out: [T, H], contiguous; gets the rows of the answer.

    Attributes:
        done: whether there is an answer, or an error.
        error: of it.
        model: fingerprint of the checkpoint that made the answer.
    """

    def __init__(self, batch: ForwardCall, share: Share, out: torch.Tensor) -> None:
        self.batch, self.share, self.out = batch, share, out
        self.id, self.done, self.model = 0, False, ""
        self.error: ClientError | None = None
        self.event: threading.Event | None = None
        self.future: asyncio.Future[None] | None = None
        self.place: RowsPlace | None = None


class Connection:
    """One connection to a worker, which has welcomed it.

    Args:
        address: of the worker.
        where: its name for errors.
        lost: its rank, where it is known.
        epoch: of the view with this worker, for errors.
        line: carries the frames.
        num_requests, max_request_bytes: what the worker takes on it.
        loop: that reads; None: threads do.

    Attributes:
        opened_at: monotonic seconds.
        closed: why it has ended; empty: it has not.
        sent_away: the worker has asked for another connection.
        silent: it has ended because the worker said nothing.
        version: of the certificates it was opened with.
    """

    def __init__(
        self,
        address: str,
        where: str,
        lost: tuple[int, ...],
        epoch: int,
        line: FrameSocket,
        num_requests: int,
        max_request_bytes: int,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.address, self.where, self.lost, self.epoch = address, where, lost, epoch
        self.max_request_bytes = max_request_bytes
        self.opened_at = self._used_at = self._asked_from = time.monotonic()
        self.closed, self.sent_away, self.silent, self.version = "", False, False, 0
        self._line, self._num_requests, self._loop = line, num_requests, loop
        self._ids, self._lock = itertools.count(1), threading.RLock()
        self._flights: dict[int, Flight] = {}
        self._backlog = deque[Flight]()
        self._filling: tuple[Flight | None, frames.Answer] | None = None
        self._shared = SharedRows(line)
        self._leader, self._waiting = threading.Lock(), dict[Flight, None]()
        self._asked_at, self._fd = 0.0, line.sock.fileno()
        self._poll, self._writable = select.poll(), False
        self._poll.register(self._fd, select.POLLIN)
        if loop is not None:
            loop.add_reader(self._fd, self.progress)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._flights and not self._backlog

    def send(self, flight: Flight) -> None:
        """Send a request, or keep it until the worker takes more. Raises ClientError: Unavailable, InvalidRequest."""
        with self._lock:
            if self.closed:
                raise self.gone()
            flight.id = next(self._ids)
            if not self._flights:
                self._asked_from = time.monotonic()
            if len(self._flights) >= self._num_requests:
                self._backlog.append(flight)
                return
            self._send(flight)
        if self._line.is_sending:
            self._flush(flight.batch.deadline)

    def withdraw(self, flight: Flight) -> None:
        """Its caller has stopped waiting."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._backlog.remove(flight)
            if self._flights.pop(flight.id, None) is not None and not self.closed:
                self._shared.abandon(flight.place)
                with contextlib.suppress(OSError):
                    self._line.send([frames.plain(FrameKind.CANCEL, flight.id)])
                self._send_more()
        self._rewatch()

    def wait(self, flight: Flight, until: float) -> bool:
        """Wait for an answer in this thread. False: there is none before that time, monotonic seconds."""
        while not flight.done:
            if time.monotonic() >= until:
                return False
            if self._leader.acquire(blocking=False):  # as a rule
                try:
                    self._lead(until, flight)
                finally:
                    self._hand_over()
                    self._appoint()
                continue
            flight.event = flight.event or threading.Event()
            flight.event.clear()
            self._waiting[flight] = None
            try:
                if self._leader.acquire(blocking=False):
                    try:
                        self._lead(until, flight)
                    finally:
                        self._hand_over()
                elif not flight.done:
                    flight.event.wait(min(until - time.monotonic(), QUIET_S))
            finally:
                del self._waiting[flight]
                self._appoint()
        return True

    async def finished(self, flight: Flight, until: float) -> bool:
        """The same in the event loop."""
        assert self._loop is not None
        while not flight.done:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            flight.future = self._loop.create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, QUIET_S)):
                    await flight.future
            self._check_alive()
        return True

    def notice_end(self) -> None:
        """Read what is here, if nobody has for a while: the worker may have ended the connection."""
        rests = self._loop is None and self.is_idle and time.monotonic() - self._used_at > IDLE_S
        if rests and not self.closed and self._leader.acquire(blocking=False):
            try:
                self.progress()
            finally:
                self._hand_over()

    def progress(self) -> None:
        """Read and write what can be read and written now. One thread at a time."""
        try:
            self._line.push()
            self._read()
        except (EOFError, OSError, FrameError) as error:
            self.fail(str(error))
        self._rewatch()

    def fail(self, why: str) -> None:
        """End it: requests in flight fail with Unavailable. Idempotent."""
        with self._lock:
            flights = [*self._flights.values(), *self._backlog]
            if self._filling is not None and self._filling[0] is not None:
                flights.append(self._filling[0])
            self.closed, self._filling = self.closed or why or "closed", None
            self._flights.clear()
            self._backlog.clear()
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
                self._loop.remove_writer(self._fd)
                self._loop = None
        self._line.shut_down()
        if self._leader.acquire(blocking=False):  # nobody reads
            self._hand_over()
        for flight in flights:
            self._finish(flight, self.gone())

    def gone(self) -> Unavailable:
        """The error of requests that it had."""
        return Unavailable(f"{self.where}: {self.closed}", self.lost, self.epoch)

    def _send(self, flight: Flight) -> None:
        """Under the lock. Raises InvalidRequest."""
        share, batch = flight.share, flight.batch
        x, ids, weights = batch.parts
        if share.stop - share.start != len(x):
            x, ids, weights = (part[share.start : share.stop] for part in batch.parts)
        timeout_ms = max(1, min((1 << 32) - 1, int(1000 * (batch.deadline - time.monotonic()))))
        shape, about = (x.shape[0], x.shape[1], ids.shape[1]), (timeout_ms, batch.model, current_traceparent())
        request = frames.Forward(flight.id, batch.layer, *shape, x.dtype, *about)
        is_small = request.num_bytes <= _SMALL_BYTES
        if not is_small:
            rows = x, ids if ids.dtype is torch.int32 else _narrow(ids), weights
            flight.place = self._shared.lay(rows, request.num_bytes)
            if flight.place is not None:
                request = request._replace(place=flight.place.begin)
        try:
            head = frames.forward(request)
        except FrameError as error:
            self._shared.give_back(flight.place)
            raise InvalidRequest(str(error)) from None
        parts: list[bytes | memoryview] = [head]
        if is_small:
            parts = [b"".join((head, _copy_of(x), _narrow_copy_of(ids), _copy_of(weights)))]
        elif flight.place is None:
            parts += map(wire.bytes_of, rows)
        self._flights[flight.id] = flight
        self._used_at = time.monotonic()
        with contextlib.suppress(OSError):  # an answer may say why; else there is the end to read
            self._line.send(parts)
        self._rewatch()

    def _send_more(self) -> None:
        """What had to wait, as far as the worker takes it; under the lock."""
        while self._backlog and len(self._flights) < self._num_requests:
            flight = self._backlog.popleft()
            try:
                self._send(flight)
            except ClientError as error:
                self._finish(flight, error)

    def _flush(self, until: float) -> None:
        """Send what waits, in this thread, before that time; answers are read meanwhile, if no other thread does it:
        the worker may wait for that. The event loop does it by itself."""
        if self._loop is not None:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while self._line.is_sending and not self.closed and time.monotonic() < until:
            if self._leader.acquire(blocking=False):
                try:
                    self._turn(_WRITE_S)
                finally:
                    self._hand_over()
                    self._appoint()
            else:
                poll.poll(1e3 * _WRITE_S)
                with contextlib.suppress(OSError):
                    self._line.push()

    def _lead(self, until: float, flight: Flight) -> None:
        """Read for all threads until that flight is done, or that time."""
        while not flight.done:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._turn(min(left_s, QUIET_S))

    def _turn(self, timeout_s: float) -> None:
        """Wait for the socket, and read and write; of the thread that leads."""
        wanted = self._line.is_sending
        if wanted != self._writable:
            self._writable = wanted
            self._poll.modify(self._fd, select.POLLIN | select.POLLOUT * wanted)
        if self._poll.poll(1e3 * timeout_s):
            self.progress()
        self._check_alive()

    def _hand_over(self) -> None:
        """Read no more, for now or for ever."""
        if self.closed:
            self._line.close()
        self._leader.release()

    def _appoint(self) -> None:
        """Let another thread lead."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # changed meanwhile: whoever changed it looks again
                for flight in self._waiting:
                    if flight.event is not None:
                        flight.event.set()
                        break

    def _check_alive(self) -> None:
        """Ask the worker for a sign of life, or give it up."""
        now, heard_at = time.monotonic(), max(self._line.heard_at, self._asked_from)
        if now - heard_at < QUIET_S or not self._flights:
            return
        if self._asked_at < heard_at:
            self._asked_at = now
            with contextlib.suppress(OSError):
                self._line.send([frames.plain(FrameKind.PING)])
        elif now - self._asked_at > ALIVE_S:
            self.silent = True
            self.fail(f"silent for {now - heard_at:.0f} s")

    def _rewatch(self) -> None:
        """Have the event loop write what waits."""
        loop, wanted = self._loop, self._line.is_sending
        if loop is not None and wanted != self._writable:
            self._writable = wanted
            if wanted:
                loop.add_writer(self._fd, self.progress)
            else:
                loop.remove_writer(self._fd)

    def _read(self) -> None:
        while True:
            if (filling := self._filling) is not None:  # another thread may end the connection
                if not self._line.fill():
                    return
                (flight, about), self._filling = filling, None
                if flight is not None:
                    flight.model = about.model
                    self._finish(flight)
                if not self._line.has_read_more:
                    return
            frame = self._line.next()
            if frame is None:
                return
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        """Raises FrameError."""
        if frame.kind == FrameKind.ANSWER:
            about, flight = frames.answer_of(frame), self._landed(frame.id)
            if flight is not None and ((about.num_tokens, about.hidden), about.dtype, about.in_place) != (
                tuple(flight.out.shape),
                flight.out.dtype,
                flight.place is not None,
            ):
                self._finish(flight, ClientError(f"answer: expected {list(flight.out.shape)}, got {about}"))
                flight = None
            into = None
            if flight is not None and flight.place is not None:
                flight.place.pick_up(wire.bytes_of(flight.out))
                self._let_go(flight.place)
            elif flight is not None and not self._line.rows_to(flight.out):
                into = wire.bytes_of(flight.out)
            self._line.rows_into(into)
            self._filling = flight, about
        elif frame.kind == FrameKind.ERROR:
            code, epoch, ranks, message = frames.error_of(frame)
            error = from_answer(expert_pb2.Error(code=code, message=message, lost_ranks=ranks, epoch=epoch))
            if (flight := self._landed(frame.id)) is not None:
                self._let_go(flight.place, error)
                self._finish(flight, error)
        elif frame.kind == FrameKind.GOAWAY:
            self.sent_away = True
        elif frame.kind == FrameKind.MEMORY:
            with self._lock:
                self._shared.got(frames.memory_of(frame))
        elif frame.kind != FrameKind.PONG:
            raise FrameError(f"kind: expected one of a worker, got {frame.kind}")

    def _landed(self, number: int) -> Flight | None:
        with self._lock:
            flight = self._flights.pop(number, None)
            self._send_more()
        return flight

    def _let_go(self, place: RowsPlace | None, error: ClientError | None = None) -> None:
        """Use the place of an answered request again, if no step can write it any more."""
        with self._lock:
            if error is None or isinstance(error, InvalidRequest | Overloaded):  # no step has taken it
                self._shared.give_back(place)
            else:
                self._shared.abandon(place)

    @staticmethod
    def _finish(flight: Flight, error: ClientError | None = None) -> None:
        flight.error, flight.done = error, True
        if flight.event is not None:
            flight.event.set()
        if flight.future is not None and not flight.future.done():
            flight.future.set_result(None)


def _copy_of(tensor: torch.Tensor) -> bytes:
    if not tensor.is_contiguous() or tensor.is_neg():
        return bytes(wire.bytes_of(tensor))
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _narrow_copy_of(ids: torch.Tensor) -> bytes:
    if ids.dtype is torch.int32:
        return _copy_of(ids)
    if ids.numel() <= _FEW:
        try:
            return array("i", itertools.chain.from_iterable(ids.tolist())).tobytes()
        except OverflowError:
            pass
    return bytes(wire.bytes_of(_narrow(ids)))


def _narrow(ids: torch.Tensor) -> torch.Tensor:
    """int64 ids as int32: what no int32 holds becomes another number that the worker refuses."""
    return torch.from_numpy(ids.numpy().clip(_LEAST, _MOST).astype("int32"))
