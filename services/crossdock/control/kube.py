"""The way to the API server of Kubernetes: its official Python client, with a deadline for each whole call.

    server = ApiServer(kubeconfig)
    lease = server.ask(lambda api, timeouts: CoordinationV1Api(api).read_namespaced_lease(
        "moe", "default", _request_timeout=timeouts), timeout_s)

The client's own timeouts bound one operation of a socket, not a call. So a call runs in a thread of its own, which may
also be in the resolver or in a plugin of the kubeconfig; at the deadline the caller goes on, and the client's sockets
are shut down, which ends the thread and whatever it had still to send.

Token and CA certificates are files that their owner replaces: they are read anew, by a new client, when a minute has
passed, when a call failed without an answer, and when the server refuses the token.
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

CONNECT_S = 5.0
"""Longest that a connection may take, whatever the deadline of the call."""
FRESH_S = 60.0
"""So long one client is used."""
_UNAUTHORIZED = 401

T = TypeVar("T")
Timeouts = tuple[float, float]
"""`_request_timeout` of the client: connect, read."""


class ApiError(Exception):
    """The API server's answer where it is not what was asked for.

    Attributes:
        status: of HTTP, also of an event within a watch; 0: TLS failed, there was no answer.
    """

    def __init__(self, error: ApiException) -> None:
        self.status = int(error.status or 0)
        message = ""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            message = str(json.loads(error.body or "{}").get("message") or "")
        super().__init__(f"{self.status or ''} {' '.join((message or error.reason or '').split())}".strip())


def connect(kubeconfig: str) -> ApiClient:
    """A client by the file `kubeconfig`, or with the pod's own service account where that is "": then it goes straight
    to the server, whatever proxies the environment names. Raises OSError and what the client raises."""
    settings = Configuration()
    if kubeconfig:
        try:
            load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
        except ConfigException as error:
            raise ValueError(f"kubeconfig {kubeconfig}: {error}") from None
    else:
        load_incluster_config(client_configuration=settings)
        settings.proxy = None
    settings.retries = False  # who asks tries again, and says so
    return ApiClient(settings)


class ApiServer:
    """See the module's head. One thread at a time asks; any thread may close.

    Args:
        kubeconfig: see `connect`.
    """

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._lock = threading.Lock()
        self._line: _Line | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[ApiClient, Timeouts], T], timeout_s: float) -> T:
        """What `call` returns; it hands its second argument to the client as `_request_timeout`. Raises TimeoutError
        after `timeout_s`, ApiError, and what urllib3 and the loading of credentials raise."""
        ends = time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"no answer of the API server within {timeout_s:.1f} s: an earlier call is stuck")
        answer: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(call, answer, timeout_s), name="crossdock-kube", daemon=True)
        thread.start()
        self._thread = thread  # not sooner: one that could not be started cannot be joined by the next call
        wait([answer], max(0.0, ends - time.monotonic()))
        if answer.cancel():
            self._drop()
            raise TimeoutError(f"no answer of the API server within {timeout_s:.1f} s")
        return answer.result()

    def close(self) -> None:
        """Hang up, also a call that is under way; nothing can be asked after this."""
        with self._lock:
            self._closed = True
        self._drop()

    def _run(self, call: Callable[[ApiClient, Timeouts], T], answer: Future[T], timeout_s: float) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            try:
                answer.set_result(self._call(call, answer, timeout_s))
            except InvalidStateError:
                raise
            except BaseException as error:
                answer.set_exception(error)

    def _call(self, call: Callable[[ApiClient, Timeouts], T], answer: Future[T], timeout_s: float) -> T:
        timeouts = (min(CONNECT_S, timeout_s), timeout_s + CONNECT_S)  # reading ends at the deadline, not before
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
            line = self._line
        if line is not None and time.monotonic() - line.since >= FRESH_S:
            self._drop()
            line = None
        line = line or _Line(connect(self._kubeconfig))
        with self._lock:
            if not (self._closed or answer.cancelled()):
                self._line = line
                return line.client
        line.shut()
        raise ConnectionAbortedError("the call was given up")

    def _drop(self) -> None:
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.shut()


@dataclass(slots=True)
class _Line:
    """One client and its sockets, those that just connect included, so that another thread can shut them down."""

    client: ApiClient
    since: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: list[tuple[Any, socket.socket]] | None = field(default_factory=list)

    def __post_init__(self) -> None:
        manager = self.client.rest_client.pool_manager
        pools = manager.pool_classes_by_scheme
        manager.pool_classes_by_scheme = {scheme: self._noting(pool) for scheme, pool in pools.items()}

    def shut(self) -> None:
        """End what waits on the sockets; none can be made after this."""
        with self._lock:
            entries, self._open = self._open, None
        for _, sock in entries or ():
            with contextlib.suppress(OSError):  # the server was faster
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
        """Keeps a duplicate: TLS takes the socket itself over."""
        with self._lock:
            if self._open is None:
                sock.close()
                raise ConnectionAbortedError("the call was given up")
            for closed in [entry for entry in self._open if entry[0].sock is None]:
                closed[1].close()
                self._open.remove(closed)
            self._open.append((connection, sock.dup()))
