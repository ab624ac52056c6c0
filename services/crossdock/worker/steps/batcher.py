"""Batching: which requests share the next step. Pure: no clock, no lock, no thread, no tensor read.

A step carries one layer. Clients take turns: the client that has waited longest for its turn names the layer (the one
of its oldest request), and the other clients' requests for that layer are added, one request per client and round,
until the step is full. A turn is used only when a client's *oldest* request is served, so added requests cost no turn,
and a client with many layers in flight cannot starve its own oldest request. A request longer than a step is cut, and
so is one for which a step has too little room, unless the step is to serve requests as a whole.

The streams of one client take turns among themselves in the same way: more streams give a client no more turns, and
its own streams do not starve each other.

A request that comes while nothing waits is kept apart from the queues until another one comes: as a rule it is taken
before that.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from crossdock.worker.steps.work import Slice, Work

_NEVER_NS = 1 << 63


class Head(NamedTuple):
    """Preferred next layer of this rank.

    Attributes:
        layer: layer of the oldest request of the client whose turn it is.
        waited_ns: how long that client has waited for its turn; comparable between hosts, since it is a duration.
        num_tokens: tokens queued here for that layer, of all clients.
    """

    layer: int
    waited_ns: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Queue:
    """Queue of one stream: requests by layer, oldest first. `turn_ns`: when its oldest request was last served."""

    works: dict[Work, None] = field(default_factory=dict)
    by_layer: dict[int, dict[Work, None]] = field(default_factory=dict)
    turn_ns: int = 0

    def oldest(self) -> Work:
        return next(iter(self.works))

    def waiting_since_ns(self) -> int:
        return max(self.turn_ns, self.oldest().arrived_ns)

    def first(self, layer: int) -> Work:
        """The oldest for a layer; no other one of them has been cut."""
        return next(iter(self.by_layer[layer]))

    def add(self, work: Work) -> None:
        self.works[work] = None
        self.by_layer.setdefault(work.layer, {})[work] = None

    def remove(self, work: Work) -> None:
        del self.works[work]
        same_layer = self.by_layer[work.layer]
        del same_layer[work]
        if not same_layer:
            del self.by_layer[work.layer]


@dataclass(slots=True, eq=False)
class _Client:
    """Queues of one client's streams. `turn_ns`: when its oldest request was last served."""

    queues: dict[Hashable, _Queue] = field(default_factory=dict)
    turn_ns: int = 0

    def longest(self) -> _Queue:
        """The stream whose turn it is within this client."""
        return _longest(self.queues.values())

    def longest_for(self, layer: int) -> _Queue | None:
        """The same, of those with requests for a layer; None: there is none."""
        queues = [queue for queue in self.queues.values() if layer in queue.by_layer]
        return _longest(queues) if queues else None

    def waiting_since_ns(self) -> int:
        return max(self.turn_ns, self.longest().waiting_since_ns())

    def works(self) -> list[Work]:
        return [work for queue in self.queues.values() for work in queue.works]


T = TypeVar("T", _Queue, _Client)


def _longest(waiting: Collection[T]) -> T:
    """Which has waited longest, of one or more; as a rule there is one."""
    return min(waiting, key=lambda each: each.waiting_since_ns()) if len(waiting) > 1 else next(iter(waiting))


def _is_cut_by(room: int, work: Work) -> bool:
    """Whether a step with that room would be the first of several that serve this request."""
    return not work.num_taken and work.num_tokens > room


class Batcher:
    """The queue of one rank. Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._lone: Work | None = None
        self._clients: dict[Hashable, _Client] = {}
        self._tokens: dict[int, int] = {}
        self._no_deadline_before_ns = _NEVER_NS

    def __len__(self) -> int:
        queued = sum(len(queue.works) for client in self._clients.values() for queue in client.queues.values())
        return queued + (self._lone is not None)

    def __bool__(self) -> bool:
        return self._lone is not None or bool(self._clients)

    def add(self, work: Work) -> None:
        """Queue a request of at least one token."""
        self._no_deadline_before_ns = min(self._no_deadline_before_ns, work.deadline_ns)
        if self._lone is None and not self._clients:
            self._lone = work
        else:
            self._queue_lone()
            self._queue(work)

    def _queue_lone(self) -> None:
        work, self._lone = self._lone, None
        if work is not None:
            self._queue(work)

    def _queue(self, work: Work) -> None:
        client = self._clients.setdefault(work.client, _Client())
        client.queues.setdefault(work.stream, _Queue()).add(work)
        self._tokens[work.layer] = self._tokens.get(work.layer, 0) + work.num_waiting

    def remove(self, work: Work) -> bool:
        """Take a request out (cancelled, expired). False if no tokens of it wait any more."""
        self._queue_lone()
        client = self._clients.get(work.client)
        queue = client.queues.get(work.stream) if client is not None else None
        if queue is None or work not in queue.works:
            return False
        self._forget(queue, work)
        return True

    def expire(self, now_ns: int) -> list[Work]:
        """Take out the requests that are past their deadline."""
        if now_ns < self._no_deadline_before_ns:
            return []
        self._queue_lone()
        works = [work for client in self._clients.values() for work in client.works()]
        expired = [work for work in works if work.deadline_ns <= now_ns]
        for work in expired:
            self.remove(work)
        self._no_deadline_before_ns = min(
            (work.deadline_ns for work in works if work.deadline_ns > now_ns), default=_NEVER_NS
        )
        return expired

    def clear(self) -> list[Work]:
        """Take everything out, oldest first within a client."""
        self._queue_lone()
        works = [work for client in self._clients.values() for work in client.works()]
        self._clients.clear()
        self._tokens.clear()
        return works

    def head(self, now_ns: int) -> Head | None:
        """The preferred next layer, or None if nothing waits."""
        lone = self._lone
        if lone is not None:
            return Head(lone.layer, max(0, now_ns - lone.arrived_ns), lone.num_waiting)
        if not self._clients:
            return None
        client = _longest(self._clients.values())
        queue = client.longest()
        layer = queue.oldest().layer
        since_ns = max(client.turn_ns, queue.waiting_since_ns())
        return Head(layer, max(0, now_ns - since_ns), self._tokens[layer])

    def has_cut(self, layer: int) -> bool:
        """Whether a step has taken a part of a request for that layer whose rest waits here."""
        queues = [queue for client in self._clients.values() for queue in client.queues.values()]
        return any(queue.first(layer).num_taken for queue in queues if layer in queue.by_layer)

    def take(self, layer: int, max_tokens: int, now_ns: int, *, whole: bool = False) -> list[Slice]:
        """Cut at most `max_tokens` tokens for `layer`, clients in order of waiting, one request each per round.

        With `whole`, requests that were cut before go on, and others wait until a step has room for all of them."""
        lone = self._lone
        if lone is not None and lone.layer == layer and lone.num_tokens - lone.num_taken <= max_tokens:
            start, self._lone = lone.num_taken, None
            lone.num_taken = lone.num_tokens
            return [Slice(lone, start, lone.num_tokens)]
        self._queue_lone()
        clients = sorted(self._clients.values(), key=_Client.waiting_since_ns)
        slices: list[Slice] = []
        room = max_tokens
        while clients and room > 0:
            left = []
            for client in clients:
                queue = client.longest_for(layer) if room > 0 else None
                if queue is not None and not (whole and _is_cut_by(room, queue.first(layer))):
                    piece = self._cut(client, queue, layer, room, now_ns)
                    room -= piece.num_tokens
                    slices.append(piece)
                    left.append(client)
            clients = left
        return slices

    def _cut(self, client: _Client, queue: _Queue, layer: int, room: int, now_ns: int) -> Slice:
        work = queue.first(layer)
        if work is queue.oldest():
            if queue is client.longest():
                client.turn_ns = now_ns
            queue.turn_ns = now_ns
        piece = Slice(work, work.num_taken, work.num_taken + min(room, work.num_waiting))
        if piece.is_last:
            self._forget(queue, work)
        else:
            self._tokens[layer] -= piece.num_tokens
        work.num_taken = piece.stop
        return piece

    def _forget(self, queue: _Queue, work: Work) -> None:
        left = self._tokens[work.layer] - work.num_waiting
        if left:
            self._tokens[work.layer] = left
        else:
            del self._tokens[work.layer]
        queue.remove(work)
        client = self._clients[work.client]
        if not queue.works:
            del client.queues[work.stream]
        if not client.queues:
            del self._clients[work.client]
