"""The way to the API server: every call ends in time, whatever the server does; what rotates is taken up."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lightkube", reason="the client comes with the extra [control]")

from httpx2 import ConnectError
from lightkube import AsyncClient, ConfigError, KubeConfig
from lightkube.resources.coordination_v1 import Lease

from crossdock import certs
from crossdock.control import kube
from crossdock.control.kube import ApiServer
from tests.services.lease_api import LeaseApi

TIMEOUT_S = 60.0


def get(api: AsyncClient) -> Awaitable[Lease]:
    return api.get(Lease, "moe", namespace="default")


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
def test_a_call_ends_at_its_deadline_whatever_the_server_sends(tmp_path: Path, words: bytes) -> None:
    with stubborn(words) as url, asking(kubeconfig(tmp_path, url, {"token": "t"})) as server:
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no answer of the API server within 0\.3 s"):
                server.ask(get, 0.3)


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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_an_authority_that_was_replaced_is_read_after_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "FRESH_S", 1e9)
    for name in ("old", "new"):
        certs.make_authority(tmp_path, name)
        certs.issue(tmp_path, certs.Part(f"{name}-server", (), serves=True), ["127.0.0.1"], authority=name)
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
            with pytest.raises(ConnectError, match="certificate"):
                server.ask(get, TIMEOUT_S)
            server.ask(get, TIMEOUT_S)


def test_a_pod_asks_the_server_and_no_proxy_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with LeaseApi() as api, stubborn(b"") as proxy:
        api.offer(6)
        path = kubeconfig(tmp_path, f"http://127.0.0.1:{api.server_port}", {"token": "t"})
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setattr(KubeConfig, "from_service_account", lambda: KubeConfig.from_file(path))
        with contextlib.closing(ApiServer("")) as in_pod:
            in_pod.ask(get, TIMEOUT_S)
        with asking(path) as outside, pytest.raises(TimeoutError):
            outside.ask(get, 0.3)


def test_a_kubeconfig_that_is_missing_is_named(tmp_path: Path) -> None:
    with asking(tmp_path / "nowhere") as server, pytest.raises(ConfigError, match="nowhere not found"):
        server.ask(get, TIMEOUT_S)
