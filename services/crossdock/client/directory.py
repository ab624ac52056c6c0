"""Directory of serving workers: follows the control plane's views, or has the one worker it was given.

Without a control plane the newest view stays valid: serving does not depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from crossdock.client.errors import REFUSALS, NotAllowed, Unavailable
from crossdock.common import call_errors
from crossdock.common.control_channel import ControlPlaneChannel
from crossdock.common.log import get
from crossdock.common.security import Security
from crossdock.common.tasks import background, end_tasks
from crossdock.protocol.v1 import control_pb2, control_pb2_grpc

log = get(__name__)

_RETRY_S = (0.1, 1.0)
"""First and longest pause before a broken Watch is retried."""
_RECHECK_S = 2.0
"""Pause between two checks of the leader while a call waits for a group that does not serve."""


@dataclass(frozen=True, slots=True)
class ServingWorkers:
    """Workers that accept requests.

    Attributes:
        epoch: membership counter; 0 for a directly named worker.
        workers: (rank, address) by rank; the rank is None for a directly named worker.
    """

    epoch: int
    workers: tuple[tuple[int | None, str], ...]


class Directory:
    """Make and use it inside the running loop.

    Args:
        target: host:port of a control plane (several, separated by commas, where it has replicas) or of one worker;
            detected automatically.
        security: TLS and tokens; None: plain text.
    """

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._target, self.loop = target, asyncio.get_running_loop()
        self._channel = ControlPlaneChannel(target, security)
        self._changed = asyncio.Condition()
        self._service: ServingWorkers | None = None
        self._trouble = Unavailable(f"control plane {target}: no answer yet")
        self._refused: NotAllowed | None = None
        self._term = 0
        self._is_silent = asyncio.Event()
        self._check: asyncio.Task[None] | None = None
        self._known = self._closed = False
        self._task = asyncio.create_task(self._follow())

    async def service(self, timeout_s: float, *, wait: bool) -> ServingWorkers:
        """The workers to send requests to.

        Args:
            timeout_s: longest wait.
            wait: wait until the group serves; else only for the first answer of the control plane.

        Raises:
            Unavailable: the group does not serve (within timeout_s); has the missing ranks.
            NotAllowed: the control plane does not know this caller.
        """

        def settled() -> bool:
            return self._service is not None or (self._known and not wait) or self._closed or self._refused is not None

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._wait_for(settled)
        if self._service is None and self._refused is not None:
            raise NotAllowed(str(self._refused))
        if self._service is None:
            trouble = self._trouble
            raise Unavailable(str(trouble), trouble.lost_ranks, trouble.epoch)
        return self._service

    @property
    def now(self) -> ServingWorkers | None:
        """The workers to send requests to; None: the group does not serve, as far as is known. Any thread."""
        return self._service

    async def _wait_for(self, settled: Callable[[], bool]) -> None:
        """Wait under the lock of `_changed`. A leader that was stopped or cut off sends no view: it is checked."""
        while not settled():
            try:
                async with asyncio.timeout(_RECHECK_S):
                    await self._changed.wait_for(settled)
            except TimeoutError:
                self.recheck()

    def recheck(self) -> None:
        """Check the control plane after a worker of the newest view did not answer, or while the group does not serve:
        a stopped or unreachable leader breaks no connection. If it is silent, follow another one."""
        if not self._task.done() and (self._check is None or self._check.done()):
            self._check = background(self._check_leader(), "the check of the leader")

    async def _check_leader(self) -> None:
        if not await self._channel.is_leading():
            self._is_silent.set()

    async def close(self) -> None:
        """Stop following; waiting calls end with Unavailable."""
        await end_tasks(*(task for task in (self._task, self._check) if task is not None))
        self._closed = True
        await self._set(None)
        await self._channel.close()

    async def _follow(self) -> None:
        self._pause_s = _RETRY_S[0]
        problem: Exception | None = None
        while True:
            before = problem
            try:
                problem = await self._watch(before)
            except Exception as error:  # otherwise clients would wait until their deadline without a reason
                problem = error
                if repr(error) != repr(before):
                    log.exception("cannot follow the control plane", control=self._target)
            if isinstance(problem, call_errors.Unimplemented):
                await self._set(ServingWorkers(0, ((None, self._target),)))
                return
            await self._fail(problem)
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, _RETRY_S[1])

    async def _watch(self, last: Exception | None) -> call_errors.CallError:
        """Follow the leader; returns the error that ended it. `last`: the error before."""
        if last is not None or self._channel.has_several_targets:
            await self._channel.fail_over(last)
        self._is_silent.clear()
        reader = asyncio.create_task(self._read())
        doubted = asyncio.create_task(self._is_silent.wait())
        try:
            await asyncio.wait({reader, doubted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(reader, doubted)
        return call_errors.Unavailable("no answer") if reader.cancelled() else reader.result()

    async def _read(self) -> call_errors.CallError:
        """Read views until the stream ends; returns the error."""
        stub = control_pb2_grpc.ControlPlaneStub(self._channel.grpc_channel)
        try:
            async for view in stub.Watch(control_pb2.WatchRequest()):
                self._pause_s, self._refused = _RETRY_S[0], None
                await self._take(view)
        except grpc.RpcError as error:
            return call_errors.error_of(error)
        return call_errors.Unavailable("the control plane ended the Watch stream")

    async def _fail(self, problem: Exception) -> None:
        """The stream broke: known workers stay valid."""
        if self._service is not None:
            return
        what = str(problem) if isinstance(problem, call_errors.CallError) else repr(problem)
        message = f"control plane {self._target}: {what}"
        self._refused = NotAllowed(message) if isinstance(problem, REFUSALS) else None
        self._trouble = Unavailable(message, self._trouble.lost_ranks, self._trouble.epoch)
        await self._set(None)

    async def _take(self, view: control_pb2.GroupView) -> None:
        if view.term < self._term:
            return  # outdated, from a former leader
        self._term = view.term
        if view.state == control_pb2.SERVING:
            workers = tuple((member.rank, member.address) for member in view.members if member.ready)
            await self._set(ServingWorkers(view.epoch, workers))
            return
        if view.epoch == 0 and self._service is not None:
            return  # a restarted control plane has not recovered yet; the group still serves
        state = control_pb2.GroupState.Name(view.state)
        why = f": {view.reason}" if view.reason else ""
        lost = tuple(view.lost_ranks)
        self._trouble = Unavailable(f"the group is {state} (epoch {view.epoch}){why}", lost, view.epoch)
        await self._set(None)

    async def _set(self, service: ServingWorkers | None) -> None:
        async with self._changed:
            self._service, self._known = service, True
            self._changed.notify_all()
