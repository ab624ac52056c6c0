"""What ranks report of their experts, the goals they are given, and the ways there. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from crossdock.control.placement.checkpoints import NO_CHECKPOINTS, Checkpoints
from crossdock.control.placement.tables import Table


@dataclass(frozen=True, slots=True)
class Kind:
    """The experts of a model: E, and the numbers of its MoE layers."""

    num_experts: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Expert report of one rank. `layers`: weight ids by slot, for each MoE layer in order. `rows`: rows computed by
    each of them since the last report; empty for none."""

    version: int
    switched: int
    to_switch: int
    error: str
    layers: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    checkpoints: Checkpoints = NO_CHECKPOINTS

    @property
    def done(self) -> bool:
        return self.switched == self.to_switch and not self.error


@dataclass(frozen=True, slots=True)
class Goal:
    """One version of the tables, by layer."""

    version: int
    tables: tuple[Table, ...]


@dataclass(slots=True)
class Move:
    """The current move."""

    before: tuple[Table, ...]
    began: float
    rolling_back: bool = False
    loading: bool = False


@dataclass(slots=True)
class Outcome:
    """How a move ended: result is "done" or "rolled_back"."""

    result: str
    text: str
