"""gRPC setup: servers, channels, limits, keepalive, health, reflection and retries.

Elsewhere: TLS and tokens (security.py), authorization (access.py), the errors of calls (call_errors.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
import tenacity
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from crossdock.common import descriptors
from crossdock.common.access import CallAuthorizer
from crossdock.common.addresses import format_address, split_address
from crossdock.common.call_errors import NotFound, Unavailable, error_of
from crossdock.common.interceptor import CallInterceptor, Observe
from crossdock.common.security import Security

Message = TypeVar("Message")
MAX_SENT_BYTES = 64 << 20
"""Default for the largest message that a server sends and a channel accepts: the region table of 2,048 ranks fits."""


MAX_CONNECTIONS = 4096
"""Connections of one server, if the limit of open files is high enough (descriptors.py)."""


class ListenError(OSError):
    """An address cannot be listened on: malformed, in use, or not of this host."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """grpc.health.v1 for the named services (full proto names) and "" for the whole process. Starts NOT_SERVING.

    grpcio-health-checking is not used: it writes to a watcher while it holds the lock of all watchers, so one client
    that does not read would block all others and the shutdown.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self.services = tuple(services)
        self._serving = dict.fromkeys(("", *services), False)
        self._watchers: set[asyncio.Event] = set()
        self._over = False

    def set(self, serving: bool, *names: str) -> None:
        """Set the state of these services (none named: all services and the process), and notify watchers."""
        if not self._over:
            self._serving.update(dict.fromkeys(names or ("", *self.services), serving))
            for changed in self._watchers:
                changed.set()

    def shut_down(self) -> None:
        """NOT_SERVING for good; later `set` calls do nothing."""
        self.set(False)
        self._over = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """The state now. Raises NotFound."""
        if request.service not in self._serving:
            raise NotFound("service: expected one of this server, got an unknown one")
        return self._answer(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current state, then each change."""
        service = request.service if request.service in self._serving else None
        del request
        changed, sent = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                answer = self._answer(service)
                if answer.status != sent:
                    sent = answer.status
                    yield answer
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _answer(self, service: str | None) -> health_pb2.HealthCheckResponse:
        if service is None:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        word = health_pb2.HealthCheckResponse
        return word(status=word.SERVING if self._serving[service] else word.NOT_SERVING)


async def server(
    max_message_bytes: int,
    health: Health,
    *,
    observe: Observe | None = None,
    authorizer: CallAuthorizer | None = None,
) -> grpc.aio.Server:
    """A server with size limits, keepalive, `health` and reflection; add servicers, then `bind`, then `start()`.

    Args:
        max_message_bytes: a larger incoming message ends its call with RESOURCE_EXHAUSTED.
        observe: called for each finished call of Crossdock's own services.
        authorizer: authorizes calls and limits connections and calls. None: all calls are allowed.
    """
    made = grpc.aio.server(
        interceptors=(CallInterceptor(observe, authorizer),),
        options=[*_server_options(max_message_bytes), *(_guard_options() if authorizer is not None else ())],
        maximum_concurrent_rpcs=2 * (authorizer.calls.max_total + authorizer.others.max_total)
        if authorizer is not None
        else None,
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, made)
    names = (*health.services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, made)
    health.set(False)
    return made


def bind(server: grpc.aio.Server, listen: str, security: Security | None = None) -> str:
    """Listen on `host:port` (port 0: any free one), over TLS if `security` has a certificate, and return the
    `host:port` in use.

    Raises:
        ListenError: `listen` is malformed, in use, or not an address of this host.
    """
    try:
        host, _ = split_address(listen)
    except ValueError as error:
        raise ListenError(f"listen: {error}") from error
    bound = 0
    with contextlib.suppress(RuntimeError):
        bound = _add_port(server, listen, security)
    if bound == 0:
        raise ListenError(f"listen: expected an address of this host where nothing listens yet, got {listen}")
    return format_address(host, bound)


def channel(
    target: str, max_message_bytes: int = MAX_SENT_BYTES, security: Security | None = None, name: str = ""
) -> grpc.Channel:
    """A blocking channel to `host:port`. Connects lazily and reconnects by itself; close it, or use it in `with`.

    Args:
        max_message_bytes: largest message in either direction.
        security: TLS and tokens; the channel keeps the current certificates. None: plain text.
        name: expected in the server's certificate; empty: the host of `target`.
    """
    credentials = security.channel_credentials() if security is not None else None
    options = _channel_options(max_message_bytes)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=[*options, *_name_option(name)])


def aio_channel(
    target: str, max_message_bytes: int = MAX_SENT_BYTES, security: Security | None = None, name: str = ""
) -> grpc.aio.Channel:
    """`channel` for asyncio; make it inside the running loop."""
    credentials = security.channel_credentials() if security is not None else None
    options = _channel_options(max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=[*options, *_name_option(name)])


async def call(
    method: Callable[..., Awaitable[Message]], request: Any, *, timeout_s: float, retry_s: float = 0, **more: Any
) -> Message:
    """Make one unary call of an aio stub.

    Args:
        timeout_s: deadline of each attempt.
        retry_s: how long to retry UNAVAILABLE, with jittered back-off; 0 = one attempt. Only for idempotent methods
            (all of ControlPlane).
        more: further keyword arguments of the stub's method: `metadata`.

    Raises:
        CallError: the call's status, as the tree in call_errors.py names it; Unavailable: its channel was closed.
    """

    async def attempt() -> Message:
        try:
            return await method(request, timeout=timeout_s, **more)
        except grpc.RpcError as error:
            raise error_of(error) from None
        except grpc.aio.UsageError as error:  # "Channel is closed."
            raise Unavailable(str(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise Unavailable("the channel was closed during the call") from None
            raise

    if retry_s <= 0:
        return await attempt()
    return await tenacity.AsyncRetrying(**_retry_policy(retry_s))(attempt)


def call_sync(method: Callable[..., Message], request: Any, *, timeout_s: float, retry_s: float = 0) -> Message:
    """`call` for a blocking stub."""

    def attempt() -> Message:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from None

    if retry_s <= 0:
        return attempt()
    return tenacity.Retrying(**_retry_policy(retry_s))(attempt)


def _retry_policy(retry_s: float) -> dict[str, Any]:
    return {
        "retry": tenacity.retry_if_exception_type(Unavailable),
        "stop": tenacity.stop_before_delay(retry_s),
        "wait": tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
        "reraise": True,
    }


def _add_port(server: grpc.aio.Server, listen: str, security: Security | None) -> int:
    credentials = security.server_credentials() if security is not None else None
    if credentials is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, credentials)


def _name_option(name: str) -> list[tuple[str, Any]]:
    return [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)] if name else []


def _server_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # a second server on one port must fail, not share it
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max(max_message_bytes, MAX_SENT_BYTES)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients ping every 10 s
        ("grpc.server_handshake_timeout_ms", 10_000),  # a client that connects and sends nothing
        # Otherwise the window of every stream grows to megabytes; without it an unread call holds at most 64 KiB.
        ("grpc.http2.bdp_probe", 0),
    ]


def _guard_options() -> list[tuple[str, Any]]:
    """Limits of a server with untrusted clients; the permits of the authorizer bound the rest."""
    return [
        ("grpc.max_concurrent_streams", 128),  # of one connection
        ("grpc.max_allowed_incoming_connections", descriptors.share(MAX_CONNECTIONS, descriptors.CONNECTIONS)),
        ("grpc.max_connection_idle_ms", 300_000),  # without any call
        ("grpc.max_connection_age_ms", 1_800_000),  # +-10 %: an expired certificate is noticed by then
        ("grpc.max_connection_age_grace_ms", 600_000),  # time for open calls to end by themselves
    ]


def _channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),  # a restarted server is found again within a second
        ("grpc.enable_http_proxy", 0),  # never through a proxy named in the environment
        ("grpc.use_local_subchannel_pool", 1),
    ]
