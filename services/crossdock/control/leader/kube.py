"""Client of the Kubernetes API server: the official Python client, with a deadline for each whole call.

    server = ApiServer(kubeconfig)
    lease = server.ask(lambda api, timeouts: CoordinationV1Api(api).read_namespaced_lease(
        "moe", "default", _request_timeout=timeouts), timeout_s)

The client's own timeouts bound one socket operation, not a call. So a call runs in its own thread, which may also block
in the resolver or in a plugin of the kubeconfig; at the deadline the caller continues, and the client's sockets are
shut down, which ends the thread and whatever it had still to send.

Token and CA certificates are files that are replaced at run time: they are reloaded, by a new client, after a minute,
after a call failed without an answer, and after the server refused the token.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from crossdock.common.helper_thread import HelperThread

CONNECT_S = 5.0
"""Connect timeout, independent of the deadline of the call."""
FRESH_S = 60.0
"""Lifetime of one client."""
_UNAUTHORIZED = 401

T = TypeVar("T")
Timeouts = tuple[float, float]
"""`_request_timeout` of the client: connect, read."""


class ApiError(Exception):
    """Error of the API server.

    Attributes:
        status: HTTP status, also of an event within a watch; 0: TLS failed, no answer.
    """

    def __init__(self, error: ApiException) -> None:
        self.status = int(error.status or 0)
        message = ""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            message = str(json.loads(error.body or "{}").get("message") or "")
        super().__init__(f"{self.status or ''} {' '.join((message or error.reason or '').split())}".strip())


def connect(kubeconfig: str) -> ApiClient:
    """A client with the file `kubeconfig`, or if that is "" with the pod's service account and without proxies. Raises
    OSError and errors of the client."""
    settings = Configuration()
    if kubeconfig:
        try:
            load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
        except ConfigException as error:
            raise ValueError(f"kubeconfig {kubeconfig}: {error}") from None
    else:
        load_incluster_config(client_configuration=settings)
        settings.proxy = None
    settings.retries = False  # the caller retries, and logs it
    return ApiClient(settings)


class ApiServer:
    """The API server. One thread at a time may call `ask`; any thread may call `close`.

    Args:
        kubeconfig: see `connect`.
    """

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._lock = threading.Lock()
        self._connections: _Connections | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[ApiClient, Timeouts], T], timeout_s: float) -> T:
        """The result of `call`, which passes its second argument to the client as `_request_timeout`. Raises
        TimeoutError after `timeout_s`, ApiError, and errors of urllib3 and of loading credentials."""
        ends = time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"no answer of the API server within {timeout_s:.1f} s: an earlier call is stuck")
        answer: Future[T] = Future()
        thread = HelperThread("kubernetes", self._run, call, answer, timeout_s)
        thread.start()
        self._thread = thread  # not sooner: one that could not be started cannot be joined by the next call
        wait([answer], max(0.0, ends - time.monotonic()))
        if answer.cancel():
            self._drop()
            raise TimeoutError(f"no answer of the API server within {timeout_s:.1f} s")
        return answer.result()

    def close(self) -> None:
        """Close the connection, including that of a running call; no calls after this."""
        with self._lock:
            self._closed = True
        self._drop()

    def _run(self, call: Callable[[ApiClient, Timeouts], T], answer: Future[T], timeout_s: float) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller has given up
            try:
                answer.set_result(self._call(call, answer, timeout_s))
            except InvalidStateError:
                raise
            except BaseException as error:
                answer.set_exception(error)

    def _call(self, call: Callable[[ApiClient, Timeouts], T], answer: Future[T], timeout_s: float) -> T:
        timeouts = (min(CONNECT_S, timeout_s), timeout_s + CONNECT_S)  # the deadline ends reads, not this timeout
        try:
            return call(self._connected(answer), timeouts)
        except ApiException as error:
            if error.status != _UNAUTHORIZED:
                if not error.status:
                    self._drop()
                raise ApiError(error) from None
        except Exception:
            self._drop()
            raise
        self._drop()  # the token may have been replaced
        try:
            return call(self._connected(answer), timeouts)
        except ApiException as error:
            raise ApiError(error) from None

    def _connected(self, answer: Future[Any]) -> ApiClient:
        with self._lock:
            line = self._connections
        if line is not None and time.monotonic() - line.since >= FRESH_S:
            self._drop()
            line = None
        line = line or _Connections(connect(self._kubeconfig))
        with self._lock:
            if not (self._closed or answer.cancelled()):
                self._connections = line
                return line.client
        line.shut()
        raise ConnectionAbortedError("the call was given up")

    def _drop(self) -> None:
        with self._lock:
            line, self._connections = self._connections, None
        if line is not None:
            line.shut()


@dataclass(slots=True)
class _Connections:
    """One client and its sockets, including connecting ones, so that another thread can shut them down."""

    client: ApiClient
    since: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: list[tuple[Any, socket.socket]] | None = field(default_factory=list)

    def __post_init__(self) -> None:
        manager = self.client.rest_client.pool_manager
        pools = manager.pool_classes_by_scheme
        manager.pool_classes_by_scheme = {scheme: self._noting(pool) for scheme, pool in pools.items()}

    def shut(self) -> None:
        """Shut the sockets down; no new ones after this."""
        with self._lock:
            entries, self._open = self._open, None
        for _, sock in entries or ():
            with contextlib.suppress(OSError):  # closed by the server
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.client.close()

    def _noting(self, pool: Any) -> Any:
        line = self

        class Connection(pool.ConnectionCls):  # type: ignore[misc]
            def _new_conn(self) -> socket.socket:
                sock: socket.socket = super()._new_conn()
                line._note(self, sock)
                return sock

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

    def _note(self, connection: Any, sock: socket.socket) -> None:
        """Keep a duplicate: TLS takes over the socket itself."""
        with self._lock:
            if self._open is None:
                sock.close()
                raise ConnectionAbortedError("the call was given up")
            for closed in [entry for entry in self._open if entry[0].sock is None]:
                closed[1].close()
                self._open.remove(closed)
            self._open.append((connection, sock.dup()))
