"""The way to the control plane: to whoever decides among several, with the certificates of now.

    line = Line("a:7400,b:7400", security)      asyncio; BlockingLine is the same for threads
    line.channel                                to be used for the next calls
    await line.turn(error)                      after a call went wrong: perhaps somebody else leads, or keys changed

A control plane that waits for its turn answers UNAVAILABLE and names the leader; its health service says NOT_SERVING.
One address and plain text make a line that never changes: grpc itself connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common import rpc
from crossdock.common.addresses import split_targets
from crossdock.common.security import Security
from crossdock.common.tasks import beside
from crossdock.v1 import control_pb2

Result = TypeVar("Result")

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["ControlPlane"].full_name
_LOOK_S = 1.0
"""Longest wait for each of several to say whether it leads."""
_GRACE_S = 10.0
"""What is under way on a channel that is given up has so long to end."""


class Line:
    """See the module's head. Make and use it inside the running loop.

    Args:
        target: host:port, or several, separated by commas.
        security: TLS and tokens; None: plain text.

    Attributes:
        address: host:port that is dialled now.
        channel: to it.
    """

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._targets, self._security = split_targets(target), security
        self.address = self._targets[0]
        self.channel = self._dial(self.address)
        self._version = security.version if security is not None else 0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def has_choice(self) -> bool:
        """Whether there are several to begin with."""
        return len(self._targets) > 1

    async def answers(self) -> bool:
        """Whether whoever is dialled now says, soon, that it leads."""
        return bool(await self._leads(self.address))

    async def turn(self, error: BaseException | None = None) -> bool:
        """Look for who leads, beginning with whom `error` names; whether `channel` is another one now."""
        address = await self._leader(_candidates(error, self._targets))
        version = self._security.version if self._security is not None else 0
        if (address, version) == (self.address, self._version):
            return False
        self._give_up(self.channel)
        self.address, self._version, self.channel = address, version, self._dial(address)
        return True

    async def close(self) -> None:
        """Hang up at once."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self.channel.close(None)

    def _dial(self, address: str) -> grpc.aio.Channel:
        name = self._security.config.control_name if self._security is not None else ""
        return rpc.aio_channel(address, security=self._security, name=name)

    def _give_up(self, channel: grpc.aio.Channel) -> None:
        task = beside(channel.close(_GRACE_S), "the end of a channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _leader(self, candidates: Sequence[str]) -> str:
        """The first that says it leads; the present one if none does."""
        if len(candidates) == 1:
            return candidates[0]
        tasks = {asyncio.create_task(self._leads(address)): address for address in candidates}
        try:
            for done in asyncio.as_completed(tasks):
                found = await done
                if found:
                    return found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.address if self.address in candidates else candidates[0]

    async def _leads(self, address: str) -> str:
        """The address if that control plane leads, else ""."""
        channel = self._dial(address)
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            answer = await rpc.call(health_pb2_grpc.HealthStub(channel).Check, request, timeout_s=_LOOK_S)
            return address if answer.status == health_pb2.HealthCheckResponse.SERVING else ""
        except rpc.CallError:
            return ""
        finally:
            await channel.close(None)


class BlockingLine:
    """`Line` for threads. `turn` tries the next address, without asking who leads."""

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._targets, self._security = split_targets(target), security
        self.address = self._targets[0]
        self.channel = self._dial()
        self._version = security.version if security is not None else 0

    def __enter__(self) -> BlockingLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def turn(self, error: BaseException | None = None) -> bool:
        """Take whom `error` names, or else the next address; whether `channel` is another one now."""
        named = getattr(error, "leader", "")
        places = {address: place for place, address in enumerate(self._targets)}
        following = self._targets[(places.get(self.address, -1) + 1) % len(self._targets)]
        address = named or following
        version = self._security.version if self._security is not None else 0
        if (address, version) == (self.address, self._version):
            return False
        self.channel.close()
        self.address, self._version = address, version
        self.channel = self._dial()
        return True

    def _dial(self) -> grpc.Channel:
        name = self._security.config.control_name if self._security is not None else ""
        return rpc.channel(self.address, security=self._security, name=name)


def ask(target: str, security: Security | None, question: Callable[[grpc.Channel], Result]) -> Result:
    """What `question` makes of a channel to the control plane that leads.

    Raises:
        CallError: of the last one asked; each address, and whom they name, is asked once.
    """
    with contextlib.closing(_Rounds(target, security)) as rounds:
        while True:
            try:
                return question(rounds.line.channel)
            except rpc.CallError as error:
                if not rounds.go_on(error):
                    raise


class _Rounds:
    """Each address once."""

    def __init__(self, target: str, security: Security | None) -> None:
        self.line = BlockingLine(target, security)
        self._asked: set[str] = set()

    def go_on(self, error: rpc.CallError) -> bool:
        self._asked.add(self.line.address)
        if not isinstance(error, rpc.Unavailable | rpc.DeadlineExceeded):
            return False
        return self.line.turn(error) and self.line.address not in self._asked

    def close(self) -> None:
        self.line.channel.close()


def _candidates(error: BaseException | None, targets: Sequence[str]) -> list[str]:
    named = getattr(error, "leader", "")
    return list(dict.fromkeys([*([named] if named else []), *targets]))
