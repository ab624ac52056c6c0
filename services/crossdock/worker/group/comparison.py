"""Compares the weights of all ranks, with the sums of same_weights.py."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from crossdock.common import log
from crossdock.worker.checkpoints.checkpoint import CheckpointError
from crossdock.worker.experts.placement import Placement
from crossdock.worker.group.control_client import JoinRefused
from crossdock.worker.group.model import Model
from crossdock.worker.group.same_weights import Parcel, differences
from crossdock.worker.group.seat import Seat
from crossdock.worker.group.threads import in_thread
from crossdock.worker.steps.work import Fault
from ep_kernels import TransportError

_log = log.get(__name__)


class WeightsComparison:
    """Of one worker, over all its epochs. Make and use it on the event loop.

    Args:
        model: gives the sums.
        report: called with an epoch and why it must end.
    """

    def __init__(self, model: Model, report: Callable[[int, Fault], None]) -> None:
        self._model, self._report = model, report
        self._gathered: tuple[Placement, list[Parcel]] | None = None
        self._reading: asyncio.Future[tuple[list[int], int]] | None = None
        self._weights = ""

    def weights(self, version: int | None) -> str:
        """Of rank 0: digest of every byte of the group's experts, once all ranks were compared with its files. Empty if
        the placement that they follow has another version: then not all that they hold was compared."""
        compared = self._gathered is not None and self._gathered[0].version == version
        return self._weights if compared else ""

    def packing(self, placement: Placement, rank: int) -> Callable[[bytes], Parcel]:
        """What makes a parcel of this rank's region. Blocks: not on the event loop."""
        expected = self._model.read_all(placement)[0] if rank == 0 and self._model.is_read(placement) else []
        return functools.partial(Parcel, sum=self._model.sum(placement, rank), expected=expected)

    def take(self, seat: Seat, placement: Placement, parcels: list[Parcel]) -> None:
        """Compare what all ranks have published. Raises JoinRefused: this rank's weights are not those of rank 0;
        TransportError: another rank's are not."""
        self._gathered, self._weights = (placement, parcels), ""
        wrong = differences(parcels[0].expected, parcels)
        if seat.rank in wrong:
            raise JoinRefused(wrong[seat.rank])
        if wrong:
            raise TransportError(next(iter(wrong.values())))

    async def run(self, seat: Seat) -> None:
        """Of rank 0, while it serves: read all of the checkpoint, and report a rank that has other weights. A read that
        outlasts the epoch goes on; there is one at a time."""
        if seat.rank or self._gathered is None:
            return
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])
        placement, parcels = self._gathered
        self._reading = in_thread("whole checkpoint", self._model.read_all, placement)
        await asyncio.wait([self._reading])
        try:
            expected, whole = self._reading.result()
        except CheckpointError as error:
            _log.warning("cannot compare the weights of all ranks", error=error)
            return
        there = [words for rank, words in differences(expected, parcels).items() if seat.mask[rank]]
        if there:
            self._report(seat.epoch, Fault(there[0]))
            return
        self._weights = f"{whole:016x}"
        _log.info("all ranks have the weights of this checkpoint", weights=self._weights)
