"""Labels of Kubernetes nodes, from an API server that speaks list and watch over HTTP."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from crossdock.common.config import KubernetesConfig
from crossdock.control.discovery import Labels
from crossdock.control.nodes import Nodes, labels_of

CLIQUE, RACK = "nvidia.com/gpu.clique", "network.topology.nvidia.com/leaf"
WAIT_S = 60.0


class Api(ThreadingHTTPServer):
    """Nodes at resource versions; watches get what is put into `changes`; None ends a watch. What happened before the
    version `oldest` is forgotten."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nodes: dict[str, dict[str, str]] = {}
        self.version = 10
        self.oldest = 0
        self.changes: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.asked: list[tuple[str, str]] = []
        self.broken = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def node(self, name: str) -> dict[str, Any]:
        metadata = {"name": name, "labels": self.nodes.get(name, {}), "resourceVersion": str(self.version)}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}

    def change(self, kind: str, name: str, **labels: str) -> None:
        self.version += 1
        self.nodes[name] = {key.replace("__", "/"): value for key, value in labels.items()}
        self.changes.put({"type": kind, "object": self.node(name)})

    def asks(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        watching = "watch" in query
        self.server.asked.append(("watch" if watching else "list", query.get("resourceVersion", [""])[0]))
        if self.server.broken or not url.path.endswith("v1/nodes"):
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif watching:
            self._watch(int(query["resourceVersion"][0]))
        else:
            nodes = [self.server.node(name) for name in self.server.nodes]
            body = {"kind": "NodeList", "metadata": {"resourceVersion": str(self.server.version)}, "items": nodes}
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _watch(self, since: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if since < self.server.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._tell({"type": "ERROR", "object": gone})
        else:
            while (change := self.server.changes.get()) is not None:
                self._tell(change)
        self.wfile.write(b"0\r\n\r\n")

    def _tell(self, change: dict[str, Any]) -> None:
        line = json.dumps(change).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    yield server
    server.changes.put(None)
    server.shutdown()
    server.server_close()


@pytest.fixture
def config(api: Api, tmp_path: Path) -> KubernetesConfig:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    return KubernetesConfig(kubeconfig=str(path))


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def test_labels_are_listed_then_watched(api: Api, config: KubernetesConfig) -> None:
    api.nodes["a"] = {CLIQUE: "u.1", RACK: "leaf3", "nvidia.com/gpu.product": "H100", "other": "x"}
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        assert nodes.labels == {"a": Labels(clique="u.1", product="H100", rack="leaf3")}
        assert nodes.trouble == ""
        api.change("ADDED", "b", **{"nvidia.com__gpu.clique": "u.2"})
        until(lambda: nodes.labels.get("b") == Labels(clique="u.2"))
        api.change("MODIFIED", "b", **{"nvidia.com__gpu.clique": "u.3"})
        until(lambda: nodes.labels["b"].clique == "u.3")
        api.change("DELETED", "a")
        until(lambda: "a" not in nodes.labels)
        api.changes.put(None)  # the watch ends: it goes on from the last version
        until(lambda: api.asks("watch") >= 2)
        assert api.asked[-1] == ("watch", str(api.version))
        assert api.asks("list") == 1
    finally:
        nodes.close()


def test_a_forgotten_place_in_history_means_a_new_list(api: Api, config: KubernetesConfig) -> None:
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        api.nodes["late"] = {CLIQUE: "u.9"}
        api.version = api.oldest = api.version + 10
        api.changes.put(None)
        until(lambda: "late" in nodes.labels)
        assert api.asks("list") == 2
    finally:
        nodes.close()


def test_without_an_answer_the_last_labels_stay(api: Api, config: KubernetesConfig) -> None:
    api.nodes["a"] = {CLIQUE: "u.1"}
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        api.broken = True
        api.changes.put(None)
        until(lambda: nodes.trouble)
        assert "(500)" in nodes.trouble
        assert "secret-token" not in nodes.trouble
        assert nodes.labels["a"].clique == "u.1"
        api.broken = False
        api.nodes["b"] = {CLIQUE: "u.1"}
        until(lambda: "b" in nodes.labels and not nodes.trouble)
    finally:
        nodes.close()


def test_nobody_there(config: KubernetesConfig, api: Api) -> None:
    api.broken = True
    nodes = Nodes(config)
    assert not nodes.start(0.5)
    assert nodes.labels == {}
    nodes.close()


def test_the_first_label_that_is_set_counts() -> None:
    config = KubernetesConfig(rack_labels=("new/rack", "old/rack"))
    assert labels_of({"old/rack": "r1"}, config).rack == "r1"
    assert labels_of({"old/rack": "r1", "new/rack": "r2"}, config).rack == "r2"
    assert labels_of({"new/rack": "", "old/rack": "r1"}, config).rack == "r1"
    assert labels_of({}, config) == Labels()
