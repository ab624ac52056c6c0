"""The HTTP server of every process: /metrics, /livez, /readyz. GET and HEAD, no other paths. And a client for it.

Runs in daemon threads, so that a busy event loop still answers its probes. With TLS (`SecurityConfig.http`) each
connection uses the current certificate. A connection has `_REQUEST_S` for everything, including handshake and answer;
above `_MAX_CONNECTIONS`, or fewer where descriptors are, a new one closes the oldest of the host that has most: callers
of one host cannot shut out those of others.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY
from socketserver import TCPServer
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from crossdock.common import descriptors
from crossdock.common.addresses import bound_to, family_of, format_address, not_bound, split_address
from crossdock.common.helper_thread import HelperThread
from crossdock.common.log import get
from crossdock.common.rpc import ListenError
from crossdock.common.security import Security

log = get(__name__)

Ready = Callable[[], tuple[bool, str]]
"""Whether the process can serve, and a short reason."""

Trouble = Callable[[], str]
"""Why the process should be restarted; "" = it should not."""

MetricsPage = Callable[[str], tuple[bytes, str]]
"""Metrics in the format that an Accept header asks for, and their content type. Any thread."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{?)", re.ASCII | re.MULTILINE)
_REQUEST_S = 10.0
_READ_BYTES = 64 << 10
_MAX_CONNECTIONS, _MAX_THREADS, _MAX_HOST_THREADS = 64, 128, 96
"""Limits of connections, and of threads, which include those of connections closed a moment ago: of all, of a host."""
_PAUSE_S = 0.02
"""After a connection that could not be accepted."""
_OVERLOADED = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many connections\n"


class HttpServer:
    """A running server.

    Attributes:
        address: host:port it listens on, with the port the system chose for `:0`.
        https: it takes TLS only.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.address = format_address(server.host, int(server.server_address[1]))
        self.https = server.security is not None
        self._thread = HelperThread("http", server.serve_forever, poll_interval=0.5)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ask_http(
    address: str, path: str, timeout_s: float, tls: ssl.SSLContext | None = None, name: str = "", accept: str = ""
) -> tuple[int, str]:
    """Status and text of `path` at a server `address` (host:port). Proxies named in the environment are ignored.

    Args:
        timeout_s: of connecting, of each wait for bytes, and until the answer is whole.
        tls: how the server is verified, and which certificate is shown; None: plain text.
        name: expected in the server's certificate; "": the host of `address`.
        accept: content type asked for; "": the server's choice.

    Raises:
        OSError, http.client.HTTPException: no answer, or not from the expected server.
    """
    host, port = split_address(address)
    until = time.monotonic() + timeout_s
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        if tls is not None:
            plain = socket.create_connection((host, port), timeout_s)
            connection.sock = tls.wrap_socket(plain, server_hostname=name or host)
        connection.request("GET", path, headers={"Accept": accept} if accept else {})
        response = connection.getresponse()
        return response.status, _body(response, until).decode(errors="replace")
    finally:
        connection.close()


def _body(response: HTTPResponse, until: float) -> bytes:
    """Raises TimeoutError, IncompleteRead."""
    body = bytearray()
    while part := response.read1(_READ_BYTES):
        body += part
        if time.monotonic() > until:
            raise TimeoutError("the answer came too slowly")
    if response.length:
        raise IncompleteRead(bytes(body), response.length)
    return bytes(body)


def page_of(registry: CollectorRegistry, group: str = "") -> MetricsPage:
    """The page of this process's own metrics, each series with the label `group`; "": those that have it already."""

    def page(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        body = encode(registry)
        return labelled(body.decode(), "group", group).encode() if group else body, content_type

    return page


def labelled(page: str, name: str, value: str) -> str:
    """A page of metrics with a label, whose value needs no escapes, first in every series."""
    label = f'{{{name}="{value}"'
    return _SAMPLE.sub(lambda found: f"{found[1]}{label}{',' if found[2] else '}'}", page)


def serve_http(
    listen: str,
    page: MetricsPage,
    ready: Ready,
    security: Security | None = None,
    trouble: Trouble = lambda: "",
) -> HttpServer:
    """Serve `/metrics` by `page`, `/livez` by `trouble`, and `/readyz` by `ready` on host:port `listen`, as
    `security` says.

    Raises:
        ListenError: the address cannot be listened on.
    """
    host, port = split_address(listen)
    try:
        return HttpServer(_Server(host, port, page, ready, security, trouble))
    except OSError as error:
        raise ListenError(f"http_listen: {not_bound(listen, error)}") from error


@dataclass(frozen=True, slots=True)
class _Open:
    """A connection, closed at a time of `time.monotonic`, and the host that it comes from."""

    until: float
    host: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        page: MetricsPage,
        ready: Ready,
        security: Security | None,
        trouble: Trouble,
    ) -> None:
        self.host, self.trouble = host, trouble
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}
        self._host_threads = Counter[str]()
        host = bound_to(host)
        self.address_family = family_of(host)
        self.page, self.ready = page, ready
        self.security = None if security is None or security.config.http == "plain" else security
        super().__init__((host, port), _Handler)

    @property
    def authenticates_scrapers(self) -> bool:
        """Whether /metrics requires a client certificate."""
        return self.security is not None and self.security.config.http == "mtls"

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection. The handshake runs in its own thread: a slow client does not delay others."""
        try:
            accepted, client = super().get_request()
        except OSError:  # no descriptor is free, for instance: the connection waits
            time.sleep(_PAUSE_S)
            raise
        try:
            context = self.security.http_server() if self.security is not None else None
            if context is None:
                return accepted, client
            return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), client
        except Exception as error:  # a faulty connection must not stop the server
            accepted.close()
            log.seldom("http connection refused", client=client, error=error)
            raise OSError(str(error)) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it in its own thread, up to the limits."""
        host = str(client_address[0])
        with self._lock:
            full = self._host_threads.total() >= _MAX_THREADS or self._host_threads[host] >= _MAX_HOST_THREADS
            if not full:
                if len(self._open) >= descriptors.share(_MAX_CONNECTIONS, descriptors.HTTP):
                    self._end(self._oldest_of_most())
                self._host_threads[host] += 1
                self._open[request] = _Open(time.monotonic() + _REQUEST_S, host)
        if not full:
            try:
                super().process_request(request, client_address)
            except Exception:  # no thread could be started
                self._finish(request, host)
                raise
            return
        if not isinstance(request, ssl.SSLSocket):
            with contextlib.suppress(OSError):
                request.settimeout(0)
                request.send(_OVERLOADED)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._finish(request, str(client_address[0]))

    def _finish(self, request: Any, host: str) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._host_threads[host] -= 1
            if not self._host_threads[host]:
                del self._host_threads[host]

    def _oldest_of_most(self) -> socket.socket:
        """The oldest open connection of the host that has most of them."""
        counts = Counter(each.host for each in self._open.values())
        most = max(counts.values())
        return next(request for request, each in self._open.items() if counts[each.host] == most)

    def service_actions(self) -> None:
        """Close connections past their deadline; called a few times a second."""
        super().service_actions()
        now = time.monotonic()
        with self._lock:
            for request in [request for request, each in self._open.items() if each.until < now]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shut the connection down; its thread notices."""
        del self._open[request]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without a look-up of this host's own name, which takes many seconds without a DNS server."""
        if self.address_family == AF_INET6:
            self.socket.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log at debug level: a scraper that disconnects is no error."""
        log.debug("http request failed", client=client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version = "crossdock"
    sys_version = ""

    def setup(self) -> None:
        """Do the TLS handshake, with the timeout of all reads."""
        if isinstance(self.request, ssl.SSLSocket):
            self.request.settimeout(self.timeout)
            self.request.do_handshake()
        super().setup()

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        path = self.path.partition("?")[0]
        if path == "/metrics" and server.authenticates_scrapers and not self.connection.getpeercert():
            self._answer(HTTPStatus.FORBIDDEN, b"expected a certificate of the caller, got none\n")
        elif path == "/metrics":
            self._answer(200, *server.page(self.headers.get("Accept", "")))
        elif path == "/livez":
            trouble = server.trouble()
            self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode())
        elif path == "/readyz":
            ready, reason = server.ready()
            self._answer(200 if ready else 503, f"{reason}\n".encode())
        else:
            self._answer(404, b"expected /metrics, /livez or /readyz\n")

    def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Do not log each request."""
