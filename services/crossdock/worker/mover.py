"""Moves experts while the group serves: hears of a newer placement, loads what this rank lacks, beside the steps."""

from __future__ import annotations

import asyncio

from crossdock.common import log, rpc
from crossdock.common.tasks import watched
from crossdock.v1 import control_pb2
from crossdock.worker.engine import Engine
from crossdock.worker.holdings import Holdings, MoveEnded, Task
from crossdock.worker.link import Link
from crossdock.worker.model import Model
from crossdock.worker.placement import Placement, PlacementError
from crossdock.worker.seat import Seat
from crossdock.worker.telemetry import Telemetry
from crossdock.worker.threads import in_thread

_log = log.get(__name__)

_RETRY_S = 1.0


class Mover:
    """See the module's head. Make and use it on the event loop.

    Args:
        link: to the control plane.
        model: whose experts are loaded.
        engine: told when there is something to agree on.
        telemetry: asked how many rows each expert computed.
    """

    def __init__(self, link: Link, model: Model, engine: Engine, telemetry: Telemetry) -> None:
        self._link, self._model, self._engine, self._telemetry = link, model, engine, telemetry
        self._holdings: Holdings | None = None
        self._loader: asyncio.Future[None] | None = None

    async def fetch(self, seat: Seat) -> Placement:
        """The newest placement of an epoch. Raises rpc.CallError (FailedPrecondition: the epoch is over), or
        PlacementError: it does not fit the model."""
        spec = self._model.spec
        if not self._link.view.placement:
            return Placement.blocks(spec.num_experts, seat.size, spec.moe_layers)
        message = await self._link.placement(seat.epoch)
        return Placement.parse(message, spec.num_experts, seat.size, spec.moe_layers)

    async def run(self, seat: Seat, holdings: Holdings) -> None:
        """Follow newer placements until cancelled. It ends at once: a file system that hangs in the middle of a move
        must not keep the group from forming anew. What is still being read then is dropped, and the moves of a later
        epoch begin when it has ended, so there is one loader at most."""
        self._holdings = holdings
        try:
            if self._loader is not None and not self._loader.done():
                _log.warning("experts of a former epoch are still being read; no move begins before that ends")
                await asyncio.wait([self._loader])
            self._loader = in_thread("mover", self._load, holdings)
            watched(self._loader, "the loader of experts")
            while True:
                await self._link.wait(lambda view: view.epoch == seat.epoch and view.placement > holdings.version)
                await self._aim(seat, holdings)
        finally:
            self._holdings = None
            holdings.close()

    def report(self) -> control_pb2.ExpertReport | None:
        """What the next heartbeat says of the experts; None while this rank serves none."""
        holdings = self._holdings
        if holdings is None:
            return None
        report, rows = holdings.report(), self._telemetry.take_rows()
        for layer, held in zip(self._model.spec.moe_layers, report.layers, strict=True):
            counts = [rows.get((layer, expert), 0) for expert in held.experts]
            if any(counts):
                held.rows.extend(counts)
        return report

    async def _aim(self, seat: Seat, holdings: Holdings) -> None:
        try:
            placement = await self.fetch(seat)
            if placement.version > holdings.version:
                holdings.aim(placement)
        except (rpc.CallError, PlacementError) as error:
            _log.warning("no newer placement", error=error, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)
        self._engine.nudge()

    def _load(self, holdings: Holdings) -> None:
        """The loader's thread: one layer after the other, each when all ranks have switched the one before."""
        while True:
            try:
                task = holdings.task()
            except MoveEnded:
                return
            try:
                self._load_layer(holdings, task)
            except MoveEnded:
                continue
            except Exception as error:  # whatever it is, the others must hear of it: they wait for this rank
                _log.exception("cannot load experts", layer=task.layer)
                holdings.fail(task, f"layer {task.layer}: {type(error).__name__}: {error}")
            self._engine.nudge()

    def _load_layer(self, holdings: Holdings, task: Task) -> None:
        holdings.offer(task, self._model.stage(task.layer, task.ids, lambda done, total: holdings.check(task)))
