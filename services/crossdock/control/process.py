"""The control plane as a process, alone or as one of several (leader.py).

run_control(config)   blocking; prints one `crossdock-ready {...}` line, serves until SIGTERM, SIGINT, hang-up
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossdock.common import descriptors, rpc
from crossdock.common import log as logs
from crossdock.common.access import authorizer_of
from crossdock.common.announce import announce, seen_from_outside
from crossdock.common.call_limits import WAITING_PER_PEER, CallLimits
from crossdock.common.config import ControlConfig, Identity
from crossdock.common.control_channel import SERVICE_NAME
from crossdock.common.grpc_core_log import grpc_core_log
from crossdock.common.hangup import at_hangup
from crossdock.common.http import page_of, serve_http
from crossdock.common.liveness import Liveness
from crossdock.common.metrics import ControlMetrics
from crossdock.common.security import SecurityError, security_of, warn_of_plain_text
from crossdock.common.settings import KubernetesConfig
from crossdock.common.tasks import background
from crossdock.control.leader.election import State
from crossdock.control.leader.leader import Elector, Replica
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2_grpc

if TYPE_CHECKING:
    from crossdock.control.topology.nodes import Nodes

TICKS_PER_LEASE = 8
MAX_TICK_S = 0.25
STOP_GRACE_S = 1.0
CALLS, CALLS_PER_RANK = 2048, 8
"""Concurrent calls, most of them Watch streams; one peer gets a quarter. All ranks may share one proxy, and the permits
of two streams per rank are never revoked."""
WAITING_PER_RANK = 2
"""Calls of one peer that wait to be read, beside WAITING_PER_PEER."""
EXIT_OK, EXIT_BROKEN, EXIT_BAD_CONFIG = 0, 1, 2

log = logs.get(__name__)


def run_control(config: ControlConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0 stopped normally; 1 an essential task ended, which is
    a bug (the log has the error); 2 an address, certificate or token cannot be used, or the extra `control` is needed
    and not installed."""
    logs.setup(config.log, role="control")
    descriptors.raise_limit()
    # What only the extra and files on disk can refuse.
    if (config.election or config.kubernetes) and find_spec("kubernetes") is None:
        log.error("election and kubernetes need the extra: pip install 'crossdock[control]'", missing="kubernetes")
        return EXIT_BAD_CONFIG
    for chosen in (config.election, config.kubernetes):
        if chosen is not None and chosen.kubeconfig and not Path(chosen.kubeconfig).is_file():
            log.error("kubeconfig: expected a file", got=chosen.kubeconfig)
            return EXIT_BAD_CONFIG
    # Serve, and map each error to an exit status.
    try:
        metrics = ControlMetrics()
        with grpc_core_log(metrics.grpc_core_log_lines_total):
            return asyncio.run(_serve(config, metrics))
    except rpc.ListenError as error:
        log.error("cannot listen", error=str(error))
        return EXIT_BAD_CONFIG
    except SecurityError as error:
        log.error("cannot use certificates or tokens", error=str(error))
        return EXIT_BAD_CONFIG
    except Exception:
        log.exception("the control plane ended; this is a bug")
        return EXIT_BROKEN


class Leadership:
    """Leadership of this process: permanent, or while it holds the lease. Make it inside the running loop."""

    def __init__(self, config: ControlConfig, metrics: ControlMetrics, health: rpc.Health, nodes: Nodes | None) -> None:
        self._config, self._metrics, self._health, self._nodes = config, metrics, health, nodes
        self._loop = asyncio.get_running_loop()
        self.elector: Elector | None = None
        self.tick_now = asyncio.Event()
        """Set when the elector has changed the leader."""

    def service(self, address: str) -> ControlPlane | Replica:
        """The servicer."""
        if self._config.election is None:
            self._metrics.is_leader.set(1)
            return self._make()
        from crossdock.control.leader.kube_lease import KubernetesLeaseStore

        chosen, platform = self._config.election, Identity.from_env()
        name = chosen.identity or platform.pod_name or platform.hostname
        advertised = self._config.advertise or seen_from_outside(address, "", platform.hostname)
        state = State(f"{name}_{secrets.token_hex(4)}", advertised, float(chosen.lease_s))
        self.elector = Elector(
            state, KubernetesLeaseStore(chosen), failed=self._metrics.leader_lease_failures_total.inc
        )
        self.elector.changed = self._tick_soon
        return Replica(self._make, self.elector, self._role_changed)

    def ready(self, alive: Liveness) -> None:
        """The server has started: serve, or start the candidacy."""
        self._health.set(True)
        if self.elector is not None:
            self._health.set(False, SERVICE_NAME)
            self.elector.start()

    async def close(self) -> None:
        """Release the lease, after the service was stopped."""
        if self.elector is not None:
            await asyncio.to_thread(self.elector.close)

    def _make(self) -> ControlPlane:
        return ControlPlane(self._config, self._metrics, labels=lambda: self._nodes.labels if self._nodes else {})

    def _tick_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self.tick_now.set)

    def _role_changed(self, term: int) -> None:
        self._metrics.is_leader.set(bool(term))
        self._metrics.leader_term.set(term)
        self._metrics.leader_terms_total.inc(bool(term))
        self._health.set(bool(term), SERVICE_NAME)


async def _serve(config: ControlConfig, metrics: ControlMetrics) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    at_hangup(lambda: loop.call_soon_threadsafe(stop.set))
    metrics.count_tasks(loop)
    security = security_of(config.security)
    async with contextlib.AsyncExitStack() as closing:  # in reverse order, each even if another one fails
        alive = Liveness(lagged=metrics.event_loop_lag_seconds.observe)
        closing.callback(alive.close)
        # The server, its limits, and who may call.
        nodes = await _nodes(config.kubernetes, alive, closing) if config.kubernetes else None
        health = rpc.Health([SERVICE_NAME])
        waiting = WAITING_PER_PEER + WAITING_PER_RANK * config.num_ranks
        limits = CallLimits.of(config.max_message_bytes, CALLS + CALLS_PER_RANK * config.num_ranks, waiting)
        authorizer = authorizer_of(security, config.max_calls_per_s, metrics, limits)
        server = await rpc.server(config.max_message_bytes, health, observe=metrics.observe_rpc, authorizer=authorizer)
        closing.push_async_callback(server.stop, STOP_GRACE_S)
        address = rpc.bind(server, config.listen, security)
        # The service of a leader, and the pages that tell its state.
        leadership = Leadership(config, metrics, health, nodes)
        service = leadership.service(address)
        ready = lambda: _readiness(service, leadership, stop.is_set())  # noqa: E731
        control_pb2_grpc.add_ControlPlaneServicer_to_server(service, server)
        page = page_of(metrics.registry, config.group)
        http = serve_http(config.http_listen, page, ready, security, alive.trouble)
        closing.callback(http.close)
        closing.push_async_callback(leadership.close)
        closing.callback(service.stop)
        # Ticks drive leases; they end the process if they end.
        ticks = _tick_forever(service, min(MAX_TICK_S, config.lease_s / TICKS_PER_LEASE), leadership.tick_now)
        ticking = _essential_task(ticks, "ticking", stop, alive)
        closing.callback(ticking.cancel)
        closing.callback(health.shut_down)
        # Serve until a signal, or until an essential task has ended.
        await server.start()
        leadership.ready(alive)
        announce(address, http.address, https=http.https)
        log.info("listening", address=address, http=http.address, world_size=config.num_ranks)
        warn_of_plain_text(address, security)
        await stop.wait()
        alive.let_end()
        log.info("stopping")
        return EXIT_BROKEN if ticking.done() else EXIT_OK


async def _nodes(config: KubernetesConfig, alive: Liveness, closing: contextlib.AsyncExitStack) -> Nodes:
    from crossdock.control.topology.nodes import Nodes

    nodes = Nodes(config)
    closing.callback(nodes.close)
    if not await asyncio.to_thread(nodes.start):
        log.warning("starting without node labels", why=nodes.trouble)
    return nodes


def _essential_task(
    work: Coroutine[Any, Any, None], what: str, stop: asyncio.Event, alive: Liveness
) -> asyncio.Task[None]:
    """Start an essential task: its end stops the process."""
    task = background(work, what)
    task.add_done_callback(lambda _: stop.set())
    alive.expect(what, lambda: not task.done())
    return task


async def _tick_forever(service: ControlPlane | Replica, interval_s: float, tick_now: asyncio.Event) -> None:
    """The only caller of `tick`: an error in a callback of the event loop would leave a leadership half begun."""
    while True:
        tick_now.clear()
        service.tick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await tick_now.wait()


def _readiness(service: ControlPlane | Replica, leadership: Leadership, stopping: bool) -> tuple[bool, str]:
    """The control plane is ready when it listens, in every state of the group and in every role: workers must reach it
    to form a group, and a standby redirects them."""
    if stopping:
        return False, "stopping"
    group = service.group
    if group is None:
        leader = leadership.elector.leader if leadership.elector is not None else ""
        return True, f"standby; {leader or 'no replica'} leads"
    held = f"{len(group.members)}/{group.world_size} members"
    return True, f"{group.phase.value} epoch {group.epoch}, {held}"
