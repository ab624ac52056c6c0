"""An API server that speaks leases over HTTP: get, create, update, conflicts of resourceVersion; breaks when told."""

from __future__ import annotations

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

_INT32 = range(-(1 << 31), 1 << 31)
_BASE = "/".join(("", "apis", "coordination.k8s.io", "v1", "namespaces", "default", "leases"))


class LeaseApi(ThreadingHTTPServer):
    """Listens on a free port, in the clear unless `tls` says how.

    Args:
        host: where; 127.0.0.1 unless told.
        tls: how to answer by TLS.

    Attributes:
        lease: the one there is, as JSON; None: none.
        away: every request is answered 500.
        may_create: the account is allowed to.
        delay_s: before each answer.
        hangs_up: after each answer.
        token: the only one that is taken; "": any.
        hold: requests wait for it; None: they do not.
        held: set when one waits.
        connections: taken so far.
        tokens: of the requests that counted, in order.
        writes: holders of the writes that counted, in order.
    """

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        super().__init__((host, 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.lease: dict[str, Any] | None = None
        self.away, self.may_create, self.delay_s = False, True, 0.0
        self.hangs_up, self.token = False, ""
        self.hold: threading.Event | None = None
        self.held, self.connections = threading.Event(), 0
        self.tokens: list[str] = []
        self.writes: list[tuple[str, int]] = []
        self._lock, self._version = threading.Lock(), 100
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> LeaseApi:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A process that was killed hangs up: no event."""

    @property
    def holder(self) -> str:
        """Who leads, by what is written."""
        lease = self.lease
        return str(lease["spec"].get("holderIdentity") or "") if lease is not None else ""

    @property
    def term(self) -> int:
        """Of the holder."""
        lease = self.lease
        return int(lease["spec"]["leaseTransitions"]) if lease is not None else 0

    def offer(self, lease_s: int) -> None:
        """Put a lease there that nobody holds, to be taken after `lease_s`."""
        spec = {"holderIdentity": "", "leaseDurationSeconds": lease_s, "leaseTransitions": 0}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "crossdock"},
            "spec": spec,
        }
        assert self.put(body, create=True)[0] == 201

    def delete(self) -> None:
        """Forget the lease."""
        with self._lock:
            self.lease = None

    def kubeconfig(self, folder: Path, address: str = "") -> Path:
        """A file by which clients find this server, or the way to it at `address`."""
        address = address or f"127.0.0.1:{self.server_port}"
        path = folder / f"kubeconfig-{address.rpartition(':')[2]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": f"http://{address}"}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def put(self, body: dict[str, Any], *, create: bool) -> tuple[int, dict[str, Any]]:
        """Compare and swap: HTTP status and answer."""
        if any(body["spec"].get(name, 0) not in _INT32 for name in ("leaseTransitions", "leaseDurationSeconds")):
            return 400, {"reason": "BadRequest"}  # as the real one, which cannot decode it
        with self._lock:
            if create and not self.may_create:
                return 403, {"reason": "Forbidden"}
            if create and self.lease is not None:
                return 409, {"reason": "AlreadyExists"}
            if not create and self.lease is None:
                return 404, {"reason": "NotFound"}
            there = self.lease["metadata"]["resourceVersion"] if self.lease is not None else None
            if not create and body["metadata"].get("resourceVersion") != there:
                return 409, {"reason": "Conflict"}
            self._version += 1
            body["metadata"]["resourceVersion"] = str(self._version)
            self.lease = body
            self.writes.append((self.holder, self.term))
            return (201 if create else 200), body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LeaseApi

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.server.hangs_up:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return body

    def _is_down(self) -> bool:
        time.sleep(self.server.delay_s)
        if self.server.hold is not None:
            self.server.held.set()
            self.server.hold.wait()
        if self.server.away or not self.path.startswith(_BASE):
            self._answer(500, {"reason": "InternalError", "message": "etcd is\naway"})
            return True
        token = (self.headers.get("Authorization") or "").partition(" ")[2]
        if self.server.token not in ("", token):
            self._answer(401, {"reason": "Unauthorized"})
            return True
        self.server.tokens.append(token)
        return False

    def do_GET(self) -> None:
        if not self._is_down():
            lease = self.server.lease
            self._answer(404 if lease is None else 200, lease or {"reason": "NotFound"})

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_down():
            self._answer(*self.server.put(body, create=True))

    def do_PUT(self) -> None:
        body = self._body()
        if not self._is_down():
            self._answer(*self.server.put(body, create=False))

    def log_message(self, *args: object) -> None:
        """Quiet."""
