"""A seat in one epoch of the group: rank, size, and the bootstrap over the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from crossdock.common.call_errors import CallError
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.group.control_client import ControlPlaneClient, JoinRefused, View
from crossdock.worker.group.same_weights import Parcel
from ep_kernels import TransportError


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank of this worker in one epoch. `active`: the remaining ranks, which keep their communicator; None: all ranks,
    with a new communicator."""

    epoch: int
    rank: int
    size: int
    active: frozenset[int] | None = None

    @property
    def mask(self) -> tuple[bool, ...]:
        """By rank: whether it takes part."""
        return tuple(self.active is None or rank in self.active for rank in range(self.size))


class ControlGroup:
    """A `Group` whose all_gather is PublishRegion, then the table of regions in the next views.

    It gathers once per epoch, which suffices for a communicator with `ll_max_tokens` set. Used outside of the event
    loop's thread.

    Args:
        pack: of a region, what this rank publishes with it.

    Attributes:
        rank, size, epoch: of the seat.
        parcels: of all ranks, once they are gathered.
    """

    def __init__(
        self,
        seat: Seat,
        control: ControlPlaneClient,
        loop: asyncio.AbstractEventLoop,
        pack: Callable[[bytes], Parcel],
    ) -> None:
        self.rank, self.size, self.epoch = seat.rank, seat.size, seat.epoch
        self._control, self._loop, self._pack = control, loop, pack
        self.parcels: list[Parcel] = []

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `ep_kernels.Group`. `timeout_s` is ignored: peers may be loading weights, and the control plane ends an
        epoch that takes too long. Raises TransportError when the epoch is over."""
        return asyncio.run_coroutine_threadsafe(self._gather(payload), self._loop).result()

    async def _gather(self, payload: bytes) -> Sequence[bytes]:
        epoch = self.epoch
        try:
            packed = msgspec.msgpack.encode(self._pack(payload))
            await self._control.publish_region(epoch, self.rank, packed)
            regions = await self._control.region_table(epoch)
        except (CallError, JoinRefused) as error:
            raise TransportError(f"bring-up of epoch {epoch}: {error}") from error
        if regions is None:
            view = self._control.view
            raise TransportError(f"bring-up of epoch {epoch}: superseded by epoch {view.epoch}: {view.reason}")
        try:
            self.parcels = [msgspec.msgpack.decode(region, type=Parcel) for region in regions]
        except msgspec.DecodeError as error:
            raise TransportError(f"bring-up of epoch {epoch}: a region of another version: {error}") from error
        return [parcel.region for parcel in self.parcels]


def seat_in(view: View, control: ControlPlaneClient) -> Seat | None:
    """This worker's seat if `view` shows a forming group that includes it, else None."""
    own_member = control.own_member(view)
    if own_member is None or view.state != control_pb2.EXCHANGING or is_standby(view, control):
        return None
    active = frozenset(view.active_ranks) or None
    return Seat(view.epoch, own_member.rank, view.world_size, active)


def is_standby(view: View, control: ControlPlaneClient) -> bool:
    """Whether this worker has a rank in a group that serves without it for now."""
    own_member = control.own_member(view)
    if own_member is None:
        return False
    return own_member.rank >= view.world_size or (bool(view.active_ranks) and own_member.rank not in view.active_ranks)
