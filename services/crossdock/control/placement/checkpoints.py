"""Checkpoints of a group, and whose weights each layer has. Pure values.

Tables hold *weight ids*: expert `e` of checkpoint `n` is `n * E + e`, so two tables of one layer are equal only if the
weights are. Checkpoint 0 is the one of the workers' config; others were loaded while the group served.

Letters: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from crossdock.common.call_errors import InvalidArgument
from crossdock.control.placement.tables import Table
from crossdock.protocol.v1 import control_pb2 as pb

MAX_REFS, MAX_CHARS, MAX_NUMBER = 8, 4096, 1 << 16


@dataclass(frozen=True, slots=True)
class Ref:
    """One checkpoint: where workers find it, and what they must find there."""

    number: int
    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """As in control.proto: of two states the one with the higher version is right.

    Attributes:
        version: of the placement with which it began to be so.
        settled: number that all layers had last.
        wanted: number that all layers are to have.
        refs: of the numbers but 0.
    """

    version: int = 0
    settled: int = 0
    wanted: int = 0
    refs: tuple[Ref, ...] = ()

    def with_next(self, path: str, fingerprint: str, version: int, held: Iterable[int] = ()) -> Checkpoints:
        """Another one is wanted; `held`: numbers that layers have. Numbers are not used again while a worker may know
        them."""
        number = 1 + max((ref.number for ref in self.refs), default=0)
        kept = tuple(ref for ref in self.refs if ref.number in {self.settled, self.wanted, *held})
        return Checkpoints(version, self.settled, number, (*kept, Ref(number, path, fingerprint)))

    def given_up(self, version: int) -> Checkpoints:
        """What was wanted cannot be had."""
        return replace(self, version=version, wanted=self.settled)

    def arrived(self, version: int) -> Checkpoints:
        """All layers have what was wanted."""
        return replace(self, version=version, settled=self.wanted)

    @staticmethod
    def parse(message: pb.Checkpoints, most_version: int) -> Checkpoints:
        """Check a message. Raises InvalidArgument."""
        refs = tuple(Ref(each.number, each.path, each.fingerprint) for each in message.refs)
        numbers = {0, *(ref.number for ref in refs)}
        texts = [text for ref in refs for text in (ref.path, ref.fingerprint)]
        if len(refs) > MAX_REFS or max(numbers) >= MAX_NUMBER or len(numbers) != len(refs) + 1:
            raise InvalidArgument(f"checkpoints: expected at most {MAX_REFS} of different numbers < {MAX_NUMBER}")
        if any(len(text) > MAX_CHARS or not text.isprintable() for text in texts):
            raise InvalidArgument(f"checkpoints: expected printable texts of at most {MAX_CHARS} characters")
        if not {message.settled, message.wanted} <= numbers or message.version > most_version:
            raise InvalidArgument("checkpoints: expected known numbers and a version that was given out")
        return Checkpoints(message.version, message.settled, message.wanted, refs)

    def message(self) -> pb.Checkpoints:
        refs = [pb.CheckpointRef(number=ref.number, path=ref.path, fingerprint=ref.fingerprint) for ref in self.refs]
        return pb.Checkpoints(version=self.version, settled=self.settled, wanted=self.wanted, refs=refs)


NO_CHECKPOINTS = Checkpoints()
"""None but number 0."""


def number_of(table: Table, num_experts: int) -> int:
    return next((held[0] // num_experts for held in table if held), 0)


def experts_of(table: Table, num_experts: int) -> Table:
    """Weight ids -> experts."""
    return tuple(tuple(one % num_experts for one in held) for held in table)


def weights_of(table: Table, num_experts: int, number: int) -> Table:
    """Experts, or weight ids of any checkpoint -> weight ids of checkpoint `number`."""
    return tuple(tuple(number * num_experts + one % num_experts for one in held) for held in table)
