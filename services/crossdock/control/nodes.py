"""What Kubernetes says about where hosts stand: labels of their nodes, listed once and then watched.

    nodes = Nodes(config.kubernetes)
    nodes.start()                        # a thread; waits a little for the first list
    nodes.labels["gpu-node-7"].clique

Reads `nodes` (get, list, watch) and nothing else. Without an answer the labels known last stay, and the thread tries
again; the control plane never waits for it after the start. A node's name must be the hostname that its workers tell
(NODE_NAME in their environment, as the chart sets it).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping

from lightkube import AsyncClient
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node

from crossdock.common import log as logs
from crossdock.common.config import KubernetesConfig
from crossdock.control.discovery import Labels
from crossdock.control.kube import connect, status_of

log = logs.get(__name__)

FIRST_LIST_S = 10.0
"""Longest that `start` waits for the first list."""
_LIST_S = 30.0
_WATCH_S = 300
"""After this a watch is left and begun again where it was, by a new client: token and certificates are read anew."""
_SPARE_S = 10
"""So much later the server ends a watch whose reader is gone."""
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

    Attributes:
        labels: by node name, the newest; replaced as a whole.
        trouble: why there is no line to the API server just now, "" = there is one.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self.labels: Mapping[str, Labels] = {}
        self.trouble = "not started"
        self._listed = threading.Event()
        self._ending: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self, wait_s: float = FIRST_LIST_S) -> bool:
        """Begin; whether the first list came within `wait_s`."""
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._run())
        self._ending = lambda: loop.call_soon_threadsafe(task.cancel)
        self._thread = threading.Thread(target=_until_cancelled, args=(loop, task), name="crossdock-nodes", daemon=True)
        self._thread.start()
        return self._listed.wait(wait_s)

    def close(self) -> None:
        """Stop watching. The thread is a daemon: one that is stuck in the network is not waited for."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._ending()
        if self._thread is not None:
            self._thread.join(1.0)

    async def _run(self) -> None:
        pause_s, version = _PAUSES_S[0], ""
        while True:
            try:
                async with connect(self._config.kubeconfig) as api:
                    version = version or await self._list(api)
                    pause_s = _PAUSES_S[0]
                    version = await self._follow(api, version)
            except Exception as error:  # lightkube raises its own errors, httpx2's and the socket's
                version = ""
                if status_of(error) == _GONE:  # this place of the history is forgotten: list anew
                    continue
                self._complain(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("no node labels", why=trouble, kept=len(self.labels))
        self.trouble = trouble

    async def _list(self, api: AsyncClient) -> str:
        """Take all of them; the place in the history where that was."""
        nodes = api.list(Node)
        try:
            async with asyncio.timeout(_LIST_S):
                self.labels = dict([self._node(node) async for node in nodes])
        except TimeoutError:
            raise TimeoutError(f"no list of nodes within {_LIST_S:.0f} s") from None
        self.trouble = ""
        self._listed.set()
        log.info("node labels", nodes=len(self.labels))
        return nodes.resourceVersion

    async def _follow(self, api: AsyncClient, version: str) -> str:
        """Take changes for a while; where to go on, "" = nothing was heard: a list tells whether the line is dead."""
        heard = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_S):
                changes = api.watch(Node, resource_version=version, server_timeout=_WATCH_S + _SPARE_S)
                async for kind, node in changes:
                    self._change(kind, node)
                    heard = str(node.metadata.resourceVersion) if node.metadata else ""
        return heard

    def _change(self, kind: str, node: Node) -> None:
        name, labels = self._node(node)
        if kind == "DELETED":
            self.labels = {other: known for other, known in self.labels.items() if other != name}
        elif self.labels.get(name) != labels:
            self.labels = {**self.labels, name: labels}
            log.info("node labels changed", node=name)

    def _node(self, node: Node) -> tuple[str, Labels]:
        metadata = node.metadata or ObjectMeta()
        return str(metadata.name), labels_of(metadata.labels or {}, self._config)


def _until_cancelled(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
