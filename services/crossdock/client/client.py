"""The Python client of the expert service for asyncio; blocking.py has the one for threads.

    client = Client("127.0.0.1:7400")                    # a control plane, or one worker
    y = client.forward(layer, x, topk_ids, topk_weights)  # [T, H], dtype of x

A batch is spread over the ranks, each with a share of the tokens, by one connection to each (connection.py). Views are
followed: requests in flight to a lost rank are retried until their deadline (forward is idempotent). A request that a
worker refuses for lack of resources is retried alone at the next worker, within a budget (`RetryBudget`).

What a call does is written once, in `Requests.forward`. It waits in the event loop; for a thread it blocks instead.

Letters: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from crossdock.client.connection import Connection, Flight
from crossdock.client.dialling import KnownWorker
from crossdock.client.directory import Directory, ServingWorkers
from crossdock.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from crossdock.client.shares import (
    MAX_TIMEOUT_S,
    REQUEST_BYTES,
    ForwardCall,
    Share,
    check_timeout,
    cut,
    rows_of_call,
    split,
)
from crossdock.common.security import security_of
from crossdock.common.settings import SecurityConfig
from crossdock.common.tasks import background, call_in_loop, end_tasks
from crossdock.protocol.rows import CallRows
from crossdock.protocol.v1 import expert_pb2


class RetryBudget:
    """A token for each request that is sent again after RESOURCE_EXHAUSTED. Any thread.

    Args:
        ratio: tokens per answer: in the long run one request in 1 / ratio is retried.
        most: initial and maximum number of tokens.
        per_s: tokens per second, so that a client without any answers keeps trying.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ratio: float = 0.1,
        most: float = 10.0,
        per_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ratio, self._most, self._per_s, self._clock = ratio, most, per_s, clock
        self._left, self._at, self._lock = most, clock(), threading.Lock()

    def answered(self) -> None:
        with self._lock:
            self._left = min(self._most, self._left + self._ratio)

    def take(self) -> bool:
        """Take a token; False: none is left."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left < 1:
                return False
            self._left -= 1
            return True


AVOID_S = 2.0
"""How long a worker with a broken connection is avoided, if there are others: each serves every token."""
MIN_TOKENS_PER_WORKER = 64
"""Smallest share: each costs a request and may cost a step."""
OLD_S = 300.0
"""Age at which a connection is replaced between two requests: the caller's rights are checked again."""
_BUDGET_S = 0.1
"""Polling interval of a request that waits for a token of the retry budget; randomized down to half."""
_RETRY_S = (0.05, 1.0)
"""First and longest pause before a retry; randomized down to nothing."""


Result = TypeVar("Result")


@dataclass(slots=True)
class _Try:
    """A share that is to be sent, from a time on. `tries`: workers that were asked before."""

    share: Share
    at: float = 0.0
    tries: int = 0
    failed: ClientError | None = None


class Requests:
    """Workers, connections and retries of one client. Coroutines run in its loop; so does `forward`, or in a thread.

    Args:
        target, retry, min_tokens_per_worker, model, security: as AsyncClient.
        run_in_loop: of a client for threads: run a coroutine in the loop and wait for its result in this thread. Then
            `forward` never suspends: its waits block, and a thread that waits reads its connection.
    """

    def __init__(
        self,
        target: str,
        retry: bool,
        min_tokens_per_worker: int,
        model: str,
        security: SecurityConfig | None,
        run_in_loop: Callable[[Coroutine[Any, Any, Any]], Any] | None = None,
    ) -> None:
        if min_tokens_per_worker < 1:
            raise InvalidRequest(f"min_tokens_per_worker: expected 1 or more, got {min_tokens_per_worker}")
        self._security = security_of(security) if security is not None else None
        self.target, self._retry, self._model, self._min_tokens = target, retry, model, min_tokens_per_worker
        self._run_in_loop = run_in_loop
        self._directory: Directory | None = None
        self._connections: dict[str, Connection] = {}
        self._dialling: dict[str, asyncio.Task[Connection]] = {}
        self._broken_at: dict[str, float] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._turns, self._budget, self._closed = itertools.count(), RetryBudget(), False

    def batch_of(self, layer: int, rows: CallRows, timeout_s: float) -> ForwardCall:
        """One call; its shares begin at the next worker."""
        deadline = time.monotonic() + min(timeout_s, MAX_TIMEOUT_S)
        return ForwardCall(layer, rows, deadline, next(self._turns), self._model)

    async def describe(self, timeout_s: float) -> expert_pb2.DescribeResponse:
        """See AsyncClient.describe."""
        check_timeout(timeout_s)
        deadline, tries = time.monotonic() + min(timeout_s, MAX_TIMEOUT_S), 0
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                service = await self._service(left_s)
                return await self._worker(service, 0).describe(max(0.0, deadline - time.monotonic()))
            except (Unavailable, Overloaded) as error:
                self._failed(error)
                await asyncio.sleep(self._pause(error, tries, deadline))
                tries += 1

    async def forward(self, batch: ForwardCall) -> torch.Tensor:
        """A whole call. Raises ClientError."""
        began, service = time.monotonic(), self._known() or await self._first_service(batch.deadline)
        most = max(1, REQUEST_BYTES // batch.rows.row_bytes)
        shares = split(batch.rows.num_tokens, len(service.workers), batch.turn, self._min_tokens, most)
        asked: ServingWorkers | None = service
        todo = [_Try(share) for share in shares]
        flying: list[tuple[_Try, Connection, Flight]] = []
        try:
            while todo or flying:
                now = time.monotonic()
                due, todo = [each for each in todo if each.at <= now], [each for each in todo if each.at > now]
                for each in due:
                    todo += await self._sent(batch, each, asked, flying)
                    asked = None  # one that is sent later may find others
                if not flying:
                    if todo:
                        await self._in_loop(asyncio.sleep(max(0.0, min(each.at for each in todo) - time.monotonic())))
                elif (ended := await self._landed(batch, began, todo, flying)) is not None:
                    todo.append(ended)
                if (
                    not (todo or flying) and len(batch.models) > 1
                ):  # shares that a switch of the layer's checkpoint has parted from the others
                    for share in batch.stale():
                        del batch.models[share]
                        todo.append(_Try(share))
        finally:
            for _, connection, flight in flying:
                connection.withdraw(flight)
        assert batch.y is not None
        return batch.y

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        await end_tasks(*self._dialling.values(), *self._probing.values())
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.fail("the client is closed")
        if self._directory is not None:
            await self._directory.close()

    async def _in_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine of the loop leads to."""
        if self._run_in_loop is None:
            return await work
        result: Result = self._run_in_loop(work)
        return result

    async def _first_service(self, deadline: float) -> ServingWorkers:
        """Who serves now. Raises ClientError."""
        tries = 0
        while True:
            try:
                return await self._in_loop(self._service(max(0.0, deadline - time.monotonic())))
            except Unavailable as error:
                self._failed(error)
                await self._in_loop(asyncio.sleep(self._pause(error, tries, deadline)))
                tries += 1

    async def _sent(
        self,
        batch: ForwardCall,
        each: _Try,
        service: ServingWorkers | None,
        flying: list[tuple[_Try, Connection, Flight]],
    ) -> list[_Try]:
        """Send a share, which is then among those that fly; what is to be tried again, or later. service: who serves,
        where that was just asked."""
        deadline, share = batch.deadline, each.share
        if isinstance(each.failed, Overloaded) and not self._budget.take():
            if time.monotonic() >= deadline or self._closed:
                raise each.failed
            each.at = time.monotonic() + _BUDGET_S * random.uniform(0.5, 1.0)
            return [each]
        try:
            self._check_open()
            service = service or self._known()
            if service is None:
                service = await self._in_loop(self._service(max(0.0, deadline - time.monotonic())))
            number = (share.worker + each.tries) % len(service.workers)
            each.tries += 1
            connection = self._usable(service.workers[number][1])
            if connection is None:
                connection = await self._in_loop(self._dialled(service, number))
            most, row = connection.max_request_bytes, batch.rows.row_bytes
            if row * (share.stop - share.start) > most:
                if row > most:
                    raise InvalidRequest(f"x: expected rows of at most {most} bytes for {connection.where}, got {row}")
                return [_Try(piece, 0.0, each.tries - 1, each.failed) for piece in cut(share, most // row)]
            connection.epoch, flight = service.epoch, Flight(batch, share)
            connection.send(flight)
            flying.append((each, connection, flight))
        except (Unavailable, Overloaded) as error:
            return [self._again(each, error, deadline)]
        return []

    async def _landed(
        self, batch: ForwardCall, began: float, todo: list[_Try], flying: list[tuple[_Try, Connection, Flight]]
    ) -> _Try | None:
        """Wait for one answer, or until something is to be sent; what is to be tried again."""
        each, connection, flight = flying[0]
        until = min([batch.deadline, *(one.at for one in todo)]) if todo else batch.deadline
        if not flight.done and not await connection.finished(flight, until):
            if time.monotonic() >= batch.deadline:
                before = f"; before that: {each.failed}" if each.failed is not None else ""
                within = f"no answer within {max(0.0, batch.deadline - began):.3f} s"
                raise DeadlineExceeded(f"{connection.where}: {within}{before}") from each.failed
            return None
        del flying[0]
        if flight.error is None:
            self._budget.answered()
            batch.models[flight.share] = flight.model
        elif isinstance(flight.error, Unavailable | Overloaded):
            if connection.closed:
                self._broken_at[connection.address] = time.monotonic()
            return self._again(each, flight.error, batch.deadline)
        else:
            raise flight.error
        return None

    def _again(self, each: _Try, error: ClientError, deadline: float) -> _Try:
        """Try a share again, a while later. Raises the error: nothing is retried, or there is no time for it."""
        self._failed(error)
        each.at, each.failed = time.monotonic() + self._pause(error, each.tries - 1, deadline), error
        return each

    def _failed(self, error: ClientError) -> None:
        self._check_open(error)
        if isinstance(error, Unavailable) and self._directory is not None:
            call_in_loop(self._directory.loop, self._directory.recheck)

    def _check_open(self, error: ClientError | None = None) -> None:
        if self._closed:
            raise ClientError("the client is closed") from error

    def _pause(self, error: ClientError, tries: int, deadline: float) -> float:
        """Seconds before the next try. Raises the error: there is none."""
        first, most = _RETRY_S
        pause = random.uniform(0.0, min(most, first * 2 ** min(tries, 10)))
        if not self._retry or time.monotonic() + pause >= deadline:
            raise error
        return pause

    def _known(self) -> ServingWorkers | None:
        """Who serves, where that is known, and none is avoided. Any thread."""
        service = self._directory.now if self._directory is not None else None
        return self._without_broken(service) if service is not None and service.workers else None

    def _usable(self, address: str) -> Connection | None:
        """A connection that takes requests. Any thread."""
        connection = self._connections.get(address)
        if connection is None:
            return None
        is_idle, now = connection.is_idle, time.monotonic()
        if is_idle:
            connection.notice_end(now)
        if connection.closed or connection.sent_away:
            return None
        if is_idle and now - connection.opened_at > OLD_S:
            return None
        if is_idle and self._security is not None and self._security.version != connection.version:
            return None
        return connection

    # The loop.

    async def _service(self, left_s: float) -> ServingWorkers:
        """Who serves. Raises Unavailable, NotAllowed."""
        if self._directory is None:
            self._check_open()
            self._directory = Directory(self.target, self._security)
        service = await self._directory.service(left_s, wait=self._retry)
        if not service.workers:
            raise Unavailable(f"the group (epoch {service.epoch}) has no ready worker", (), service.epoch)
        here = {address for _, address in service.workers}
        for address in [each for each, one in self._connections.items() if each not in here and one.is_idle]:
            self._connections.pop(address).fail("the worker has left the group")
        return self._without_broken(service)

    def _worker(self, service: ServingWorkers, number: int) -> KnownWorker:
        rank, address = service.workers[number]
        return KnownWorker(address, rank, service.epoch, self._security)

    async def _dialled(self, service: ServingWorkers, number: int) -> Connection:
        """A connection to a worker: of several calls that want one, one dials. Raises ClientError."""
        address = service.workers[number][1]
        found = self._usable(address)
        if found is not None:
            return found
        task = self._dialling.get(address)
        if task is None:
            task = self._dialling[address] = asyncio.create_task(self._dial(self._worker(service, number)))
            task.add_done_callback(functools.partial(self._dialled_up, address))
        return await asyncio.shield(task)

    def _dialled_up(self, address: str, task: asyncio.Task[Connection]) -> None:
        self._dialling.pop(address, None)
        if not task.cancelled():
            task.exception()  # whoever waits for it has it; maybe nobody does any more

    async def _dial(self, worker: KnownWorker) -> Connection:
        former, version = self._connections.get(worker.address), self._security.version if self._security else 0
        if former is not None and former.silent and worker.address not in self._probing:
            task = background(self._probe(worker), "the probe of a worker")
            self._probing[worker.address] = task
            task.add_done_callback(lambda _: self._probing.pop(worker.address, None))
        try:
            connection = await worker.connect(read_by_loop=self._run_in_loop is None)
        except Unavailable:
            self._broken_at[worker.address] = time.monotonic()
            raise
        connection.version = version
        self._connections[worker.address] = connection
        if former is not None and former.is_idle:
            former.fail("replaced")
        if self._closed:
            connection.fail("the client is closed")
        return connection

    async def _probe(self, worker: KnownWorker) -> None:
        """Until the worker answers."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await worker.describe(3.0)
                return
            except ClientError as error:
                if not isinstance(error, Unavailable | DeadlineExceeded):
                    return

    def _without_broken(self, service: ServingWorkers) -> ServingWorkers:
        """Without workers that broke recently or do not respond; with all of them if no other is left."""
        if not self._broken_at and not self._probing:  # as a rule
            return service
        since = time.monotonic() - AVOID_S
        broken = {address for address, at in tuple(self._broken_at.items()) if at > since} | {*self._probing}
        left = tuple(worker for worker in service.workers if worker[1] not in broken) if broken else ()
        return replace(service, workers=left) if left else service


class AsyncClient:
    """For asyncio: use it inside one event loop, from any number of tasks. `Client` is the same for threads.

    Args:
        target: host:port of a control plane (its workers are found and followed; several, separated by commas, where
            it has replicas), or of one worker.
        retry: retry Unavailable and Overloaded until the deadline.
        min_tokens_per_worker: see MIN_TOKENS_PER_WORKER.
        model: fingerprint of the only checkpoint whose rows are wanted; empty: any.
        security: certificates and token, for example from `load_security`; None: plain text.
    """

    def __init__(
        self,
        target: str,
        *,
        retry: bool = True,
        min_tokens_per_worker: int = MIN_TOKENS_PER_WORKER,
        model: str = "",
        security: SecurityConfig | None = None,
    ) -> None:
        self._requests = Requests(target, retry, min_tokens_per_worker, model, security)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def target(self) -> str:
        """The target it was made with."""
        return self._requests.target

    async def describe(self, timeout_s: float = 60.0) -> expert_pb2.DescribeResponse:
        """Describe the served model and the group. Raises ClientError."""
        return await self._requests.describe(timeout_s)

    async def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        timeout_s: float = 60.0,
    ) -> torch.Tensor:
        """Run the routed experts of one layer.

        Args:
            layer: the layer's number in the model.
            x: [T, H] in the service's dtype.
            topk_ids: int32 or int64 [T, K], logical expert ids; -1 = no expert.
            topk_weights: float [T, K], final: scaling factors are already in.
            timeout_s: deadline of the call, including retries; at most MAX_TIMEOUT_S.

        Returns:
            [T, H], dtype and device of x.

        Raises:
            InvalidRequest: a wrong shape, dtype, layer, id or timeout_s.
            Unavailable: the group does not serve (with retry: until the deadline); has the lost ranks.
            DeadlineExceeded: no answer within timeout_s.
            Overloaded: the service refused more work (with retry: until the deadline).
            NotAllowed: the service does not know this caller.
            ModelMismatch: the layer has another checkpoint than `model` of this client.
        """
        rows = rows_of_call(layer, x, topk_ids, topk_weights, timeout_s)
        if not rows.num_tokens:
            return x.new_empty(x.shape)
        batch = self._requests.batch_of(layer, rows, timeout_s)
        return (await self._requests.forward(batch)).to(x.device)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._requests.close()
