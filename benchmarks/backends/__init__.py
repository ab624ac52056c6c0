"""One file per backend. A backend module defines `create(setup) -> Backend`; `load` finds it by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.cases import Case, Step


@dataclass(frozen=True)
class Setup:
    """What a backend gets: the case, its place in the group, and a store that the ranks share."""

    case: Case
    rank: int
    store: Any


class Backend(Protocol):
    """One way to dispatch and combine. Only `dispatch` and `combine` are timed.

    Attributes:
        payload_s: op -> seconds of the bare collective within each call, where the backend has one; else empty.
    """

    payload_s: dict[str, list[float]]

    def prepare(self, x: torch.Tensor, step: Step) -> None:
        """Take this step's tokens and routing: whatever is not part of the operation happens here."""

    def dispatch(self) -> None:
        """Tokens to their experts' ranks, into the case's layout."""

    def experts(self) -> None:
        """Between the two: put expert outputs where combine wants them."""

    def combine(self) -> None:
        """Expert outputs home."""

    def barrier(self) -> None:
        """Meet all ranks, cheaply."""

    def close(self) -> None:
        """Free everything."""


def load(name: str, setup: Setup) -> Backend:
    """Create backend `name` of this package."""
    return importlib.import_module(f"benchmarks.backends.{name}").create(setup)  # type: ignore[no-any-return]
