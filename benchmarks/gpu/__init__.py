"""The GPU half of the benchmark: one file per backend, and the loops that measure them all by the same rules.

Read `measure.py` first: it is all there is between a kernel and a published figure. A backend module defines
`create(case, rank, group) -> Backend`, and raises `Unavailable` where it cannot run or does not know the case.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.cases import Case

BACKENDS = ("crossdock", "nccl", "nccl_bare", "agrs", "deepep")


class Unavailable(Exception):
    """This backend is not installed, or does not do this case; the message says which."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one rank dispatches: x [T, H], topk_ids int32 [T, K], topk_weights float32 [T, K], all on its GPU."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def like(self) -> Inputs:
        """Fresh memory with the same contents."""
        return Inputs(self.x.clone(), self.topk_ids.clone(), self.topk_weights.clone())

    def load(self, other: Inputs) -> None:
        """Take over the contents of `other`."""
        self.x.copy_(other.x)
        self.topk_ids.copy_(other.topk_ids)
        self.topk_weights.copy_(other.topk_weights)


Row = Callable[[int, torch.Tensor, int | None], torch.Tensor]
"""row(rank, here, k) -> float32 [T, H]: what the experts of `rank` gave for the tokens; see `check.expected`."""


class Backend(Protocol):
    """One way to dispatch and combine. `dispatch` and `combine` are what is timed; see each module for what is inside.

    Attributes:
        rotates: False where a captured graph holds one routing for ever.
        sms: op -> multiprocessors that its kernel fills; absent where unknown.
    """

    rotates: bool
    sms: dict[str, int]

    def prepare(self, inputs: Inputs) -> None:
        """What is known beforehand, outside the time; called once for each set of inputs."""

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """Tokens to their experts' ranks. Returns what `tokens`, `experts` and `combine` ask for. `previous`: what an
        earlier dispatch of the same inputs returned (the "cached" form)."""

    def tokens(self, received: Any) -> torch.Tensor:
        """The rows that arrived, as they arrived."""

    def experts(self, received: Any) -> torch.Tensor:
        """What the experts of `check.py` make of them; rows that no rank sent are NaN where the backend has any."""

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """Expert rows home, into `out`."""

    def result(self, inputs: Inputs) -> torch.Tensor:
        """Memory for `out`."""

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """What is wrong with `out`, "" if nothing."""

    def close(self) -> None:
        """Free everything."""


def load(name: str, case: Case, rank: int, group: Any) -> Backend:
    """Create backend `name`. Raises Unavailable with the reason."""
    return importlib.import_module(f"benchmarks.gpu.{name}").create(case, rank, group)  # type: ignore[no-any-return]
