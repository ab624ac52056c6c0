"""Moves experts while the group serves: follows placements and loads missing experts concurrently with steps."""

from __future__ import annotations

import asyncio
from collections import Counter

from crossdock.common import log
from crossdock.common.call_errors import CallError
from crossdock.common.tasks import log_failure
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.experts.expert_tables import ExpertTables, LoadTask, MoveCancelled
from crossdock.worker.experts.placement import Placement, PlacementError
from crossdock.worker.group.control_client import ControlPlaneClient, View
from crossdock.worker.group.model import Model
from crossdock.worker.group.seat import Seat
from crossdock.worker.group.threads import in_thread
from crossdock.worker.steps.engine import Engine
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry

_log = log.get(__name__)

_RETRY_S = 1.0


class ExpertMover:
    """Expert mover of one worker. Make and use it on the event loop.

    Args:
        engine: woken when a placement change can be agreed.
        telemetry: rows computed by each expert.
    """

    def __init__(self, control: ControlPlaneClient, model: Model, engine: Engine, telemetry: WorkerTelemetry) -> None:
        self._control, self._model, self._engine, self._telemetry = control, model, engine, telemetry
        self._tables: ExpertTables | None = None
        self._loader: asyncio.Future[None] | None = None

    async def fetch(self, seat: Seat) -> Placement:
        """Fetch the placement of an epoch. Raises CallError (FailedPrecondition: the epoch is over), or
        PlacementError: it does not fit the model."""
        spec = self._model.spec
        if not self._control.view.placement:
            return Placement.blocks(spec.num_experts, seat.size, spec.moe_layers)
        message = await self._control.placement(seat.epoch)
        return Placement.parse(message, spec.num_experts, seat.size, spec.moe_layers)

    async def fetch_next(self, view: View) -> tuple[Placement, int] | None:
        """Fetch the placement of the epoch that is planned after that of `view`, and this worker's rank in it; None: it
        is not among its members. Raises as `fetch`."""
        spec, message = self._model.spec, await self._control.placement(view.epoch, of_next=True)
        if not message.layers:
            return None
        return Placement.parse(message, spec.num_experts, message.world_size, spec.moe_layers), message.rank

    async def run(self, seat: Seat, tables: ExpertTables) -> None:
        """Follow newer placements until cancelled. Cancellation takes effect at once, since a hanging file system must
        not keep the group from re-forming. Weights still being read are dropped, and moves of a later epoch begin after
        that read, so there is at most one loader."""
        self._tables = tables
        try:
            if self._loader is not None and not self._loader.done():
                _log.warning("experts of a former epoch are still being read; no move begins before that ends")
                await asyncio.wait([self._loader])
            self._loader = in_thread("mover", self._load, tables)
            log_failure(self._loader, "the expert loader")
            while True:
                await self._control.wait(lambda view: view.epoch == seat.epoch and view.placement > tables.version)
                await self._set_target(seat, tables)
        finally:
            self._tables = None
            tables.close()

    def report(self) -> control_pb2.ExpertReport | None:
        """Expert report of the next heartbeat; None while this rank does not serve."""
        tables = self._tables
        if tables is None:
            return None
        report, rows = tables.report(), self._telemetry.take_rows()
        for layer, held in zip(self._model.spec.moe_layers, report.layers, strict=True):
            counts = [rows.get((layer, expert), 0) for expert in held.experts]
            if any(counts):
                held.rows.extend(counts)
        return report

    @property
    def version(self) -> int | None:
        """Of the placement that this rank follows; None while it does not serve."""
        return self._tables.version if self._tables is not None else None

    def fingerprints(self) -> dict[str, int]:
        """Number of layers by the fingerprint of their checkpoint; while this rank does not serve, of what it loaded
        at its start."""
        spec, tables = self._model.spec, self._tables
        weights = tables.weights() if tables is not None else ()
        found = Counter(each.fingerprint or spec.fingerprint for each in weights)
        return dict(found) or {spec.fingerprint: len(spec.moe_layers)}

    async def _set_target(self, seat: Seat, tables: ExpertTables) -> None:
        try:
            placement = await self.fetch(seat)
            if placement.version > tables.version:
                tables.set_target(placement)
        except (CallError, PlacementError) as error:
            _log.warning("cannot fetch placement", error=error, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
        self._engine.wake()

    def _load(self, tables: ExpertTables) -> None:
        """The loader's thread: one layer at a time, each after all ranks have switched the previous one."""
        while True:
            try:
                task = tables.next_task()
            except MoveCancelled:
                return
            try:
                self._load_layer(tables, task)
            except MoveCancelled:
                continue
            except Exception as error:  # must be reported: the other ranks wait for this one
                _log.exception("cannot load experts", layer=task.layer)
                tables.fail(task, f"layer {task.layer}: {type(error).__name__}: {error}")
            self._engine.wake()

    def _load_layer(self, tables: ExpertTables, task: LoadTask) -> None:
        def check(done_bytes: int, total_bytes: int) -> None:
            tables.check(task)

        weights = self._model.stage(task.layer, task.ids, check, task.weights, task.holders)
        tables.stage(task, weights)
