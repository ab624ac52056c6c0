"""The HTTP face behind TLS: who is let in, certificates that are replaced, callers that are slow."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import msgspec
import pytest

from crossdock.cli import certs
from crossdock.common.addresses import split_address
from crossdock.common.announce import Addresses
from crossdock.common.http import HttpServer, ask_http, page_of, serve_http
from crossdock.common.metrics import WorkerMetrics
from crossdock.common.security import Security, load_security
from crossdock.host.run import readiness
from tests.tools import needs

pytestmark = needs("openssl")

TIMEOUT_S = 30.0
WORKER = "crossdock-worker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `crossdock certs` makes."""
    made: Path = tmp_path_factory.mktemp("certs")
    certs.make_all(made)
    return made


def security(folder: Path, part: str, **fields: object) -> Security:
    return Security(msgspec.structs.replace(load_security(folder / f"{part}.yaml"), **fields))


def caller(folder: Path, **fields: object) -> ssl.SSLContext:
    """TLS of a client."""
    return security(folder, "client", **fields).http_caller()


@contextmanager
def served(guard: Security) -> Iterator[HttpServer]:
    server = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, "because"), guard)
    try:
        yield server
    finally:
        server.close()


def shown(server: HttpServer) -> bytes:
    """The certificate of a new connection. Nothing is verified and no certificate shown, as a kubelet's probes do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(split_address(server.address), TIMEOUT_S) as raw, context.wrap_socket(raw) as wrapped:
        wrapped.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert b"200 OK" in wrapped.recv(1000)
        certificate = wrapped.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def test_a_guarded_process_keeps_its_page_plain_until_told_otherwise(folder: Path) -> None:
    with served(security(folder, "worker")) as server:
        assert not server.https
        assert ask_http(server.address, "/livez", TIMEOUT_S) == (200, "ok\n")


def test_callers_know_the_server_by_authority_and_name(folder: Path, tmp_path: Path) -> None:
    certs.make_all(tmp_path)
    client = caller(folder)
    with served(security(folder, "worker", http="tls")) as server:
        assert server.https
        assert ask_http(server.address, "/readyz", TIMEOUT_S, client, WORKER) == (200, "because\n")
        assert ask_http(server.address, "/livez", TIMEOUT_S, client) == (200, "ok\n"), "127.0.0.1 is in it too"
        anonymous = caller(folder, cert_file="", key_file="")
        assert "crossdock_tokens_total" in ask_http(server.address, "/metrics", TIMEOUT_S, anonymous, WORKER)[1]
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            ask_http(server.address, "/livez", TIMEOUT_S, caller(tmp_path), WORKER)
        with pytest.raises(ssl.SSLError, match="crossdock-control"):
            ask_http(server.address, "/livez", TIMEOUT_S, client, "crossdock-control")
        with pytest.raises((OSError, HTTPException)):  # plain text
            ask_http(server.address, "/livez", TIMEOUT_S)


def test_with_mtls_metrics_are_for_callers_with_a_certificate_and_probes_for_all(folder: Path, tmp_path: Path) -> None:
    certs.make_all(tmp_path)
    anonymous = caller(folder, cert_file="", key_file="")
    stranger = {"cert_file": str(tmp_path / "client.pem"), "key_file": str(tmp_path / "client.key")}
    with served(security(folder, "worker", http="mtls")) as server:
        for path in ("/livez", "/readyz"):
            assert ask_http(server.address, path, TIMEOUT_S, anonymous, WORKER)[0] == 200
        status, text = ask_http(server.address, "/metrics", TIMEOUT_S, anonymous, WORKER)
        assert (status, text) == (403, "expected a certificate of the caller, got none\n")
        status, text = ask_http(server.address, "/metrics", TIMEOUT_S, caller(folder), WORKER)
        assert status == 200
        assert "crossdock_tokens_total" in text
        with pytest.raises((OSError, HTTPException)):  # of another authority; the word for it may come after the end
            ask_http(server.address, "/metrics", TIMEOUT_S, caller(folder, **stranger), WORKER)


def test_new_certificates_count_from_the_next_connection(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "live"
    shutil.copytree(folder, here)
    with served(security(here, "worker", http="mtls")) as server:
        before = shown(server)
        shutil.copy(here / "client.key", here / "worker.key")
        assert shown(server) == before, "a pair that does not fit leaves the former in force"
        for old in ("ca.pem", "ca.key"):
            (here / old).unlink()
        certs.make_all(here)
        assert shown(server) != before
        assert ask_http(server.address, "/metrics", TIMEOUT_S, caller(here), WORKER)[0] == 200
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            ask_http(server.address, "/livez", TIMEOUT_S, caller(folder), WORKER)


def test_an_authority_file_that_is_just_being_written_ends_nothing(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "live"
    shutil.copytree(folder, here)
    with served(security(here, "worker", http="tls")) as server:
        before = shown(server)
        (here / "ca.pem").write_bytes(b"")
        assert shown(server) == before
        shutil.copy(folder / "ca.pem", here / "ca.pem")
        assert shown(server) == before


def test_a_connection_that_cannot_be_met_does_not_end_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = security(folder, "worker", http="tls")
    with served(guard) as server:
        with monkeypatch.context() as patched:
            patched.setattr(guard, "http_server", lambda: 1 / 0)
            with pytest.raises(OSError):  # noqa: PT011  (closed, or reset)
                shown(server)
        assert shown(server)


def test_a_caller_that_does_not_shake_hands_delays_nobody(folder: Path) -> None:
    with (
        served(security(folder, "worker", http="tls")) as server,
        socket.create_connection(split_address(server.address)) as silent,
    ):
        assert ask_http(server.address, "/livez", TIMEOUT_S, caller(folder), WORKER)[0] == 200
        silent.sendall(b"\x16\x03")
        assert ask_http(server.address, "/livez", TIMEOUT_S, caller(folder), WORKER)[0] == 200


def test_a_host_asks_its_processes_by_the_names_in_their_certificates(folder: Path) -> None:
    host = security(folder, "host")
    with served(security(folder, "control", http="mtls")) as control, served(security(folder, "worker")) as worker:
        where = {
            "control": Addresses("unused:1", control.address, https=True),
            "worker-0": Addresses("unused:1", worker.address),
        }
        assert readiness(list(where), where, host) == (True, "ready")
        posing = {"control": where["control"], "worker-1": where["control"]}
        ready, reason = readiness(list(posing), posing, host)
        assert not ready
        assert reason.startswith("worker-1: ")
        assert "crossdock-worker" in reason
