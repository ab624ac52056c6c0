"""Agreement on the next step: each rank sends one `Proposal`, and each computes the same decision. Pure.

One exchange of 8 int64 per rank carries the proposals *and* the outcome of the step before, so a busy group pays one
exchange per step. A rank whose experts fail sends NaN and says so in the next exchange. A rank that got NaN answers
only after that exchange: an expert failure becomes an error of the requests, never a silently wrong sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crossdock.worker.steps.batcher import Head

NO_LAYER = -1
NOTHING = Head(NO_LAYER, 0, 0)
_DRAINING, _LEAVING, _FAILED, _LOADED = 1, 2, 4, 8


class DesyncError(RuntimeError):
    """The ranks are not at the same step: the group is broken and must form again."""


class Proposal(NamedTuple):
    """Message of one rank in an exchange.

    Attributes:
        step: number of steps done in this epoch; equal on all ranks.
        layer: layer it wants next, or NO_LAYER.
        waited_ns: how long its client has waited for the turn.
        num_tokens: tokens that wait here for `layer`.
        draining: it takes no new requests.
        leaving: it wants to leave as soon as no draining rank has work.
        failed: its experts failed in the step just done; its rows are NaN.
        placement: progress word of the newest placement; see expert_tables.py.
        loaded: it has loaded the next layer of that placement.
    """

    step: int
    layer: int = NO_LAYER
    waited_ns: int = 0
    num_tokens: int = 0
    draining: bool = False
    leaving: bool = False
    failed: bool = False
    placement: int = 0
    loaded: bool = False

    def words(self) -> tuple[int, ...]:
        """The 8 int64 that travel."""
        step, layer, waited_ns, num_tokens, draining, leaving, failed, placement, loaded = self
        flags = _DRAINING * draining | _LEAVING * leaving | _FAILED * failed | _LOADED * loaded
        return (step, layer, waited_ns, num_tokens, flags, placement, 0, 0)

    @staticmethod
    def parse(words: Sequence[int]) -> Proposal:
        """Undo `words`."""
        step, layer, waited_ns, num_tokens, flags, placement, *_ = words
        if not flags:  # as a rule; each step waits for this
            return Proposal(step, layer, waited_ns, num_tokens, False, False, False, placement)
        said = flags & _DRAINING != 0, flags & _LEAVING != 0, flags & _FAILED != 0
        return Proposal(step, layer, waited_ns, num_tokens, *said, placement, flags & _LOADED != 0)


class Step(NamedTuple):
    """All ranks dispatch now: at most `max_tokens` tokens each, all for `layer`."""

    layer: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Departure:
    """`ranks` leave now, between two steps, which ends the epoch."""

    ranks: tuple[int, ...]


def choose_step(proposals: Mapping[int, Proposal], max_tokens_per_step: int) -> Step | Departure | None:
    """What the group does next, None: no rank has work. The same on every rank, since all are given the same proposals.

    The layer with the longest wait wins (ties: the lowest layer). When all ranks with work want that layer, the
    longest queue among them bounds the step, so that AUTO can choose the algorithm; else the full step size does.

    Args:
        max_tokens_per_step: M.

    Raises:
        DesyncError: the ranks are not at the same step.
    """
    working, leaving, step = list[Proposal](), list[int](), -1
    for rank, proposal in proposals.items():  # one loop: each step waits for this
        if step not in (-1, proposal.step):
            raise DesyncError(f"ranks are at different steps: { {rank: p.step for rank, p in proposals.items()} }")
        step = proposal.step
        if proposal.layer != NO_LAYER:
            working.append(proposal)
        if proposal.leaving:
            leaving.append(rank)
    if leaving and not any(proposal.draining for proposal in working):
        return Departure(tuple(sorted(leaving)))
    if not working:
        return None
    if len(working) == 1:
        return Step(working[0].layer, min(working[0].num_tokens, max_tokens_per_step))
    layer = min(working, key=lambda proposal: (-proposal.waited_ns, proposal.layer)).layer
    agreed = all(proposal.layer == layer for proposal in working)
    longest = max(proposal.num_tokens for proposal in working)
    return Step(layer, min(longest, max_tokens_per_step) if agreed else max_tokens_per_step)
