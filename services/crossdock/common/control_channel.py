"""Channel to the control plane: to the leader among several replicas, with the current certificates.

    channel = ControlPlaneChannel("a:7400,b:7400", security)     asyncio; BlockingControlPlaneChannel for threads
    channel.grpc_channel                                         for the next calls
    await channel.fail_over(error)                               after a failed call: new leader, or new certificates

A standby replica answers UNAVAILABLE and names the leader; its health service says NOT_SERVING. With one address and
plain text the channel never changes: grpc itself reconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common import rpc
from crossdock.common.addresses import split_targets
from crossdock.common.call_errors import CallError, DeadlineExceeded, Unavailable, error_of
from crossdock.common.security import Security
from crossdock.common.tasks import background, end_tasks
from crossdock.protocol.v1 import control_pb2
from crossdock.protocol.v1.control_pb2_grpc import ControlPlaneStub

Result = TypeVar("Result")

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["ControlPlane"].full_name
LEASE_KEY = "crossdock-lease-key"
"""Metadata of every call of a worker: a secret that identifies its process to the control plane."""
TERM_KEY = "crossdock-term"
"""Metadata of every call of a worker: the highest term seen. A leader with a lower term steps down."""
_POLL_S = 1.0
"""Deadline of the question to a replica whether it leads."""
_PATIENCE = 10
"""Deadline of the first call after a search that found no leader, as a multiple of the pause between attempts."""
_GRACE_S = 10.0
"""Time for open calls on a replaced channel to end."""


class ControlPlaneChannel:
    """Channel for asyncio. Make and use it inside the running loop.

    Args:
        target: host:port, or several, separated by commas.
        security: TLS and tokens; None: plain text.
    """

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._targets, self._security = split_targets(target), security
        self.address = self._targets[0]
        self.grpc_channel = self._dial(self.address)
        self._version = security.version if security is not None else 0
        self._closing: set[asyncio.Task[None]] = set()
        self._found_leader = True

    @property
    def has_several_targets(self) -> bool:
        return len(self._targets) > 1

    async def is_leading(self) -> bool:
        """Whether the replica at `address` answers that it leads."""
        return bool(await self._leads(self.address))

    async def fail_over(self, error: BaseException | None = None) -> bool:
        """Find the leader, first the one named by `error`; returns whether `grpc_channel` has changed."""
        address = await self._leader(_candidates(error, self._targets))
        version = self._security.version if self._security is not None else 0
        if (address, version) == (self.address, self._version):
            return False
        self._give_up(self.grpc_channel)
        self.address, self._version, self.grpc_channel = address, version, self._dial(address)
        return True

    def first_call_s(self, timeout_s: float, pause_s: float) -> float:
        """Deadline of the first call after `fail_over`: `timeout_s`, or less if no replica led. The replica that is
        called may be unreachable, and another may lead before `timeout_s`. `pause_s`: the pause before the next
        attempt; the deadline grows with it, since a busy leader answers late."""
        return timeout_s if self._found_leader else min(timeout_s, _PATIENCE * pause_s)

    async def close(self) -> None:
        await end_tasks(*self._closing)
        await self.grpc_channel.close(None)

    def _dial(self, address: str) -> grpc.aio.Channel:
        name = self._security.config.control_name if self._security is not None else ""
        return rpc.aio_channel(address, security=self._security, name=name)

    def _give_up(self, channel: grpc.aio.Channel) -> None:
        task = background(channel.close(_GRACE_S), "closing a channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _leader(self, candidates: Sequence[str]) -> str:
        """The first candidate that leads; the current address if none does."""
        if len(candidates) == 1:
            return candidates[0]
        self._found_leader = True
        tasks = {asyncio.create_task(self._leads(address)): address for address in candidates}
        try:
            for done in asyncio.as_completed(tasks):
                found = await done
                if found:
                    return found
        finally:
            await end_tasks(*tasks)
        self._found_leader = False
        return self.address if self.address in candidates else candidates[0]

    async def _leads(self, address: str) -> str:
        """The address if that control plane leads, else ""."""
        channel = self._dial(address)
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            answer = await rpc.call(health_pb2_grpc.HealthStub(channel).Check, request, timeout_s=_POLL_S)
            return address if answer.status == health_pb2.HealthCheckResponse.SERVING else ""
        except CallError:
            return ""
        finally:
            await channel.close(None)


class BlockingControlPlaneChannel:
    """`ControlPlaneChannel` for threads. `fail_over` tries the next address without a search for the leader."""

    def __init__(self, target: str, security: Security | None = None) -> None:
        self._targets, self._security = split_targets(target), security
        self.address = self._targets[0]
        self.grpc_channel = self._dial()
        self._version = security.version if security is not None else 0

    def __enter__(self) -> BlockingControlPlaneChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.grpc_channel.close()

    def fail_over(self, error: BaseException | None = None) -> bool:
        """Switch to the leader named by `error`, or to the next address; returns whether `grpc_channel` has changed."""
        named = getattr(error, "leader", "")
        positions = {address: position for position, address in enumerate(self._targets)}
        following = self._targets[(positions.get(self.address, -1) + 1) % len(self._targets)]
        address = named or following
        version = self._security.version if self._security is not None else 0
        if (address, version) == (self.address, self._version):
            return False
        self.grpc_channel.close()
        self.address, self._version = address, version
        self.grpc_channel = self._dial()
        return True

    def _dial(self) -> grpc.Channel:
        name = self._security.config.control_name if self._security is not None else ""
        return rpc.channel(self.address, security=self._security, name=name)


def call_leader(target: str, security: Security | None, call: Callable[[grpc.Channel], Result]) -> Result:
    """The result of `call` on a channel to the leader.

    Raises:
        CallError: of the last attempt; each address, and each leader they name, is tried once.
    """
    tried: set[str] = set()
    with BlockingControlPlaneChannel(target, security) as channel:
        while True:
            try:
                return call(channel.grpc_channel)
            except CallError as error:
                tried.add(channel.address)
                may_lead_elsewhere = isinstance(error, Unavailable | DeadlineExceeded)
                if not may_lead_elsewhere or not channel.fail_over(error) or channel.address in tried:
                    raise


def ask_leader(target: str, security: Security | None, method: str, request: Any, timeout_s: float) -> Any:
    """The leader's answer to a unary call of its service. Raises CallError, as `call_leader` does."""

    def call(channel: grpc.Channel) -> Any:
        return rpc.call_sync(getattr(ControlPlaneStub(channel), method), request, timeout_s=timeout_s)

    return call_leader(target, security, call)


def current_view(channel: grpc.Channel, timeout_s: float) -> control_pb2.GroupView:
    """The group as it is now, with its latency. Raises CallError if the control plane does not say."""
    call = ControlPlaneStub(channel).Watch(control_pb2.WatchRequest(latency=True), timeout=timeout_s)
    try:
        view: control_pb2.GroupView = next(call)
        return view
    except grpc.RpcError as error:
        raise error_of(error) from None
    except StopIteration:
        raise Unavailable("the stream ended before a view came") from None
    finally:
        call.cancel()


def _candidates(error: BaseException | None, targets: Sequence[str]) -> list[str]:
    named = getattr(error, "leader", "")
    return list(dict.fromkeys([*([named] if named else []), *targets]))
