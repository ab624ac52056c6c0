"""A client's end of a request connection: calls in flight to one worker, answered in any order.

Any thread sends. Of the threads that wait for an answer one reads for all (it leads), and hands over when it has its
own; of a client for asyncio the event loop reads. Rows are sent from where their caller has them, and received in the
tensor that `forward` returns; large ones of one host go through memory that both ends map (shared_rows.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import threading
import time
from collections import deque

from crossdock.client.errors import ClientError, InvalidRequest, Overloaded, Unavailable, from_answer
from crossdock.client.shared_rows import RowsPlace, SharedRows
from crossdock.client.shares import ForwardCall, Share
from crossdock.common.tracing import current_traceparent
from crossdock.protocol import frames, wire
from crossdock.protocol.frames import FrameError, FrameKind, FrameSocket
from crossdock.protocol.rows import packet
from crossdock.protocol.v1 import expert_pb2

QUIET_S, ALIVE_S = 1.0, 3.0
"""Without a byte for so long the worker is asked for one, and counts as silent if none comes in the time after."""
IDLE_S = 0.1
"""An unused connection is looked at before it is used again after so long: it may have ended."""
_SMALL_BYTES = 64 << 10
"""A request up to this is joined and goes through the socket: that costs less than views, and than shared memory."""
_WRITE_S = 0.05


class Flight:
    """One share of a call, on its way.

    Attributes:
        done: whether there is an answer, or an error.
        model: fingerprint of the checkpoint that made the answer.
    """

    def __init__(self, batch: ForwardCall, share: Share) -> None:
        self.batch, self.share = batch, share
        self.id, self.done, self.model = 0, False, ""
        self.error: ClientError | None = None
        self.event: threading.Event | None = None
        self.future: asyncio.Future[None] | None = None
        self.place: RowsPlace | None = None

    @property
    def num_bytes(self) -> int:
        """Of its rows."""
        return (self.share.stop - self.share.start) * self.batch.rows.row_bytes

    def part(self, *, with_x: bool = True) -> bytes:
        """Where they are, for native code."""
        return self.batch.rows.part(self.share.start, self.share.stop, with_x=with_x)

    @property
    def address(self) -> int:
        """Where the rows of its answer go."""
        rows = self.batch.rows
        return self.batch.y_address + self.share.start * rows.width

    def is_answered_by(self, about: frames.Answer) -> bool:
        """Whether that is of its shape."""
        rows, num_tokens = self.batch.rows, self.share.stop - self.share.start
        got = about.num_tokens, about.hidden, about.dtype, about.in_place
        return got == (num_tokens, rows.hidden, rows.dtype, self.place is not None)


class Connection:
    """One connection to a worker, which has welcomed it.

    Args:
        where: its name for errors.
        lost: its rank, where it is known.
        epoch: of the view with this worker, for errors.
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
        self._filling: tuple[Flight | None, str] | None = None
        self._shared = SharedRows(line)
        self._leader, self._waiting = threading.Lock(), dict[Flight, None]()
        self._asked_at, self._fd = 0.0, line.sock.fileno()
        self._writable = False
        if loop is not None:
            loop.add_reader(self._fd, self.progress)

    @property
    def is_idle(self) -> bool:
        return not self._flights and not self._backlog

    def send(self, flight: Flight) -> None:
        """Send a request, or keep it until the worker takes more. Raises Unavailable."""
        with self._lock:
            if self.closed:
                raise self.gone()
            flight.id = next(self._ids)
            if not self._flights:
                self._asked_from = time.monotonic()
            self._backlog.append(flight)
            self._send_more()
        if self._line.is_sending:
            self._flush(flight.batch.deadline)

    def withdraw(self, flight: Flight) -> None:
        """Its caller has stopped waiting."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._backlog.remove(flight)
            if self._flights.pop(flight.id, None) is not None and not self.closed:
                with contextlib.suppress(OSError):
                    self._line.send([frames.plain(FrameKind.CANCEL, flight.id)])
                if flight.place is not None:  # behind that, since other memory may be asked for
                    self._shared.abandon(flight.place)
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
        """The same in the event loop; in this thread, which blocks, if no loop reads the connection."""
        if self._loop is None:
            return self.wait(flight, until)
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

    def notice_end(self, now: float) -> None:
        """Read what is here of an idle connection, if nobody has for a while: the worker may have ended it. now:
        monotonic seconds."""
        rests = now - self._used_at > IDLE_S and self._loop is None
        if rests and not self.closed and self._leader.acquire(blocking=False):
            try:
                self.progress()
            finally:
                self._hand_over()

    def progress(self) -> None:
        """Read and write what can be read and written now. One thread at a time."""
        self._turn(0.0)

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
        return Unavailable(f"{self.where}: {self.closed}", self.lost, self.epoch)

    def _send(self, flight: Flight) -> None:
        """Under the lock. Raises InvalidRequest."""
        share, batch = flight.share, flight.batch
        whole = batch.rows
        timeout_ms = max(1, min((1 << 32) - 1, int(1000 * (batch.deadline - time.monotonic()))))
        num_bytes = flight.num_bytes
        place = frames.NOWHERE if flight.place is None else flight.place.begin
        try:
            head = frames.forward(
                flight.id, batch.layer, share.stop - share.start, whole.hidden, whole.topk, whole.dtype, timeout_ms,
                batch.model, current_traceparent(), num_bytes, place,
            )  # fmt: skip
        except FrameError as error:
            if flight.place is not None:
                self._shared.give_back(flight.place)
            raise InvalidRequest(str(error)) from None
        if flight.place is not None:
            parts: list[bytes | memoryview] = [head]
        elif num_bytes <= _SMALL_BYTES:
            parts = [packet(head, flight.part())]
        else:
            x = wire.bytes_of(whole.tensors[0][share.start : share.stop])  # which keeps it: it may leave later
            parts = [head, x, packet(b"", flight.part(with_x=False))]
        self._flights[flight.id] = flight
        self._used_at = time.monotonic()
        with contextlib.suppress(OSError):  # an answer may say why; else there is the end to read
            self._line.send(parts)
        batch.land()  # under the lock that its answer takes
        self._rewatch()

    def _send_more(self) -> None:
        """What had to wait, as far as the worker takes it; under the lock. Small requests overtake large ones, which
        wait for a place in their order."""
        waits = False
        for flight in tuple(self._backlog):
            if len(self._flights) >= self._num_requests:
                return
            if flight.num_bytes > _SMALL_BYTES:
                if not waits:
                    flight.place = self._shared.lay(flight.part(), flight.num_bytes)
                    waits = flight.place is None and self._shared.is_due(flight.num_bytes)
                if waits:
                    continue
            self._backlog.remove(flight)
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
        """Wait for the socket, and read and write; of the thread that leads, or the event loop."""
        try:
            got = self._line.wait(timeout_s, writes=self._line.is_sending) if timeout_s else self._line.next()
            self._line.push()
            self._read(got)
        except (EOFError, OSError, FrameError) as error:
            self.fail(str(error))
            got = frames.NOTHING
        self._rewatch()
        if got == frames.NOTHING:
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
        if now - heard_at < QUIET_S or self.is_idle:
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

    def _read(self, got: int) -> None:
        while got:
            if got == frames.ROWS:
                self._whole()
            else:
                self._take(got)
            got = self._line.next() if self._line.has_read_more else frames.NOTHING

    def _take(self, kind: int) -> None:
        """Raises FrameError, EOFError."""
        number = self._line.state.id
        if kind == FrameKind.ANSWER:
            about, flight = self._line.answer(), self._landed(number)
            error: ClientError | None = None
            if flight is not None and not flight.is_answered_by(about):
                expected = [flight.share.stop - flight.share.start, flight.batch.rows.hidden]
                error = ClientError(f"answer: expected {expected}, got {about}")
            elif flight is not None and flight.place is not None:
                flight.place.pick_up(flight.address, about.num_tokens * flight.batch.rows.width)
            self._let_go(flight, error)
            if flight is not None and error is not None:
                self._finish(flight, error)
                flight = None
            self._filling = flight, about.model
            into = 0 if flight is None or flight.place is not None else flight.address
            if self._line.rows_to(into, None if flight is None else flight.batch.y):
                self._whole()
        elif kind == FrameKind.ERROR:
            code, epoch, ranks, message = frames.error_of(self._line.frame())
            error = from_answer(expert_pb2.Error(code=code, message=message, lost_ranks=ranks, epoch=epoch))
            flight = self._landed(number)
            self._let_go(flight, error)
            if flight is not None:
                self._finish(flight, error)
        elif kind == FrameKind.GOAWAY:
            self.sent_away = True
        elif kind == FrameKind.MEMORY:
            with self._lock:
                self._shared.got(frames.memory_of(self._line.frame()))
                self._send_more()
        elif kind != FrameKind.PONG:
            raise FrameError(f"kind: expected one of a worker, got {kind}")

    def _whole(self) -> None:
        """The rows of an answer are here."""
        filling, self._filling = self._filling, None
        if filling is not None and filling[0] is not None:  # another thread may end the connection
            filling[0].model = filling[1]
            self._finish(filling[0])

    def _landed(self, number: int) -> Flight | None:
        with self._lock:
            return self._flights.pop(number, None)

    def _let_go(self, flight: Flight | None, error: ClientError | None = None) -> None:
        """Use the place of an answered request again, if no step can write it any more, and send what waits."""
        place = None if flight is None else flight.place
        if place is None and not self._backlog:  # as a rule
            return
        with self._lock:
            if place is not None and (error is None or isinstance(error, InvalidRequest | Overloaded)):
                self._shared.give_back(place)
            elif place is not None:
                self._shared.abandon(place)
            self._send_more()

    @staticmethod
    def _finish(flight: Flight, error: ClientError | None = None) -> None:
        flight.error, flight.done = error, True
        if flight.event is not None:
            flight.event.set()
        if flight.future is not None and not flight.future.done():
            flight.future.set_result(None)
