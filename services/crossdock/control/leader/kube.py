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
import datetime
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kubernetes.client import (
    ApiClient,
    ApiException,
    Configuration,
    CoordinationV1Api,
    V1Lease,
    V1LeaseSpec,
    V1ObjectMeta,
)
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from crossdock.common.helper_thread import HelperThread
from crossdock.common.settings import ElectionConfig
from crossdock.control.leader.election import Lease

ADDRESS = "crossdock-leader-address"
"""Annotation: host:port of the holder."""

_KEPT = ("labels", "annotations", "owner_references", "finalizers")
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesLeaseStore:
    """`LeaseStore` of leader.py in a Kubernetes `Lease`.

    Args:
        config: which API server, namespace and name.
    """

    def __init__(self, config: ElectionConfig) -> None:
        self._config, self._server = config, ApiServer(config.kubeconfig)
        self._namespace = config.namespace or _own_namespace()
        self._metadata = V1ObjectMeta()

    def read(self, timeout_s: float) -> Lease | None:
        try:
            return self._ask("read_namespaced_lease", timeout_s, self._config.lease_name, self._namespace)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """See `LeaseStore`. Raises PermissionError if there is none and this account may not create it."""
        body, name, namespace = self._body(lease, seen), self._config.lease_name, self._namespace
        try:
            if seen is None:
                return self._ask("create_namespaced_lease", timeout_s, namespace, body)
            return self._ask("replace_namespaced_lease", timeout_s, name, namespace, body)
        except ApiError as error:
            if seen is None and error.status == _FORBIDDEN:
                raise PermissionError(
                    f"there is no Lease {name} in the namespace {namespace}, and this account may not "
                    "create it: create it at installation (`helm upgrade` does)"
                ) from None
            if error.status in {_CONFLICT, _NOT_FOUND}:  # another replica was faster
                return None
            raise

    def close(self) -> None:
        self._server.close()

    def _ask(self, method: str, timeout_s: float, *args: Any) -> Lease:
        """The answer to a call of `CoordinationV1Api`. Raises as `ApiServer.ask`."""
        return self._parse(
            self._server.ask(
                lambda api, timeouts: getattr(CoordinationV1Api(api), method)(*args, _request_timeout=timeouts),
                timeout_s,
            )
        )

    def _parse(self, answer: V1Lease) -> Lease:
        self._metadata = answer.metadata or V1ObjectMeta()
        spec = answer.spec or V1LeaseSpec()
        return Lease(
            holder=spec.holder_identity or "",
            address=(self._metadata.annotations or {}).get(ADDRESS, ""),
            term=spec.lease_transitions or 0,
            lease_s=float(spec.lease_duration_seconds or 0),
            version=self._metadata.resource_version or "",
        )

    def _body(self, lease: Lease, seen: Lease | None) -> V1Lease:
        metadata = V1ObjectMeta(name=self._config.lease_name, namespace=self._namespace)
        if seen is not None:  # the server refuses other versions, so these are the current values
            for key in _KEPT:
                setattr(metadata, key, getattr(self._metadata, key))
            metadata.resource_version = seen.version
        metadata.annotations = {**(metadata.annotations or {}), ADDRESS: lease.address}
        now = datetime.datetime.now(datetime.UTC)
        spec = V1LeaseSpec(
            holder_identity=lease.holder,
            lease_duration_seconds=max(1, round(lease.lease_s)),
            lease_transitions=lease.term,
            renew_time=now.replace(microsecond=max(1, now.microsecond)),  # the API requires a fraction
        )
        return V1Lease(api_version="coordination.k8s.io/v1", kind="Lease", metadata=metadata, spec=spec)


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    return "default"


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
