"""Labels of Kubernetes nodes, from an API server that speaks list and watch over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

pytest.importorskip("kubernetes", reason="the client comes with the extra [control]")

from crossdock.common.settings import KubernetesConfig
from crossdock.control.topology import nodes as nodes_module
from crossdock.control.topology.discovery import Labels
from crossdock.control.topology.nodes import Nodes, labels_of
from tests.waiting import until

CLIQUE, RACK = "nvidia.com/gpu.clique", "network.topology.nvidia.com/leaf"
WAIT_S = 60.0


class Api(ThreadingHTTPServer):
    """Nodes and what happened to them, at resource versions; a watch tells all that happened after its version. What
    happened before the version `oldest` is forgotten.

    Attributes:
        gone: how a watch is answered whose place is forgotten: status of the answer, and of the event within it.
        broken: everything is answered 500.
        asked: what was asked for, list or watch, and from which version.
        queries: of these requests.
        told: the newest version that a watch was told.
        watching: how many watches `end_watches` would end.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nodes: dict[str, dict[str, str]] = {}
        self.version = 10
        self.oldest = 0
        self.gone = 200
        self.broken = False
        self.asked: list[tuple[str, str]] = []
        self.queries: list[dict[str, list[str]]] = []
        self.told = 0
        self.happened: list[dict[str, Any]] = []
        self.ended = self.watching = 0
        self.news = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def node(self, name: str) -> dict[str, Any]:
        metadata = {"name": name, "labels": self.nodes.get(name, {}), "resourceVersion": str(self.version)}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}

    def list(self) -> dict[str, Any]:
        nodes = [self.node(name) for name in self.nodes]
        return {"kind": "NodeList", "metadata": {"resourceVersion": str(self.version)}, "items": nodes}

    def change(self, kind: str, name: str, **labels: str) -> None:
        with self.news:
            self.version += 1
            self.nodes[name] = {key.replace("__", "/"): value for key, value in labels.items()}
            self.happened.append({"type": kind, "object": self.node(name)})
            if kind == "DELETED":
                del self.nodes[name]
            self.news.notify_all()

    def bookmark(self, version: int) -> None:
        with self.news:
            self.version = version
            metadata = {"resourceVersion": str(version)}
            self.happened.append({"type": "BOOKMARK", "object": {"kind": "Node", "metadata": metadata}})
            self.news.notify_all()

    def end_watches(self) -> None:
        with self.news:
            self.ended += 1
            self.watching = 0
            self.news.notify_all()

    def asks(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.queries.append(query)
        watching = "watch" in query
        self.server.asked.append(("watch" if watching else "list", query.get("resourceVersion", [""])[0]))
        if self.server.broken or not url.path.endswith("v1/nodes"):
            self._answer(500, {"kind": "Status", "code": 500, "message": "out of order"})
        elif watching:
            self._watch(int(query["resourceVersion"][0]))
        else:
            self._answer(200, self.server.list())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, since: int) -> None:
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        forgotten = since < self.server.oldest
        if forgotten and self.server.gone == 410:
            self._answer(410, gone)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if forgotten:
            self._tell({"type": "ERROR", "object": gone})
        else:
            self._tell_on(since)
        self.wfile.write(b"0\r\n\r\n")

    def _tell_on(self, since: int) -> None:
        with self.server.news:
            self.server.watching += 1
            ended = self.server.ended
            while ended == self.server.ended:
                for event in self.server.happened:
                    version = int(event["object"]["metadata"]["resourceVersion"])
                    if version > since:
                        self._tell(event)
                        self.server.told = since = version
                self.server.news.wait(WAIT_S)

    def _tell(self, change: dict[str, Any]) -> None:
        line = json.dumps(change).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    yield server
    server.end_watches()
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
        api.end_watches()
        until(lambda: api.asks("watch") >= 2)
        assert api.asked[:3] == [("list", ""), ("watch", "10"), ("watch", str(api.version))], "it goes on where it was"
    finally:
        nodes.close()


@pytest.mark.parametrize("status", [200, 410])
def test_a_forgotten_place_in_history_means_a_new_list(api: Api, config: KubernetesConfig, status: int) -> None:
    api.gone = status
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        until(lambda: api.watching)
        api.nodes["late"] = {CLIQUE: "u.9"}
        api.version = api.oldest = api.version + 10
        api.end_watches()
        until(lambda: "late" in nodes.labels)
        assert nodes.trouble == ""
        assert api.asks("list") == 2
    finally:
        nodes.close()


def test_without_an_answer_the_last_labels_stay(api: Api, config: KubernetesConfig) -> None:
    api.nodes["a"] = {CLIQUE: "u.1"}
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        until(lambda: api.watching)
        api.broken = True
        api.end_watches()
        until(lambda: nodes.trouble)
        assert "500" in nodes.trouble
        assert "secret-token" not in nodes.trouble
        assert nodes.labels["a"].clique == "u.1"
        api.broken = False
        api.nodes["b"] = {CLIQUE: "u.1"}
        until(lambda: "b" in nodes.labels and not nodes.trouble)
    finally:
        nodes.close()


def test_a_silent_watch_is_left_after_a_while_and_a_list_tells_whether_the_line_is_dead(
    api: Api, config: KubernetesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "_SPARE_S", 0.2 - nodes_module._WATCH_S)
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        until(lambda: len(api.asked) >= 4)
    finally:
        nodes.close()
    assert api.asked[:4] == [("list", ""), ("watch", "10")] * 2
    assert nodes.trouble == ""


def test_a_watch_goes_on_from_a_bookmark_and_its_end_is_left_to_the_server(api: Api, config: KubernetesConfig) -> None:
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    try:
        until(lambda: api.watching)
        api.bookmark(25)
        until(lambda: api.told == 25)
        api.end_watches()
        until(lambda: api.asks("watch") >= 2)
    finally:
        nodes.close()
    assert api.asked[:3] == [("list", ""), ("watch", "10"), ("watch", "25")]
    assert api.queries[1]["timeoutSeconds"] == [str(nodes_module._WATCH_S)]
    assert nodes.labels == {}, "a bookmark is no node"


def test_closing_ends_a_watch_at_once(api: Api, config: KubernetesConfig) -> None:
    nodes = Nodes(config)
    assert nodes.start(WAIT_S)
    until(lambda: api.watching)
    nodes.close()
    assert not nodes._thread.is_alive()
    assert nodes.trouble == ""


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
