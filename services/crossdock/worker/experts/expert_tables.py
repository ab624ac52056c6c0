"""Expert tables of one epoch, and how ranks change them while requests are served: layer by layer, between two steps.

    loader thread      next_task() ─▶ load the missing experts of the next layer ─▶ stage(weights)
    engine's thread    progress() is sent in the exchange before every step: "placement v, ready for n layers"
                       apply_agreed(of all ranks): the layer for which *all* ranks are ready is switched, on every
                       rank between the same two steps, since all ranks see the same words

A rank is ready for a layer that it has loaded. Where the layer gets weights of another checkpoint, a request must not
have rows of both: once *all* ranks have loaded the layer (`closing`), no request for it is cut between steps, and a
rank is ready when those that were cut before have been served. Until then each answers as ever.

A switch replaces the pointers to one layer's weights and the layer's route: nothing is copied, and no step waits for
it. Only one layer is staged at a time, which costs the memory of one layer's experts. A rank that cannot load reports
an error to the control plane and its progress word stays: no rank proceeds, switched layers stay switched, and every
rank remains correct. The control plane then sends another placement.

A new target takes effect in `progress`, on the engine's thread, so this rank never revises a word before the
exchange that carries it is applied. Words of different placements switch nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdock.common import log
from crossdock.protocol.v1 import control_pb2
from crossdock.worker.experts.expert_mlps import ExpertMLPs, Weights
from crossdock.worker.experts.placement import FROM_CONFIG, Holder, Placement, SlotMap, WeightsOf

_log = log.get(__name__)

_COUNT_BITS = 16


def _is_not_cut(layer: int) -> bool:
    return False


class MoveCancelled(Exception):
    """The current load task is obsolete."""


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Experts to load: `ids` of this rank, by slot, for `layer`, with the weights of a checkpoint."""

    version: int
    layer: int
    ids: tuple[int, ...]
    weights: WeightsOf = FROM_CONFIG
    holders: tuple[Holder, ...] = ()


class ExpertTables:
    """Experts held by this rank, and the slots of all experts, during one epoch.

    Args:
        placement: of all ranks at the start of the epoch.
        experts: loaded as `placement` says; None: this rank has no slots.
        mask: by rank, whether it takes part in this epoch; None: all ranks.
        fingerprint: of checkpoint 0, that of the config.
        on_switch: called per switched layer with the copies loaded by this rank and the duration in nanoseconds.
    """

    def __init__(
        self,
        placement: Placement,
        num_experts: int,
        rank: int,
        experts: ExpertMLPs | None,
        on_switch: Callable[[int, int], None] = lambda num_loaded, took_ns: None,
        mask: Sequence[bool] | None = None,
        fingerprint: str = "",
    ) -> None:
        self._fingerprint = fingerprint
        self._num_experts, self._rank, self._experts, self._on_switch = num_experts, rank, experts, on_switch
        self._rows = dict(placement.layers)
        self._weights = {layer: placement.weights(layer) for layer in placement.layers}
        self._live = placement.live_slots(mask) if mask is not None else None
        self._routes = {layer: SlotMap(row, num_experts, self._live) for layer, row in self._rows.items()}
        self._target, self._newest = placement, placement
        self._changed_layers: tuple[int, ...] = ()
        self._switched = 0
        self._staged: tuple[Weights | None, SlotMap] | None = None
        self._error = ""
        self._all_staged = False
        self._said = -1, False
        self._held_now: dict[int, tuple[int, ...]] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    # Any thread.

    @property
    def version(self) -> int:
        """Version of the newest target placement."""
        return self._newest.version

    def set_target(self, placement: Placement) -> None:
        """Set the target placement; it takes effect in `progress`."""
        with self._changed:
            self._newest = placement

    def close(self) -> None:
        """End the epoch: `next_task` raises MoveCancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def report(self) -> control_pb2.ExpertReport:
        """Report for the control plane, without row counts."""
        with self._changed:
            report = control_pb2.ExpertReport(
                version=self._target.version,
                switched=self._switched,
                to_switch=len(self._changed_layers),
                error=self._error,
            )
            if self._newest is not self._target:  # not in effect yet, but a new leader must not reuse its version
                report = control_pb2.ExpertReport(version=self._newest.version, to_switch=1)
            for layer in self._rows:
                report.layers.add(experts=self._held(layer), checkpoint=self._weights[layer].number)
            report.checkpoints.CopyFrom(self._newest.refs)
            return report

    def weights(self) -> tuple[WeightsOf, ...]:
        with self._changed:
            return tuple(self._weights.values())

    def has_pending_change(self) -> bool:
        """Whether `progress` will differ from the last one if no request is cut."""
        return self._newest is not self._target or self._progress(_is_not_cut) != self._said

    # The loader's thread.

    def next_task(self) -> LoadTask:
        """Wait for the next layer to load. Raises MoveCancelled when the epoch is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wants_a_layer())
            if self._closed:
                raise MoveCancelled
            layer = self._changed_layers[self._switched]
            target = self._target
            ids, weights = target.of_rank(layer, self._rank), target.weights(layer)
            return LoadTask(target.version, layer, ids, weights, target.holders)

    def check(self, task: LoadTask) -> None:
        if self._closed or self._newest.version != task.version:
            raise MoveCancelled

    def stage(self, task: LoadTask, weights: Weights | None) -> None:
        """Store the loaded weights of a layer; None: this rank has no slots, or they do not change."""
        route = SlotMap(self._target.layers[task.layer], self._num_experts, self._live)
        with self._changed:
            if self._target.version == task.version:
                self._staged = weights, route

    def fail(self, task: LoadTask, error: str) -> None:
        with self._changed:
            if self._target.version == task.version:
                self._error = error

    # The engine's thread.

    def route(self, layer: int) -> SlotMap | None:
        return self._routes.get(layer)

    def fingerprint(self, layer: int) -> str:
        """Of the checkpoint whose weights a layer has in the next step."""
        return self._weights[layer].fingerprint or self._fingerprint

    def held(self, layer: int) -> tuple[int, ...]:
        """The experts of this rank's slots in the next step."""
        found = self._held_now.get(layer)
        if found is None:
            found = self._held_now[layer] = self._held(layer)
        return found

    @property
    def closing(self) -> int | None:
        """The layer that gets another checkpoint's weights once no request for it is cut; None: none does now."""
        return self._changed_layers[self._switched] if self._all_staged else None

    def progress(self, is_cut: Callable[[int], bool] = _is_not_cut) -> tuple[int, bool]:
        """Of this rank for the next exchange: its progress word, which is the version of the target and the number of
        layers that are switched or ready, and whether it has loaded the next layer.

        Args:
            is_cut: whether a request for that layer waits of which a step has taken a part.
        """
        with self._lock:
            if self._newest is not self._target:
                self._start(self._newest)
            self._said = self._progress(is_cut)
            return self._said

    def apply_agreed(self, words: Sequence[int], loaded: Sequence[bool]) -> None:
        """Switch the layer for which all ranks are ready. `words`, `loaded`: what `progress` of all ranks was in one
        exchange."""
        lowest, highest = min(words), max(words)
        if lowest >> _COUNT_BITS != highest >> _COUNT_BITS:
            self._all_staged = False
            return
        if self._staged is None:  # so this rank was not ready
            return
        with self._changed:
            ready = (self._target.version << _COUNT_BITS) + self._switched + 1
            if lowest == ready:
                self._switch()
            elif self._brings_weights():
                said = zip(words, loaded, strict=True)
                self._all_staged = all(word == ready or (word == ready - 1 and has) for word, has in said)

    def _start(self, placement: Placement) -> None:
        self._target, self._staged, self._error, self._switched = placement, None, "", 0
        self._all_staged = False
        self._changed_layers = tuple(
            layer
            for layer, row in placement.layers.items()
            if row != self._rows[layer] or placement.weights(layer) != self._weights[layer]
        )
        _log.info("move started", placement=placement.version, layers=len(self._changed_layers))
        self._changed.notify_all()

    def _switch(self) -> None:
        assert self._staged is not None
        begun_ns, layer = time.monotonic_ns(), self._changed_layers[self._switched]
        (weights, route), self._staged = self._staged, None
        before = self._held(layer) if self._weights[layer] == self._target.weights(layer) else ()
        self._rows[layer], self._routes[layer] = self._target.layers[layer], route
        self._weights[layer] = self._target.weights(layer)
        self._held_now.pop(layer, None)
        if self._experts is not None and weights is not None:
            self._experts.replace(layer, self._held(layer), *weights, of=self._weights[layer])
        self._switched += 1
        self._all_staged, self._said = False, (self._said[0], False)
        self._changed.notify_all()
        self._on_switch(len(set(self._held(layer)) - set(before)), time.monotonic_ns() - begun_ns)
        if self._switched == len(self._changed_layers):
            _log.info("move done", placement=self._target.version, layers=self._switched)

    def _held(self, layer: int) -> tuple[int, ...]:
        first, end = (self._target.first_slot(rank) for rank in (self._rank, self._rank + 1))
        return self._rows[layer][first:end]

    def _progress(self, is_cut: Callable[[int], bool]) -> tuple[int, bool]:
        staged, closing = self._staged is not None, self.closing
        ready = staged and not self._brings_weights() if closing is None else not is_cut(closing)
        return (self._target.version << _COUNT_BITS) | (self._switched + ready), staged

    def _brings_weights(self) -> bool:
        """Whether the next layer to be switched gets weights of another checkpoint."""
        layer = self._changed_layers[self._switched]
        return self._target.weights(layer) != self._weights[layer]

    def _wants_a_layer(self) -> bool:
        return not self._error and self._staged is None and self._switched < len(self._changed_layers)
