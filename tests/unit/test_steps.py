"""The ranks' agreement on the next step: pure, so every case is a table."""

from __future__ import annotations

import random

import pytest

from crossdock.worker.steps.batcher import Head
from crossdock.worker.steps.steps import NO_LAYER, NOTHING, Departure, DesyncError, Proposal, Step, choose_step

M = 64


def ranks(*proposals: Proposal) -> dict[int, Proposal]:
    return dict(enumerate(proposals))


def want(layer: int, waited_ns: int, num_tokens: int = 1, **flags: bool) -> Proposal:
    return Proposal(0, layer, waited_ns, num_tokens, **flags)


def test_words_carry_everything() -> None:
    draw = random.Random()
    for _ in range(200):
        proposal = Proposal(
            draw.randrange(1 << 40),
            draw.choice([NO_LAYER, 0, 7, 1 << 31]),
            draw.randrange(1 << 62),
            draw.randrange(1 << 20),
            *(draw.random() < 0.5 for _ in range(3)),
            draw.randrange(1 << 40),
            draw.random() < 0.5,
        )
        words = proposal.words()
        assert len(words) == 8
        assert all(-(1 << 63) <= word < 1 << 63 for word in words)
        assert Proposal.parse(words) == proposal


def test_a_proposal_is_made_of_a_head_or_of_nothing() -> None:
    assert Proposal(2, *Head(3, 10, 5), failed=True) == Proposal(2, layer=3, waited_ns=10, num_tokens=5, failed=True)
    assert Proposal(2, *NOTHING, failed=True) == Proposal(2, failed=True)


@pytest.mark.parametrize(
    ("proposals", "expected"),
    [
        (ranks(Proposal(0), Proposal(0)), None),
        (ranks(Proposal(0), want(3, 5, 7)), Step(3, 7)),
        (ranks(want(3, 5, 7), want(3, 1, 9)), Step(3, 9)),
        (ranks(want(3, 5, 7), want(3, 1, 900)), Step(3, M)),
        (ranks(want(3, 5, 7), want(4, 6, 9)), Step(4, M)),
        (ranks(want(4, 5, 7), want(3, 5, 9)), Step(3, M)),
        (ranks(want(0, 0)), Step(0, 1)),
    ],
    ids=["nobody", "one rank", "longest queue bounds", "step size bounds", "longest wait wins", "tie", "layer 0"],
)
def test_choose(proposals: dict[int, Proposal], expected: object) -> None:
    assert choose_step(proposals, M) == expected


@pytest.mark.parametrize(
    ("proposals", "expected"),
    [
        (ranks(Proposal(0), Proposal(0, draining=True, leaving=True)), Departure((1,))),
        (ranks(want(3, 5), Proposal(0, draining=True, leaving=True)), Departure((1,))),
        (ranks(want(3, 5, draining=True), Proposal(0, draining=True, leaving=True)), Step(3, 1)),
        (ranks(Proposal(0, draining=True), Proposal(0, draining=True, leaving=True)), Departure((1,))),
        (ranks(Proposal(0, leaving=True), Proposal(0), Proposal(0, leaving=True)), Departure((0, 2))),
        (ranks(Proposal(0, draining=True), Proposal(0)), None),
    ],
    ids=["idle", "others have work", "a draining rank has work", "only who asked", "two", "draining is not leaving"],
)
def test_departure(proposals: dict[int, Proposal], expected: object) -> None:
    assert choose_step(proposals, M) == expected


def test_ranks_at_different_steps_are_a_fault() -> None:
    with pytest.raises(DesyncError, match="different steps"):
        choose_step(ranks(Proposal(4), Proposal(5)), M)


def test_holes_are_no_ranks() -> None:
    assert choose_step({0: want(2, 1), 3: Proposal(0, draining=True, leaving=True)}, M) == Departure((3,))
