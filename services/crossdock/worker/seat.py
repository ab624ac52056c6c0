"""A seat in one epoch of the group: rank, size, and the bootstrap over the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.common import rpc
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.control_client import JoinRefused, Link, View
from ep_kernels import TransportError


@dataclass(frozen=True, slots=True)
class Seat:
    """Who this worker is in one epoch. `active`: the ranks that go on without the others, with the communicator that
    they have; None: all ranks, with a new one."""

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

    It gathers once per epoch, which is what a communicator asks for that is given `ll_max_tokens`. Used from a thread
    beside the event loop.
    """

    def __init__(self, seat: Seat, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self._seat, self._link, self._loop = seat, link, loop

    @property
    def rank(self) -> int:
        """This rank."""
        return self._seat.rank

    @property
    def size(self) -> int:
        """Rank slots R."""
        return self._seat.size

    @property
    def epoch(self) -> int:
        """Membership counter, owned by the control plane."""
        return self._seat.epoch

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `ep_kernels.Group`. `timeout_s` is not used: peers may be loading weights, and the control plane ends an
        epoch that takes too long. Raises TransportError when the epoch is over."""
        return asyncio.run_coroutine_threadsafe(self._gather(payload), self._loop).result()

    async def _gather(self, payload: bytes) -> Sequence[bytes]:
        epoch = self._seat.epoch
        try:
            await self._link.publish(epoch, self._seat.rank, payload)
            regions = await self._link.table(epoch)
        except (rpc.CallError, JoinRefused) as error:
            raise TransportError(f"bring-up of epoch {epoch}: {error}") from error
        if regions is None:
            view = self._link.view
            raise TransportError(f"bring-up of epoch {epoch}: superseded by epoch {view.epoch}: {view.reason}")
        return regions


def seat_in(view: View, link: Link) -> Seat | None:
    """This worker's seat if a group that it is to take part in is forming in `view`, else None."""
    me = link.me(view)
    if me is None or view.state != control_pb2.EXCHANGING or is_standby(view, link):
        return None
    active = frozenset(view.active_ranks) or None
    return Seat(view.epoch, me.rank, view.world_size, active)


def is_standby(view: View, link: Link) -> bool:
    """Whether this worker has a rank in a group that goes on without it for now."""
    me = link.me(view)
    return me is not None and bool(view.active_ranks) and me.rank not in view.active_ranks
