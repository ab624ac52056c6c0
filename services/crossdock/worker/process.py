"""The worker process: config in, exit code out. `run_worker` is what `crossdock worker` calls.

    open the model ─▶ listen (gRPC, HTTP) ─▶ print `crossdock-ready {...}` ─▶ session: join, serve, join again, ...
    SIGTERM, SIGINT or Drain: finish what is queued, leave, exit 0. A second signal ends the process at once.

Exit codes: 0 drained; 1 an essential task ended, which is a bug (the log has the error); 2 the model, the device or an
address cannot be used; 3 the group refused this worker, or there was no control plane for `JOIN_TIMEOUT_S` after
the start; 4 the GPU was lost; 5 the group can never take this worker, as both are configured. After a 1, a 3 or a 4
the process may be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import grpc.aio
import torch

from crossdock.common import descriptors, log, rpc
from crossdock.common.access import RateLimiter, authorizer_of
from crossdock.common.announce import announce, seen_from_outside
from crossdock.common.call_errors import Unavailable
from crossdock.common.call_limits import CallLimits
from crossdock.common.config import Identity, WorkerConfig
from crossdock.common.grpc_core_log import grpc_core_log
from crossdock.common.hangup import at_hangup
from crossdock.common.http import HttpServer, page_of, serve_http
from crossdock.common.liveness import Liveness
from crossdock.common.metrics import WorkerMetrics
from crossdock.common.rpc import ListenError
from crossdock.common.security import Security, SecurityError, security_of, warn_of_plain_text
from crossdock.common.tasks import end_tasks
from crossdock.common.tracing import Tracer, TracingError, tracer_of
from crossdock.protocol.v1 import control_pb2, expert_pb2, expert_pb2_grpc
from crossdock.protocol.wire import NAMES
from crossdock.topo.facts import host_facts
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.experts.device import DeviceLost, peak_bytes_per_s, used_bytes, uuid_of
from crossdock.worker.group.control_client import ControlPlaneClient, JoinRefused
from crossdock.worker.group.data_network import announced
from crossdock.worker.group.expert_mover import ExpertMover
from crossdock.worker.group.model import Model
from crossdock.worker.group.same_weights import KIND
from crossdock.worker.group.session import Session
from crossdock.worker.group.worker_status import WorkerStatus
from crossdock.worker.peers.giving import WeightGiver
from crossdock.worker.peers.reading import Peers
from crossdock.worker.requests.admission import RequestValidator
from crossdock.worker.requests.backend import Backend
from crossdock.worker.requests.budget import Budget
from crossdock.worker.requests.request_server import RequestServer
from crossdock.worker.requests.service import SERVICE_NAME, ExpertService
from crossdock.worker.steps.engine import Engine
from crossdock.worker.telemetry.freed_memory import bound_freed_memory
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from ep_kernels import EpError

EXIT_BROKEN = 1
EXIT_DRAINED, EXIT_BAD_CONFIG, EXIT_NOT_JOINED, EXIT_DEVICE_LOST, EXIT_UNFIT = 0, 2, 3, 4, 5
JOIN_TIMEOUT_S = 120.0
"""Time limit of the control plane's first answer; then the worker exits, so that a supervisor shows the problem."""
_FLUSH_S = 3.0
"""Time for clients to read the last answers after this worker has left."""
_STOP_GRACE_S = 1.0
_MAX_CALLS = 1024
"""Concurrent streams and other calls; one peer gets a quarter."""

_log = log.get(__name__)


def run_worker(config: WorkerConfig) -> int:
    """Serve until drained; returns the exit code. Blocks."""
    # The process itself: log, descriptors, threads, memory.
    identity = Identity.from_env()
    log.setup(config.log, host=identity.hostname, local_rank=config.local_rank)
    descriptors.raise_limit()
    torch.set_num_threads(config.torch_threads or 1)  # threads of threads.py take it from here
    bound_freed_memory()
    # The model, before anything listens.
    try:
        security = security_of(config.security)
        tracer = tracer_of(config.tracing, "crossdock-worker", _uid_of(config, identity))
        model = Model(config, Checkpoint.open(config.model))
    except (CheckpointError, EpError) as error:
        _log.error("cannot serve this model", error=str(error))
        return EXIT_BAD_CONFIG
    except SecurityError as error:
        _log.error("cannot use certificates or tokens", error=str(error))
        return EXIT_BAD_CONFIG
    except TracingError as error:
        _log.error("cannot export traces", error=str(error))
        return EXIT_BAD_CONFIG
    except DeviceLost as error:
        _log.error("cannot use the device", error=str(error))
        return EXIT_DEVICE_LOST
    # Serve until told to stop; each error is an exit status.
    try:
        metrics = WorkerMetrics()
        with grpc_core_log(metrics.grpc_core_log_lines_total):
            return asyncio.run(_Process(config, identity, model, security, tracer, metrics).run())
    except ListenError as error:
        _log.error("cannot listen", error=str(error))
        return EXIT_BAD_CONFIG
    except CheckpointError as error:
        _log.error("cannot load the experts", error=str(error))
        return EXIT_BAD_CONFIG
    except DeviceLost as error:
        _log.error("the device was lost", error=str(error))
        return EXIT_DEVICE_LOST
    finally:
        model.close()


def end_process(code: int) -> NoReturn:
    """End this process at once. An orderly end of the interpreter aborts where another thread is in torch, as while
    experts load, and would free what a lost GPU holds, which can crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(code)


class _Process:
    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        model: Model,
        security: Security | None,
        tracer: Tracer | None,
        metrics: WorkerMetrics,
    ) -> None:
        self._config, self._identity, self._model, self._security = config, identity, model, security
        self._tracer, self._metrics = tracer, metrics
        self._telemetry = WorkerTelemetry(self._metrics, model.row_bytes, config.transport)
        self._engine = Engine(config.max_tokens_per_step, self._telemetry, model.device)
        self._budget = Budget(config.max_queued_bytes_per_client, config.max_queued_bytes)
        self._metrics.queued_requests.set_function(self._engine.num_queued)
        self._metrics.queued_bytes.set_function(lambda: self._budget.num_bytes)
        self._metrics.device_memory_used_bytes.set_function(lambda: used_bytes(model.device))
        self._metrics.transport_peak_bytes_per_second.set(peak_bytes_per_s(model.device))
        self._metrics.max_tokens_per_step.set(config.max_tokens_per_step)
        self._health = rpc.Health([SERVICE_NAME])
        self._status = WorkerStatus(self._metrics, self._health.set)
        self._spare: Callable[[], str] = lambda: ""
        self._mover: ExpertMover | None = None
        timeout_s, gave = config.peer_weights_timeout_s, self._metrics.expert_given_bytes_total.inc
        self._giver = WeightGiver(model, timeout_s, gave) if timeout_s else None

    def _read_from_peers(self, own: str) -> None:
        """Have the model ask other workers before the disk, and count. own: name of this worker's UNIX socket."""
        metrics, timeout_s = self._metrics, self._config.peer_weights_timeout_s

        def failed(reason: str) -> None:
            metrics.expert_holder_failures_total.labels(reason=reason).inc()

        def count(source: str, num_bytes: int, seconds: float) -> None:
            metrics.expert_read_bytes_total.labels(source=source).inc(num_bytes)
            metrics.expert_read_seconds_total.labels(source=source).inc(seconds)

        self._model.count_read = count
        if timeout_s:
            self._model.peers = Peers(own, self._security, timeout_s, failed)

    async def run(self) -> int:
        """From listening to the exit code. Raises ListenError, CheckpointError, DeviceLost."""
        # Listen: gRPC first, then the pages.
        self._metrics.count_tasks(asyncio.get_running_loop())
        server, address = await self._listen()
        try:
            self._liveness = Liveness(lagged=self._metrics.event_loop_lag_seconds.observe)
            page, trouble = page_of(self._metrics.registry, self._config.group), self._liveness.trouble
            http = serve_http(self._config.http_listen, page, self._ready, self._security, trouble)
        except ListenError:
            await server.stop(0)
            raise
        await server.start()
        # The parts of the life: control client, mover of experts, session.
        registration = self._registration(address, http)
        self._control = ControlPlaneClient(
            self._config.control, registration, self._stats, self._security, self._expert_report
        )
        self._spare = lambda: f"spare: {self._control.trouble}" if self._control.spare else ""
        self._mover = mover = ExpertMover(self._control, self._model, self._engine, self._telemetry)
        self._session = Session(self._control, self._model, self._engine, self._status, self._telemetry, mover)
        # Signals and drains end it.
        self._stop = asyncio.Event()
        _handle_signals(self._stop)
        self._control.on_drain = self._stop.set
        # Tell supervisor and people where.
        announce(address, http.address, https=http.https)
        where = {"model": self._model.spec.family, "device": str(self._model.device)}
        _log.info("listening", address=address, http=http.address, **where)
        warn_of_plain_text(address, self._security)
        if self._config.network is not None and self._security is not None:
            words = "data port is neither encrypted nor authenticated, with TLS too"
            _log.warning(words, listen=self._config.network.listen)
        # Live, and close in any case.
        try:
            return await self._live()
        finally:
            await self._shut_down(server, http)

    async def _live(self) -> int:
        # What can end the process, whichever comes first.
        self._control.start()
        life = asyncio.create_task(self._session.run())
        stop = asyncio.create_task(self._stop.wait())
        joined = asyncio.create_task(asyncio.wait_for(self._control.wait_first_answer(), JOIN_TIMEOUT_S))
        line = asyncio.create_task(self._control.supervise())
        try:
            await asyncio.wait({life, stop, joined, line}, return_when=asyncio.FIRST_COMPLETED)
            # Joined: only drain, end or a broken task are left.
            if joined.done() and not life.done() and not stop.done():
                joined.result()
                await asyncio.wait({life, stop, line}, return_when=asyncio.FIRST_COMPLETED)
            if line.done() and not stop.done():
                return _broken(line)
            # Asked to stop: drain, then end the session.
            if not life.done():
                await self._session.drain(self._config.drain_timeout_s)
                life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life
        except TimeoutError:
            _log.error(
                "could not join", control=self._config.control, why=self._control.trouble, waited_s=JOIN_TIMEOUT_S
            )
            return EXIT_NOT_JOINED
        except JoinRefused as error:
            _log.error("refused by the group", error=str(error))
            return EXIT_UNFIT if error.permanent else EXIT_NOT_JOINED
        finally:
            await end_tasks(life, stop, joined, line)
        return EXIT_DRAINED

    def _ready(self) -> tuple[bool, str]:
        is_ready, text = self._status.ready()
        return is_ready, text if self._status.is_serving else self._spare() or text

    async def _listen(self) -> tuple[grpc.aio.Server, str]:
        limits = CallLimits.of(self._config.max_message_bytes, _MAX_CALLS)
        authorizer = authorizer_of(self._security, self._config.max_calls_per_s, self._metrics, limits)
        server = await rpc.server(
            self._config.max_message_bytes, self._health, observe=self._metrics.observe_rpc, authorizer=authorizer
        )
        # The service: gRPC streams and request connections, over one backend.
        backend = Backend(
            self._config,
            RequestValidator(self._model.spec, self._model.dtype),
            self._engine,
            self._telemetry,
            self._budget,
            RateLimiter(self._config.max_requests_per_s),
            self._tracer,
        )
        giver = self._giver
        requests = RequestServer(backend, self._security, authorizer, giver.give if giver is not None else None)
        requests.listen()
        self._read_from_peers(requests.holder.socket)
        self._service = ExpertService(backend, requests, self._describe, self._drain)
        self._metrics.open_streams.set_function(lambda: self._service.num_streams)
        self._metrics.open_request_connections.set_function(lambda: len(requests))
        expert_pb2_grpc.add_ExpertServiceServicer_to_server(self._service, server)
        return server, rpc.bind(server, self._config.listen, self._security)

    async def _shut_down(self, server: grpc.aio.Server, http: HttpServer) -> None:
        self._status.close()
        self._health.shut_down()
        await self._control.leave("drained" if self._stop.is_set() else "stopping")
        await self._control.close()
        if self._giver is not None:
            self._giver.close()
        await self._service.end(Unavailable("this worker has left the group"), _FLUSH_S)
        await server.stop(_STOP_GRACE_S)
        http.close()
        self._liveness.close()
        self._telemetry.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        _log.info("stopped")

    async def _drain(self) -> None:
        self._stop.set()
        await self._session.wait_left()

    def _registration(self, address: str, http: HttpServer) -> control_pb2.RegisterRequest:
        config, identity = self._config, self._identity
        host = host_facts(identity.hostname)
        outside = config.advertise or seen_from_outside(address, "", identity.hostname)
        return control_pb2.RegisterRequest(
            worker=control_pb2.WorkerId(uid=_uid_of(config, identity), incarnation=time.time_ns()),
            host=host,
            local_rank=config.local_rank,
            gpu_uuid=uuid_of(self._model.device),
            address=outside,
            http_address=seen_from_outside(http.address, config.advertise, identity.hostname),
            https=http.https,
            transport=config.transport,
            network=announced(config.network, outside, host.boot_id, self._model.nic, self._model.boxes),
            abi=self._model.capabilities.abi,
            model=self._model.spec.fingerprint,
            num_experts=self._model.spec.num_experts,
            moe_layers=self._model.spec.moe_layers,
            communicator=[
                control_pb2.CommunicatorSetting(name=name, value=value)
                for name, value in {**self._model.communicator_settings(), "weights": KIND}.items()
            ],
            holder=self._service.requests.holder if self._giver is not None else None,
        )

    def _stats(self) -> control_pb2.WorkerStats:
        stats = self._telemetry.stats(self._engine.num_queued())
        stats.streams, stats.request_connections = self._service.num_streams, len(self._service.requests)
        stats.weights = self._session.comparison.weights(self._mover.version if self._mover else None)
        for fingerprint, layers in self._fingerprints().items():
            stats.models.add(fingerprint=fingerprint, layers=layers)
        return stats

    def _fingerprints(self) -> dict[str, int]:
        """Number of layers by the fingerprint of their checkpoint."""
        spec = self._model.spec
        return self._mover.fingerprints() if self._mover else {spec.fingerprint: len(spec.moe_layers)}

    def _expert_report(self) -> control_pb2.ExpertReport | None:
        return self._mover.report() if self._mover else None

    def _describe(self) -> expert_pb2.DescribeResponse:
        spec, seat = self._model.spec, self._status.seat
        return expert_pb2.DescribeResponse(
            model=max((models := self._fingerprints()), key=models.__getitem__),
            family=spec.family,
            num_layers=spec.num_layers,
            moe_layers=spec.moe_layers,
            num_experts=spec.num_experts,
            hidden_size=spec.hidden_size,
            topk=spec.topk,
            dtype=NAMES[self._model.dtype],
            max_tokens_per_step=self._config.max_tokens_per_step,
            epoch=seat.epoch if seat else 0,
            rank=seat.rank if seat else 0,
            world_size=seat.size if seat else 0,
            serving=self._status.ready()[0],
            formats=[format.kind for format in self._model.formats],
        )


def _uid_of(config: WorkerConfig, identity: Identity) -> str:
    return config.uid or f"{identity.pod_name or identity.hostname}/{config.local_rank}"


def _broken(line: asyncio.Task[None]) -> int:
    """Log why an essential task has ended."""
    try:
        line.result()
    except Exception:
        _log.exception("the client of the control plane ended; this is a bug")
    return EXIT_BROKEN


def _handle_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT, or the end of the terminal, drains; the second ends the process at once."""

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    at_hangup(lambda: loop.call_soon_threadsafe(stop.set))
