"""How many calls a server holds open, and for whom: each peer and each connection has a share, nobody has all.

A peer is a host together with the names of its certificate. In plain text all processes of a host are one peer, and
whatever one of them does, the others must still get in. So where no place is left, a call of the connection that holds
most gives its place to the new one, or else a call that has sent and received nothing for `IDLE_S`. Only where all
others are busy is the new call refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from crossdock.common.call_errors import ResourceExhausted

IDLE_S = 1.0
UNFINISHED_BYTES_OF_PEER = 48 << 20
MIN_READING_OF_PEER = 12
"""A host of eight engines, and what looks after it."""
_WAIT_S, _LOOK_S = 2 * IDLE_S, 0.02
"""Longest wait for a place to read a request, and how often to look."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of one server.

    Attributes:
        calls: open at once.
        calls_of_peer: open at once for one peer.
        reading: of those, calls of which a message may be under way: each can hold one message of the largest size.
        reading_of_peer: the same for one peer.
    """

    calls: int
    calls_of_peer: int
    reading: int
    reading_of_peer: int

    @staticmethod
    def of(max_message_bytes: int, calls: int) -> CallLimits:
        """A quarter of everything for one peer, and no more unfinished messages than fit UNFINISHED_BYTES_OF_PEER."""
        reading = max(MIN_READING_OF_PEER, min(calls // 4, UNFINISHED_BYTES_OF_PEER // max_message_bytes))
        return CallLimits(calls, max(1, calls // 4), 4 * reading, reading)


@dataclass(slots=True, eq=False)
class Place:
    """Of one call.

    Attributes:
        peer: whose it is.
        connection: by which it came.
        end: ends the call when another one takes its place.
        at: when anything was sent or received last.
        kept: no other call may take it.
        lost: another call has taken it.
    """

    peer: Hashable
    connection: str
    end: Callable[[], None]
    at: float
    kept: bool = False
    lost: bool = False


class Places:
    """See the module's head.

    Args:
        most: of all peers together.
        most_of_peer: of each.
        clock: monotonic seconds.
    """

    def __init__(self, most: int, most_of_peer: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.most_of_peer, self._clock = most, most_of_peer, clock
        self._peers: dict[Hashable, dict[Place, None]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def take(self, peer: Hashable, connection: str, end: Callable[[], None]) -> Place | None:
        """A place, which another call may have had to give up; None: there is none."""
        own = self._peers.get(peer, {})
        if len(own) >= self.most_of_peer or self._num >= self.most:
            loser = self._loser(self._crowd(own), connection)
            if loser is None:
                return None
            self.leave(loser)
            loser.lost = True
            loser.end()
        place = Place(peer, connection, end, self._clock())
        self._peers.setdefault(peer, {})[place] = None
        self._num += 1
        return place

    def leave(self, place: Place) -> None:
        """Give it back. Idempotent."""
        own = self._peers.get(place.peer, {})
        if place in own:
            del own[place]
            self._num -= 1
            if not own:
                del self._peers[place.peer]

    def progress(self, place: Place) -> None:
        """Something was sent or received."""
        place.at = self._clock()

    def _crowd(self, own: dict[Place, None]) -> dict[Place, None]:
        """Among whom one may have to go: the peer's own calls, or those of the peer that has most."""
        if len(own) >= self.most_of_peer:
            return own
        most = max(self._peers.values(), key=len)
        return most if len(most) > len(own) else own

    def _loser(self, crowd: dict[Place, None], connection: str) -> Place | None:
        held = Counter(place.connection for place in crowd)
        movable = [place for place in crowd if not place.kept]
        if not movable:
            return None
        loser = max(movable, key=lambda place: (held[place.connection], -place.at))
        if held[loser.connection] > held[connection] + 1:
            return loser
        loser = min(movable, key=lambda place: place.at)
        return loser if self._clock() - loser.at >= IDLE_S else None


class NoPlace(ResourceExhausted):
    """All places are taken, by calls that are busy."""


class Visit:
    """The places of one call. Made in the call's task, which is cancelled when another call takes one of them.

    Args:
        open_places: for the call as a whole.
        reading: for its request, while that comes.
        peer: whose call it is.
        connection: by which it came.

    Raises:
        NoPlace: too many calls are open.
    """

    def __init__(self, open_places: Places, reading: Places, peer: Hashable, connection: str) -> None:
        self._task = asyncio.current_task()
        self._peer, self._connection = peer, connection
        self._places: dict[Places, Place] = {}
        self._open, self._reading = open_places, reading
        if not self._take(open_places):
            most = open_places.most_of_peer
            raise NoPlace(f"calls: expected at most {most} open at once of one caller, got one more")

    @property
    def lost(self) -> bool:
        """Whether another call has one of its places: this one must end."""
        return any(place.lost for place in self._places.values())

    async def read(self) -> None:
        """Wait until the request may be read. Raises NoPlace."""
        last_at = time.monotonic() + _WAIT_S
        while not self._take(self._reading):
            if time.monotonic() > last_at:
                most = self._reading.most_of_peer
                raise NoPlace(f"calls: expected at most {most} requests under way at once of one caller, got one more")
            await asyncio.sleep(_LOOK_S)

    def has_read(self) -> None:
        """No more of the request will come."""
        self._leave(self._reading)

    def progress(self) -> None:
        """Something was sent or received."""
        for places, place in self._places.items():
            places.progress(place)

    def keep(self) -> None:
        """No other call may take the place of this one."""
        self._places[self._open].kept = True

    def leave(self) -> None:
        """The call is over. Idempotent."""
        self._leave(self._reading)
        self._leave(self._open)

    def _take(self, places: Places) -> bool:
        place = places.take(self._peer, self._connection, self._end)
        if place is not None:
            self._places[places] = place
        return place is not None

    def _leave(self, places: Places) -> None:
        place = self._places.get(places)
        if place is not None:
            places.leave(place)

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
