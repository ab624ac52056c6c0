"""What Kubernetes says about where hosts stand: labels of their nodes, listed once and then watched.

    nodes = Nodes(config.kubernetes)
    nodes.start()                        # a thread; waits a little for the first list
    nodes.labels["gpu-node-7"].clique

Reads `nodes` (get, list, watch) and nothing else. Without an answer the labels known last stay, and the thread tries
again; the control plane never waits for it after the start. A node's name must be the hostname that its workers tell
(NODE_NAME in their environment, as the chart sets it).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from crossdock.common import log as logs
from crossdock.common.config import KubernetesConfig
from crossdock.control.discovery import Labels

log = logs.get(__name__)

FIRST_LIST_S = 10.0
"""Longest that `start` waits for the first list."""
_CONNECT_S = 5.0
_WATCH_S = 300
"""A watch ends by itself after this, and is begun again where it was."""
_SPARE_S = 10
_PAUSES_S = (0.2, 30.0)
_GONE = 410


def labels_of(labels: Mapping[str, str], config: KubernetesConfig) -> Labels:
    """The five words from a node's labels: of each list of keys the first that is set."""

    def first(keys: tuple[str, ...]) -> str:
        return next((labels[key] for key in keys if labels.get(key)), "")

    return Labels(
        clique=first(config.clique_labels),
        product=first(config.product_labels),
        zone=first(config.zone_labels),
        block=first(config.block_labels),
        rack=first(config.rack_labels),
    )


class Nodes:
    """See the module's head.

    Args:
        config: which API server, which labels.
        connect: makes the API (`kubernetes.client.CoreV1Api`); by default from `config`.

    Attributes:
        labels: by node name, the newest; replaced as a whole.
        trouble: why there is no line to the API server just now, "" = there is one.
    """

    def __init__(self, config: KubernetesConfig, connect: Callable[[], Any] | None = None) -> None:
        self._config, self._connect = config, connect or (lambda: connect_to(config))
        self.labels: Mapping[str, Labels] = {}
        self.trouble = "not started"
        self._listed, self._stop = threading.Event(), threading.Event()
        self._watch: Any = None
        self._thread = threading.Thread(target=self._run, name="crossdock-nodes", daemon=True)

    def start(self, wait_s: float = FIRST_LIST_S) -> bool:
        """Begin; whether the first list came within `wait_s`."""
        self._thread.start()
        return self._listed.wait(wait_s)

    def close(self) -> None:
        """Stop watching. The thread is a daemon: one that is stuck in the network is not waited for."""
        self._stop.set()
        if self._watch is not None:
            self._watch.stop()
        self._thread.join(1.0)

    def _run(self) -> None:
        pause_s = _PAUSES_S[0]
        while not self._stop.is_set():
            try:
                api = self._connect()
                version = self._list(api)
                pause_s = _PAUSES_S[0]
                while not self._stop.is_set():
                    version = self._follow(api, version)
            except Exception as error:  # the client raises its own errors, urllib3's and the socket's
                if self._stop.is_set():
                    return
                if getattr(error, "status", None) == _GONE:  # this place of the history is forgotten: list anew
                    continue
                self._complain(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("no node labels", why=trouble, kept=len(self.labels))
        self.trouble = trouble

    def _list(self, api: Any) -> str:
        answer = api.list_node(_preload_content=False, _request_timeout=(_CONNECT_S, 6 * _CONNECT_S))
        nodes = json.loads(answer.data)
        self.labels = dict(self._node(node) for node in nodes["items"])
        self.trouble = ""
        self._listed.set()
        log.info("node labels", nodes=len(self.labels))
        return str(nodes["metadata"]["resourceVersion"])

    def _follow(self, api: Any, version: str) -> str:
        """Take changes until the watch ends; where to go on."""
        from kubernetes import watch

        self._watch = watch.Watch()  # type: ignore[no-untyped-call]
        timeouts = {"timeout_seconds": _WATCH_S, "_request_timeout": (_CONNECT_S, _WATCH_S + _SPARE_S)}
        bookmarks = {"allow_watch_bookmarks": True}
        for event in self._watch.stream(api.list_node, resource_version=version, **timeouts, **bookmarks):
            node = event["raw_object"]
            version = node["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._change(event["type"], node)
            if self._stop.is_set():
                break
        return version

    def _change(self, kind: str, node: Mapping[str, Any]) -> None:
        name, labels = self._node(node)
        if kind == "DELETED":
            self.labels = {other: known for other, known in self.labels.items() if other != name}
        elif self.labels.get(name) != labels:
            self.labels = {**self.labels, name: labels}
            log.info("node labels changed", node=name)

    def _node(self, node: Mapping[str, Any]) -> tuple[str, Labels]:
        metadata = node["metadata"]
        return metadata["name"], labels_of(metadata.get("labels") or {}, self._config)


def connect_to(config: KubernetesConfig) -> Any:
    """A `CoreV1Api`. Raises what the client raises."""
    from kubernetes import client

    return client.CoreV1Api(api_client(config.kubeconfig))


def api_client(kubeconfig: str) -> Any:
    """An `ApiClient`: by `kubeconfig`, or with the pod's own service account. Raises what the client raises."""
    from kubernetes import client
    from kubernetes import config as access

    settings = client.Configuration()
    if kubeconfig:
        access.load_kube_config(kubeconfig, client_configuration=settings)  # type: ignore[no-untyped-call]
    else:
        access.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    with contextlib.suppress(AttributeError):
        settings.retries = 0  # who calls tries again, and says so
    return client.ApiClient(settings)
