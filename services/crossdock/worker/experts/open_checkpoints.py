"""The checkpoints that a worker reads: the one of its config, and one that is loaded while the group serves."""

from __future__ import annotations

import dataclasses
import threading

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError, ModelSpec
from crossdock.worker.experts.placement import WeightsOf

_MAX_OTHERS = 2
"""Of a mixed group: the one that layers have, and the one that they are to have."""


class OpenCheckpoints:
    """For several threads: one loads, one compares; a loader of the former epoch may still read.

    Args:
        first: number 0.
    """

    def __init__(self, first: Checkpoint) -> None:
        self._first = first
        self._others: dict[WeightsOf, Checkpoint] = {}
        self._lock = threading.Lock()

    def open(self, weights: WeightsOf) -> Checkpoint:
        """The checkpoint, opened and compared with the first.

        Raises:
            CheckpointError: unreadable, of another shape, or other weights than its fingerprint says.
        """
        if not weights.number:
            return self._first
        with self._lock:
            found = self._others.get(weights) or self._checked(weights)
            self._others.pop(weights, None)
            self._others[weights] = found  # last: the first are those used longest ago
            for old in list(self._others)[:-_MAX_OTHERS]:
                self._others.pop(old).close()
            return found

    def close(self) -> None:
        """Unmap all."""
        for each in (self._first, *self._others.values()):
            each.close()

    def _checked(self, weights: WeightsOf) -> Checkpoint:
        found = Checkpoint.open(weights.path)
        try:
            check_same_shape(self._first.spec, found.spec, weights.path)
            if found.spec.fingerprint != weights.fingerprint:
                got = found.spec.fingerprint
                raise CheckpointError(f"{weights.path}: fingerprint: expected {weights.fingerprint}, got {got}")
        except CheckpointError:
            found.close()
            raise
        return found


def check_same_shape(expected: ModelSpec, got: ModelSpec, path: str) -> None:
    """Raises CheckpointError: the experts of a model cannot take the place of another's; says field, expected, got."""
    for name in (field.name for field in dataclasses.fields(ModelSpec) if field.name != "fingerprint"):
        wanted, found = getattr(expected, name), getattr(got, name)
        if wanted != found:
            raise CheckpointError(f"{path}: {name}: expected {wanted} as in the model that is served, got {found}")
