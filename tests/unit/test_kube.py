"""The way to the API server: every call ends in time, whatever the server does; what rotates is taken up."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("kubernetes", reason="the client comes with the extra [control]")

from kubernetes.client import ApiClient, CoordinationV1Api, V1Lease
from kubernetes.config import incluster_config

from crossdock.cli import certs
from crossdock.control.leader import kube
from crossdock.control.leader.kube import ApiError, ApiServer, Timeouts
from tests.services.lease_api import LeaseApi
from tests.tools import needs

TIMEOUT_S = 60.0


def get(api: ApiClient, timeouts: Timeouts) -> V1Lease:
    return CoordinationV1Api(api).read_namespaced_lease("moe", "default", _request_timeout=timeouts)


@contextlib.contextmanager
def asking(path: Path) -> Iterator[ApiServer]:
    with contextlib.closing(ApiServer(str(path))) as server:
        yield server


def kubeconfig(folder: Path, server: str, user: dict[str, str], **cluster: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def stubborn(words: bytes) -> Iterator[str]:
    """Takes every connection, sends these bytes again and again, and never an answer; its URL."""
    done = threading.Event()

    def talk(line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            while not done.wait(0.01):
                line.sendall(words)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["silent", "never done"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_call_ends_at_its_deadline_whatever_the_server_sends(tmp_path: Path, words: bytes, scheme: str) -> None:
    """By TLS it ends within the handshake."""
    with stubborn(words) as url, asking(kubeconfig(tmp_path, url.replace("http", scheme), {"token": "t"})) as server:
        if scheme == "https" and words:
            with pytest.raises(ApiError, match=r"SSL|ssl"):
                server.ask(get, TIMEOUT_S)
            return
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no answer of the API server within 0\.3 s$"):
                server.ask(get, 0.3)


def test_a_call_that_was_given_up_sends_nothing_more(tmp_path: Path) -> None:
    """Its thread is stuck before it has sent anything, as in a resolver: it ends without a connection; until
    then other calls wait."""
    stuck, outcome = threading.Event(), []

    def late(api: ApiClient, timeouts: Timeouts) -> None:
        assert stuck.wait(TIMEOUT_S)
        try:
            get(api, timeouts)
        except Exception as error:
            outcome.append(type(error))

    with LeaseApi() as api, asking(api.kubeconfig(tmp_path)) as server:
        api.offer(6)
        with pytest.raises(TimeoutError):
            server.ask(late, 0.05)
        with pytest.raises(TimeoutError, match="an earlier call is stuck"):
            server.ask(get, 0.05)
        stuck.set()
        server.ask(get, TIMEOUT_S)
        assert len(outcome) == len(api.tokens) == 1, "the late one reached the server"


def test_closing_ends_a_call_that_is_under_way(tmp_path: Path) -> None:
    failed = threading.Event()

    def wait(server: ApiServer) -> None:
        with contextlib.suppress(Exception):
            server.ask(get, TIMEOUT_S)
        failed.set()

    with LeaseApi() as api, asking(api.kubeconfig(tmp_path)) as server:
        api.offer(6)
        api.hold = threading.Event()
        thread = threading.Thread(target=wait, args=(server,), daemon=True)
        thread.start()
        assert api.held.wait(TIMEOUT_S)
        server.close()
        assert failed.wait(TIMEOUT_S / 2)
        with pytest.raises(ConnectionAbortedError):
            server.ask(get, TIMEOUT_S)
        api.hold.set()


def test_connections_are_kept_and_those_that_the_server_closes_leave_no_socket_open(tmp_path: Path) -> None:
    with LeaseApi() as api, asking(api.kubeconfig(tmp_path)) as server:
        api.offer(6)
        for _ in range(3):
            server.ask(get, TIMEOUT_S)
        assert api.connections == 1
        api.hangs_up = True
        server.ask(get, TIMEOUT_S)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(8):
            server.ask(get, TIMEOUT_S)
        assert len(os.listdir("/proc/self/fd")) <= before + 4


@contextlib.contextmanager
def asked_with_a_token(tmp_path: Path) -> Iterator[tuple[LeaseApi, ApiServer, Path]]:
    """An API server that was asked once, with what the file of the token says: `first`."""
    token = tmp_path / "token"
    token.write_text("first")
    with LeaseApi() as api:
        api.offer(6)
        path = kubeconfig(tmp_path, f"http://127.0.0.1:{api.server_port}", {"tokenFile": str(token)})
        with asking(path) as server:
            server.ask(get, TIMEOUT_S)
            yield api, server, token


def test_a_token_that_was_replaced_is_read_when_the_server_refuses_the_old_one(tmp_path: Path) -> None:
    with asked_with_a_token(tmp_path) as (api, server, token):
        api.token = "second"
        token.write_text("second")
        server.ask(get, TIMEOUT_S)
        assert api.tokens == ["first", "second"]


@pytest.mark.parametrize(("fresh_s", "taken"), [(0.0, "second"), (1e9, "first")])
def test_a_token_is_read_anew_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_s: float, taken: str
) -> None:
    """Also one that is still accepted: servers take old tokens for a while, and complain."""
    monkeypatch.setattr(kube, "FRESH_S", fresh_s)
    with asked_with_a_token(tmp_path) as (api, server, token):
        token.write_text("second")
        server.ask(get, TIMEOUT_S)
        assert api.tokens == ["first", taken]


@needs("openssl")
def test_an_authority_that_was_replaced_is_read_for_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "FRESH_S", 1e9)
    for name in ("old", "new"):
        certs.make_authority(tmp_path, name)
        certs.issue(tmp_path, certs.CertificateRole(f"{name}-server", (), serves=True), ["127.0.0.1"], authority=name)
    tls, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tmp_path / "ca.crt"

    def rotate(name: str) -> None:
        tls.load_cert_chain(tmp_path / f"{name}-server.pem", tmp_path / f"{name}-server.key")
        shutil.copy(tmp_path / f"{name}.pem", trusted)

    rotate("old")
    with LeaseApi(tls=tls) as api:
        api.offer(6)
        api.hangs_up = True
        url = f"https://127.0.0.1:{api.server_port}"
        path = kubeconfig(tmp_path, url, {"token": "t"}, **{"certificate-authority": str(trusted)})
        with asking(path) as server:
            server.ask(get, TIMEOUT_S)
            rotate("new")
            server.ask(get, TIMEOUT_S)
            shutil.copy(tmp_path / "old.pem", trusted)
            with pytest.raises(ApiError, match="certificate"):
                server.ask(get, TIMEOUT_S)
            rotate("new")
            server.ask(get, TIMEOUT_S)


@needs("openssl")
def test_a_pod_takes_up_the_token_and_the_authority_that_its_kubelet_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs.make_authority(tmp_path, "ca")
    certs.issue(tmp_path, certs.CertificateRole("server", (), serves=True), ["127.0.0.1"], authority="ca")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    token = tmp_path / "token"
    token.write_text("first")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    with LeaseApi(tls=tls) as api, stubborn(b"") as proxy, contextlib.closing(ApiServer("")) as server:
        api.offer(6)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        server.ask(get, TIMEOUT_S)
        token.write_text("second")
        api.token = "second"
        server.ask(get, TIMEOUT_S)
        monkeypatch.setattr(kube, "FRESH_S", 0.0)
        api.token = ""
        token.write_text("third")
        server.ask(get, TIMEOUT_S)
        assert api.tokens == ["first", "second", "third"], "a proxy of the environment was asked, or an old token kept"


def test_a_kubeconfig_that_is_missing_is_named(tmp_path: Path) -> None:
    with asking(tmp_path / "nowhere") as server, pytest.raises(ValueError, match=r"kubeconfig .*nowhere: "):
        server.ask(get, TIMEOUT_S)


def test_an_answer_is_told_in_one_line_with_the_words_of_the_server(tmp_path: Path) -> None:
    with LeaseApi() as api, asking(api.kubeconfig(tmp_path)) as server:
        api.away = True
        with pytest.raises(ApiError, match=r"^500 etcd is\saway$") as told:
            server.ask(get, TIMEOUT_S)
        assert told.value.status == 500


def test_a_call_for_which_there_was_no_thread_does_not_stand_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with asking(tmp_path / "none") as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", full)
            with pytest.raises(RuntimeError, match="new thread"):
                server.ask(get, 1.0)
        with pytest.raises(ValueError, match="kubeconfig"):
            server.ask(get, TIMEOUT_S)
