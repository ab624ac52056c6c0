"""Where the tensors of experts come from: other members of the group that hold them (`worker/peers`), the disk last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.weights import Stack


class OneExpert(NamedTuple):
    """An expert, and where its two matrices are, or are to be: one expert's part of `Checkpoint.stacks`."""

    expert: int
    first: Stack
    down: Stack

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order in which they are hashed, and go from one worker to another."""
        return (*self.first.tensors, *self.down.tensors)

    def hash(self) -> int:
        """Of its bytes, kept where others may map them; elsewhere 0."""
        return self.first.memory.sum_of(self.tensors) if self.first.memory is not None else 0

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.down.num_bytes


class ExpertSource(Protocol):
    """One place that may have them. `name`: in the log and in metrics."""

    name: str

    def read(self, checkpoint: Checkpoint, layer: int, wanted: Mapping[int, OneExpert]) -> Iterator[int]:
        """Fill those that it has, with the bytes that reading `checkpoint` gives. Yields the key of each that is whole;
        the others hold anything."""


class Disk:
    """The checkpoint itself.

    Args:
        has_read: called after each expert that was read.
    """

    name = "disk"

    def __init__(self, has_read: Callable[[Checkpoint, int, int], None] = lambda checkpoint, layer, expert: None):
        self._has_read = has_read

    def read(self, checkpoint: Checkpoint, layer: int, wanted: Mapping[int, OneExpert]) -> Iterator[int]:
        """Raises CheckpointError: the bytes cannot be read."""
        for key, (expert, first, down) in wanted.items():
            checkpoint.read_expert(layer, expert, first, down)
            self._has_read(checkpoint, layer, expert)
            yield key


class Sources:
    """Several, one after the other: what one does not give, the next is asked for.

    Args:
        chain: the last one gives everything, or raises.
        count: called with a source's name, bytes that it gave, and seconds that it took.
    """

    def __init__(
        self,
        chain: Sequence[ExpertSource],
        count: Callable[[str, int, float], None] = lambda name, num_bytes, seconds: None,
    ) -> None:
        self._chain, self._count = chain, count

    def fill(self, checkpoint: Checkpoint, layer: int, wanted: Sequence[OneExpert]) -> Iterator[OneExpert]:
        """Fill all of them; yields each that is whole. Raises what the last source raises."""
        left = dict(enumerate(wanted))
        for source in self._chain:
            if not left:
                return
            began, num_bytes = time.monotonic(), 0
            try:
                for key in source.read(checkpoint, layer, dict(left)):
                    filled = left.pop(key)
                    num_bytes += filled.num_bytes
                    yield filled
            finally:
                self._count(source.name, num_bytes, time.monotonic() - began)


FROM_DISK = Sources((Disk(),))
