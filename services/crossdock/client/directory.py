"""Who serves just now: follows the control plane's views, or knows the one worker it was given.

While the control plane is away the newest view stays in force: serving does not depend on it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc

from crossdock.client.errors import REFUSALS, NotAllowed, Unavailable
from crossdock.common import rpc
from crossdock.common.line import Line
from crossdock.common.log import get
from crossdock.common.security import Security
from crossdock.common.tasks import beside
from crossdock.v1 import control_pb2, control_pb2_grpc

log = get(__name__)

_RETRY_S = (0.1, 1.0)
"""First and longest pause before a broken Watch is tried again."""


@dataclass(frozen=True, slots=True)
class Service:
    """Where requests may go.

    Attributes:
        epoch: membership counter; 0 for a worker that was named directly.
        workers: (rank, address) by rank; the rank is None for a worker that was named directly.
    """

    epoch: int
    workers: tuple[tuple[int | None, str], ...]


class Directory:
    """Make and use it inside the running loop.

    Args:
        target: host:port of a control plane (several, separated by commas, where it has replicas) or of one worker;
            which of the two is found out.
        security: TLS and tokens; None: plain text.
    """

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._target = target
        self._line = Line(target, security)
        self._changed = asyncio.Condition()
        self._service: Service | None = None
        self._trouble = Unavailable(f"control plane {target}: no answer yet")
        self._refused: NotAllowed | None = None
        self._term = 0
        self._doubted = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._known = self._closed = False
        self._task = asyncio.create_task(self._follow())

    async def service(self, timeout_s: float, *, wait: bool) -> Service:
        """Where to send requests now.

        Args:
            timeout_s: longest wait.
            wait: wait for a group that is not serving; else only for the first word of the control plane.

        Raises:
            Unavailable: nobody serves (any more, or within timeout_s), with the ranks that are missing.
            NotAllowed: the control plane does not know this caller.
        """

        def settled() -> bool:
            return self._service is not None or (self._known and not wait) or self._closed or self._refused is not None

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            pass
        if self._service is None and self._refused is not None:
            raise NotAllowed(str(self._refused))
        if self._service is None:
            trouble = self._trouble
            raise Unavailable(str(trouble), trouble.lost_ranks, trouble.epoch)
        return self._service

    def doubt(self) -> None:
        """A worker that the newest view names did not answer: is whoever told of it still there? A control plane that
        is stopped or cut off breaks no connection, so ask, and follow another one if it is silent."""
        if not self._task.done() and (self._asking is None or self._asking.done()):
            self._asking = beside(self._ask(), "the question who leads")

    async def _ask(self) -> None:
        if not await self._line.answers():
            self._doubted.set()

    async def close(self) -> None:
        """Stop following; whoever waits for a service is told that there is none."""
        tasks = [self._task, *([self._asking] if self._asking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._closed = True
        await self._set(None)
        await self._line.close()

    async def _follow(self) -> None:
        self._pause_s = _RETRY_S[0]
        problem: Exception | None = None
        while True:
            before = problem
            try:
                problem = await self._watch(before)
            except Exception as error:  # clients would wait for this task until their deadline, and never hear why
                problem = error
                if repr(error) != repr(before):
                    log.exception("cannot follow the control plane", control=self._target)
            if isinstance(problem, rpc.Unimplemented):
                await self._set(Service(0, ((None, self._target),)))
                return
            await self._fail(problem)
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, _RETRY_S[1])

    async def _watch(self, last: Exception | None) -> rpc.CallError:
        """Follow whoever leads until that ends; why it did. `last` is how it ended before."""
        if last is not None or self._line.has_choice:
            await self._line.turn(last)
        self._doubted.clear()
        reader = asyncio.create_task(self._read())
        doubted = asyncio.create_task(self._doubted.wait())
        try:
            await asyncio.wait({reader, doubted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, doubted):
                task.cancel()
            await asyncio.gather(reader, doubted, return_exceptions=True)
        return rpc.Unavailable("it does not answer") if reader.cancelled() else reader.result()

    async def _read(self) -> rpc.CallError:
        """Take views until the stream ends; why it did."""
        stub = control_pb2_grpc.ControlPlaneStub(self._line.channel)
        try:
            async for view in stub.Watch(control_pb2.WatchRequest()):
                self._pause_s, self._refused = _RETRY_S[0], None
                await self._take(view)
        except grpc.RpcError as error:
            return rpc.error_of(error)
        return rpc.Unavailable("the control plane ended the Watch stream")

    async def _fail(self, problem: Exception) -> None:
        """The line broke: whoever is known to serve still does."""
        if self._service is not None:
            return
        what = str(problem) if isinstance(problem, rpc.CallError) else repr(problem)
        words = f"control plane {self._target}: {what}"
        self._refused = NotAllowed(words) if isinstance(problem, REFUSALS) else None
        self._trouble = Unavailable(words, self._trouble.lost_ranks, self._trouble.epoch)
        await self._set(None)

    async def _take(self, view: control_pb2.GroupView) -> None:
        if view.term < self._term:
            return  # late, from a control plane that leads no more
        self._term = view.term
        if view.state == control_pb2.SERVING:
            workers = tuple((member.rank, member.address) for member in view.members if member.ready)
            await self._set(Service(view.epoch, workers))
            return
        if view.epoch == 0 and self._service is not None:
            return  # a control plane that was just restarted has not heard of the group yet; the group serves on
        state = control_pb2.GroupState.Name(view.state)
        why = f": {view.reason}" if view.reason else ""
        lost = tuple(view.lost_ranks)
        self._trouble = Unavailable(f"the group is {state} (epoch {view.epoch}){why}", lost, view.epoch)
        await self._set(None)

    async def _set(self, service: Service | None) -> None:
        async with self._changed:
            self._service, self._known = service, True
            self._changed.notify_all()
