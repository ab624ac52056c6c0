"""The reader's end: experts from other members of the group. What one of them does not give, or not in time, or not
whole, the next one is asked for, and the disk last (`checkpoints/expert_sources.py`)."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch

from crossdock.common import log
from crossdock.common.security import Security
from crossdock.protocol.frames import close
from crossdock.protocol.shared_memory import is_sealed
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.expert_sources import OneExpert
from crossdock.worker.checkpoints.weight_memory import hashed, hashed_in_pieces
from crossdock.worker.experts.placement import Holder
from crossdock.worker.peers.assignment import shared_among
from crossdock.worker.peers.host_bytes import HostBytes
from crossdock.worker.peers.messages import (
    MAX_ANSWER_BYTES,
    MAX_ASK_BYTES,
    Held,
    MessageError,
    Read,
    Sum,
    WeightLine,
    Which,
    bytes_of,
    form_of,
)
from crossdock.worker.peers.weight_lines import WeightLines, Withheld, is_near

_log = log.get(__name__)


_POPULATE_READ = 22
"""MADV_POPULATE_READ: pages at once, instead of by a fault each."""


class Damaged(Exception):
    """The bytes that came are not those that the holder has."""


_REASONS: dict[type[BaseException], str] = {Damaged: "damaged", TimeoutError: "slow", Withheld: "refused"}
"""Why a holder was given up, in metrics; any other: "lost"."""
_FAILURES = (OSError, EOFError, ValueError, Damaged)
"""After which nothing more is asked of that holder."""


class Peers:
    """Other members, for one worker. Any thread.

    Args:
        own: name of this worker's UNIX socket: it asks not itself.
        timeout_s: time for a holder to give one expert.
        failed: called with the reason when a holder is given up: "lost", "slow", "refused" or "damaged".
    """

    def __init__(
        self, own: str, security: Security | None, timeout_s: float, failed: Callable[[str], None] = lambda why: None
    ) -> None:
        self._own, self._timeout_s, self._failed, self._lines = own, timeout_s, failed, WeightLines(security)

    def source(self, holders: Sequence[Holder], turn: int, device: torch.device) -> PeerSource:
        """For one load. turn: as of `shared_among`; device: of the stacks that are filled."""
        others = [holder for holder in holders if holder.socket != self._own]
        host, maps = HostBytes(device), device.type == "cpu"
        return PeerSource(others, turn, host, maps, self._lines, self._timeout_s, self._failed)

    def close(self) -> None:
        self._lines.close()


class PeerSource:
    """Experts that other members hold, during one load; see `Peers`. One thread."""

    name = "peer"

    def __init__(
        self,
        holders: Sequence[Holder],
        turn: int,
        host: HostBytes,
        maps: bool,
        lines: WeightLines,
        timeout_s: float,
        failed: Callable[[str], None],
    ) -> None:
        self._holders, self._turn, self._host, self._maps = holders, turn, host, maps
        self._lines, self._timeout_s, self._failed = lines, timeout_s, failed
        self._loads, self._is_near = [0] * len(holders), [is_near(holder) for holder in holders]
        self._held: dict[int, dict[tuple[int, str], frozenset[int]]] | None = None
        self._open: dict[int, WeightLine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, line in self._open.items():
            self._lines.give_back(self._holders[number], line)
        self._open.clear()

    def read(self, checkpoint: Checkpoint, layer: int, wanted: Mapping[int, OneExpert]) -> Iterator[int]:
        """See `ExpertSource`. Raises nothing."""
        if self._held is None:
            self._held = {number: self._asked(number) for number in range(len(self._holders))}
        held, place, left = self._held, (layer, checkpoint.spec.fingerprint), dict(wanted)
        while left:

            def holders_of(expert: int) -> list[int]:
                return [number for number, layers in held.items() if expert in layers.get(place, ())]

            experts = {key: each.expert for key, each in left.items()}
            shared = shared_among(experts, holders_of, self._loads, self._is_near, self._turn)
            if not shared:
                return
            for number, keys in shared.items():
                try:
                    for key in self._read_from(number, checkpoint, layer, {key: left[key] for key in keys}):
                        del left[key]
                        yield key
                except Withheld as error:  # of this layer: it was switched meanwhile, for instance
                    held[number].pop(place, None)
                    self._say(number, error)
                except _FAILURES as error:
                    held[number].clear()
                    self._say(number, error)

    def _asked(self, number: int) -> dict[tuple[int, str], frozenset[int]]:
        """What a holder has: experts by layer and fingerprint; nothing, if it does not answer."""
        for _ in range(2):  # a connection that was kept may have ended
            try:
                line = self._lines.take(self._holders[number])
            except (*_FAILURES, Withheld) as error:
                self._say(number, error)
                return {}
            try:
                line.within(self._timeout_s)
                line.send(Which())
                held: Held = line.receive(Held, MAX_ANSWER_BYTES)
            except _FAILURES as error:
                line.close()
                failure: Exception = error
                continue
            self._open[number] = line
            return {(each.layer, each.fingerprint): frozenset(each.experts) for each in held.layers}
        self._say(number, failure)
        return {}

    def _read_from(
        self, number: int, checkpoint: Checkpoint, layer: int, wanted: Mapping[int, OneExpert]
    ) -> Iterator[int]:
        """Keys of what this holder gives, each whole. Raises Withheld, and `_FAILURES`."""
        line = self._open.pop(number)  # what it says is in order again once all has come
        is_clean = False
        try:
            # The question, for all of them; memory, or none.
            form, experts = form_of(next(iter(wanted.values()))), [each.expert for each in wanted.values()]
            line.within(self._timeout_s)
            line.send(Read(layer, checkpoint.spec.fingerprint, form, experts, self._maps and line.is_local))
            granted, descriptor = line.receive_granted()
            if granted.refused or not granted.memory_bytes:
                close(descriptor)
            if granted.refused:
                is_clean = True
                raise Withheld(granted.refused)
            memory = _Mapped(descriptor, granted.memory_bytes) if granted.memory_bytes else None
            # One after the other: its bytes, and their hash.
            for key, each in wanted.items():
                line.within(self._timeout_s)
                total = 0 if memory is not None else self._received(line, each.tensors)
                given: Sum = line.receive(Sum, MAX_ASK_BYTES)
                if memory is not None:
                    total = memory.copied(each.tensors, given.places)
                if total != given.sum:
                    raise Damaged(f"expert {each.expert} of layer {layer}: hash: expected {given.sum:x}, got {total:x}")
                if each.first.memory is not None:
                    each.first.memory.note(each.tensors, total)
                if given.digest:
                    checkpoint.learn_digest(layer, each.expert, given.digest)
                yield key
            is_clean = True
        finally:
            if is_clean:
                self._open[number] = line
            else:
                line.close()

    def _received(self, line: WeightLine, tensors: Sequence[torch.Tensor]) -> int:
        """Hash of the bytes that came, which are in the tensors."""
        total = 0
        for tensor in tensors:
            for room in self._host.into(tensor):
                line.receive_into(bytes_of(room))
                total = hashed(room.data_ptr(), room.numel(), total)
        return total

    def _say(self, number: int, error: Exception) -> None:
        reason = next((word for kind, word in _REASONS.items() if isinstance(error, kind)), "lost")
        self._failed(reason)
        _log.warning(
            "no weights from another worker", holder=self._holders[number].address, reason=reason, why=str(error)
        )


class _Mapped:
    """Memory of a holder of this host, mapped to read. Closes the descriptor.

    Raises:
        MessageError: it is not as large as it is said to be, or may shrink, which would end this process.
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            if descriptor < 0 or not is_sealed(descriptor, num_bytes):
                raise MessageError(f"memory: expected {num_bytes} bytes whose size is sealed, got something else")
            self._map = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
            self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        finally:
            close(descriptor)

    def copied(self, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> int:
        """Hash of what is copied from these places. Raises MessageError: one is not in the memory."""
        if len(places) != len(tensors):
            raise MessageError(f"places: expected {len(tensors)}, got {len(places)}")
        total, most, source = 0, self._bytes.nbytes, self._bytes.ctypes.data
        for tensor, place in zip(tensors, places, strict=True):
            if place + tensor.nbytes > most:
                raise MessageError(f"places: expected {tensor.nbytes} bytes within {most}, got them from {place}")
            with contextlib.suppress(OSError):  # of a kernel that does not know it: the copy does
                self._map.madvise(_POPULATE_READ, page := place - place % mmap.PAGESIZE, place + tensor.nbytes - page)
            total = hashed_in_pieces(source + place, tensor.nbytes, total, tensor.data_ptr())
        return total
