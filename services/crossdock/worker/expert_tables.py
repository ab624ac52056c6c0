"""From one placement of experts to the next while requests are served: layer by layer, between two steps.

    loader thread      task() ─▶ load what this rank lacks in the next layer ─▶ offer(weights)
    engine's thread    word() goes out in the exchange before every step: "placement v, n layers loaded"
                       settle(words of all ranks): layers that *all* have loaded are switched, on every rank in the
                       same place between the same two steps, since all are given the same words

A switch replaces the pointers to one layer's weights and the layer's route: nothing is copied, and no step waits for
it. Only one layer is ahead at a time, so it costs the memory of one layer's experts. A rank that cannot load says so to
the control plane and its word stays where it is: nobody goes further, what was switched stays, and every rank is still
right. The control plane then sends another placement.

A plan is taken up in `word`, by the engine's thread, so what this rank has said in an exchange is never taken back
before the exchange is settled; words of different plans switch nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from crossdock.common import log
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.expert_mlps import Experts
from crossdock.worker.placement import Placement, Route

_log = log.get(__name__)

_COUNT_BITS = 16
Weights = tuple[torch.Tensor, torch.Tensor]


class MoveCancelled(Exception):
    """What was being loaded is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to load next: the experts `ids` of this rank, by slot, for `layer`."""

    version: int
    layer: int
    ids: tuple[int, ...]


class ExpertTables:
    """What a rank holds during one epoch, and where everything else is.

    Args:
        placement: at which all ranks begin the epoch.
        num_experts: E.
        rank: this one.
        experts: loaded as `placement` says; None: this rank has no slots.
        mask: by rank, whether it takes part in this epoch; None: all do.
        on_switch: told the copies that this rank has loaded for a layer, and the nanoseconds that its switch took.
    """

    def __init__(
        self,
        placement: Placement,
        num_experts: int,
        rank: int,
        experts: Experts | None,
        on_switch: Callable[[int, int], None] = lambda num_loaded, took_ns: None,
        mask: Sequence[bool] | None = None,
    ) -> None:
        self._num_experts, self._rank, self._experts, self._on_switch = num_experts, rank, experts, on_switch
        self._rows = dict(placement.layers)
        self._live = placement.live_slots(mask) if mask is not None else None
        self._routes = {layer: Route(row, num_experts, self._live) for layer, row in self._rows.items()}
        self._target, self._next = placement, placement
        self._way: tuple[int, ...] = ()
        self._switched = 0
        self._staged: tuple[Weights | None, Route] | None = None
        self._error = ""
        self._said = -1
        self._closed = False
        self._changed = threading.Condition()

    # Any thread.

    @property
    def version(self) -> int:
        """Of the newest placement that this rank was told of."""
        return self._next.version

    def aim(self, placement: Placement) -> None:
        """Go to this placement; the engine's thread takes it up."""
        with self._changed:
            self._next = placement

    def close(self) -> None:
        """The epoch is over: the loader has nothing more to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def report(self) -> control_pb2.ExpertReport:
        """What the control plane is told, rows apart."""
        with self._changed:
            report = control_pb2.ExpertReport(
                version=self._target.version, switched=self._switched, to_switch=len(self._way), error=self._error
            )
            if self._next is not self._target:  # not taken up yet, and no successor of who told it may use its number
                report = control_pb2.ExpertReport(version=self._next.version, to_switch=1)
            for layer in self._rows:
                report.layers.add(experts=self._held(layer))
            return report

    def has_news(self) -> bool:
        """Whether the next word will differ from the last one."""
        return self._next is not self._target or self._word() != self._said

    # The loader's thread.

    def task(self) -> Task:
        """Wait for the next layer to load. Raises MoveCancelled when the epoch is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wants_a_layer())
            if self._closed:
                raise MoveCancelled
            layer = self._way[self._switched]
            return Task(self._target.version, layer, self._target.of_rank(layer, self._rank))

    def check(self, task: Task) -> None:
        """Raise MoveCancelled unless the task is still wanted."""
        if self._closed or self._next.version != task.version:
            raise MoveCancelled

    def offer(self, task: Task, weights: Weights | None) -> None:
        """The layer is loaded; None: this rank has no slots, or they stay as they are."""
        route = Route(self._target.layers[task.layer], self._num_experts, self._live)
        with self._changed:
            if self._target.version == task.version:
                self._staged = weights, route

    def fail(self, task: Task, error: str) -> None:
        """The layer cannot be loaded."""
        with self._changed:
            if self._target.version == task.version:
                self._error = error

    # The engine's thread.

    def route(self, layer: int) -> Route | None:
        """Of a layer, as it is in the next step."""
        return self._routes.get(layer)

    def held(self, layer: int) -> tuple[int, ...]:
        """The experts of this rank's slots in the next step."""
        return self._held(layer)

    def word(self) -> int:
        """What to say in the next exchange."""
        with self._changed:
            if self._next is not self._target:
                self._take_up(self._next)
            self._said = self._word()
            return self._said

    def settle(self, words: Sequence[int]) -> None:
        """Switch what all ranks have loaded. `words` are those of all ranks, this one's last one among them."""
        lowest = min(words)
        if lowest >> _COUNT_BITS != max(words) >> _COUNT_BITS:
            return
        count = lowest & ((1 << _COUNT_BITS) - 1)
        with self._changed:
            if lowest >> _COUNT_BITS == self._target.version and count == self._switched + 1:
                self._switch()

    def _take_up(self, placement: Placement) -> None:
        self._target, self._staged, self._error, self._switched = placement, None, "", 0
        self._way = tuple(layer for layer, row in placement.layers.items() if row != self._rows[layer])
        _log.info("experts move", placement=placement.version, layers=len(self._way))
        self._changed.notify_all()

    def _switch(self) -> None:
        assert self._staged is not None
        begun_ns, layer = time.monotonic_ns(), self._way[self._switched]
        (weights, route), self._staged = self._staged, None
        before = self._held(layer)
        self._rows[layer], self._routes[layer] = self._target.layers[layer], route
        if self._experts is not None and weights is not None:
            self._experts.replace(layer, self._held(layer), *weights)
        self._switched += 1
        self._changed.notify_all()
        self._on_switch(len(set(self._held(layer)) - set(before)), time.monotonic_ns() - begun_ns)
        if self._switched == len(self._way):
            _log.info("experts moved", placement=self._target.version, layers=self._switched)

    def _held(self, layer: int) -> tuple[int, ...]:
        first, end = (self._target.first_slot(rank) for rank in (self._rank, self._rank + 1))
        return self._rows[layer][first:end]

    def _word(self) -> int:
        return (self._target.version << _COUNT_BITS) | (self._switched + (self._staged is not None))

    def _wants_a_layer(self) -> bool:
        return not self._error and self._staged is None and self._switched < len(self._way)
