"""Labels of Kubernetes nodes as facts about hosts: listed once, then watched.

    nodes = Nodes(config.kubernetes)
    nodes.start()                        # a thread; waits shortly for the first list
    nodes.labels["gpu-node-7"].clique

Reads `nodes` (get, list, watch) and nothing else. Without an answer the last labels stay valid and the thread retries;
the control plane never waits for it after the start. A node's name must be the hostname reported by its workers
(NODE_NAME in their environment, as the chart sets it).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kubernetes.client import ApiClient, CoreV1Api
from kubernetes.watch import Watch

from crossdock.common import log as logs
from crossdock.common.helper_thread import HelperThread
from crossdock.common.settings import KubernetesConfig
from crossdock.control.leader.kube import ApiError, ApiServer, Timeouts
from crossdock.control.topology.discovery import Labels

log = logs.get(__name__)

FIRST_LIST_S = 10.0
"""Time limit of `start` for the first list."""
_LIST_S = 30.0
_WATCH_S = 300
"""Duration of a watch. It is continued by a new client, which reloads token and certificates."""
_SPARE_S = 10
"""Extra time after which a watch that the server has not ended counts as dead."""
_PAUSES_S = (0.2, 30.0)
_GONE = 410


def labels_of(labels: Mapping[str, str], config: KubernetesConfig) -> Labels:
    """The five values from a node's labels: of each list of keys the first that is set."""

    def first(keys: tuple[str, ...]) -> str:
        return next((labels[key] for key in keys if labels.get(key)), "")

    return Labels(**{field.name: first(getattr(config, f"{field.name}_labels")) for field in fields(Labels)})


class Nodes:
    """Watcher of node labels.

    Args:
        config: which API server, which labels.

    Attributes:
        labels: by node name, the newest; replaced as a whole.
        trouble: why the API server is unreachable; "" = it is reachable.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self.labels: Mapping[str, Labels] = {}
        self.trouble = "not started"
        self._server = ApiServer(config.kubeconfig)
        self._listed, self._stop = threading.Event(), threading.Event()
        self._thread = HelperThread("nodes", self._run)

    def start(self, wait_s: float = FIRST_LIST_S) -> bool:
        """Start; returns whether the first list arrived within `wait_s`."""
        self._thread.start()
        return self._listed.wait(wait_s)

    def close(self) -> None:
        """Stop watching. A thread stuck in the network is a daemon, and is not waited for."""
        self._stop.set()
        self._server.close()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        pause_s, version = _PAUSES_S[0], ""
        while not self._stop.is_set():
            try:
                version = version or self._server.ask(self._list, _LIST_S)
                pause_s = _PAUSES_S[0]
                version = self._watch(version)
                self._stop.wait(_PAUSES_S[0])
            except Exception as error:  # errors of the server, of urllib3 and of the credentials
                version = ""
                if isinstance(error, ApiError) and error.status == _GONE:  # this resourceVersion has expired
                    self._stop.wait(_PAUSES_S[0])
                    continue
                if not self._stop.is_set():
                    self._complain(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("no node labels", why=trouble, kept=len(self.labels))
        self.trouble = trouble

    def _list(self, api: ApiClient, timeouts: Timeouts) -> str:
        """Read all nodes; returns the resourceVersion."""
        answer: Any = CoreV1Api(api).list_node(_preload_content=False, _request_timeout=timeouts)
        nodes = json.loads(answer.data)
        self.labels = dict(self._node(node) for node in nodes["items"])
        self.trouble = ""
        self._listed.set()
        log.info("node labels", nodes=len(self.labels))
        return str(nodes["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> str:
        """Process changes until the server ends the watch; returns the resourceVersion to continue at. "": timed out,
        so a new list is needed."""

        def follow(api: ApiClient, timeouts: Timeouts) -> str:
            place = version
            changes = Watch("object").stream(  # plain JSON: only the labels of the large objects are needed
                CoreV1Api(api).list_node,
                resource_version=version,
                timeout_seconds=_WATCH_S,
                allow_watch_bookmarks=True,
                _request_timeout=timeouts,
            )
            for event in changes:
                place = str(event["object"]["metadata"]["resourceVersion"])
                if event["type"] != "BOOKMARK":
                    self._change(event["type"], event["object"])
            return place

        try:
            return self._server.ask(follow, _WATCH_S + _SPARE_S)
        except TimeoutError:
            return ""

    def _change(self, kind: str, node: Mapping[str, Any]) -> None:
        name, labels = self._node(node)
        if kind == "DELETED":
            self.labels = {other: known for other, known in self.labels.items() if other != name}
        elif self.labels.get(name) != labels:
            self.labels = {**self.labels, name: labels}
            log.info("node labels changed", node=name)

    def _node(self, node: Mapping[str, Any]) -> tuple[str, Labels]:
        metadata = node["metadata"]
        return str(metadata["name"]), labels_of(metadata.get("labels") or {}, self._config)
