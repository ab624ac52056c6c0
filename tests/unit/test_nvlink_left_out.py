"""What survivors of the nvlink transport do before they use their buffers again, with a clock of its own."""

from __future__ import annotations

import pytest

from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.calls.left_out import PAUSE_S, SENDING_S, Unsent, is_needed, leave_out

LATE = Unsent(3, "combine", 8, 7)


class Story:
    """Rank 3 ends its combine at `ends`; the rest is noted."""

    def __init__(self, ends: float) -> None:
        self.ends, self.now, self.told = ends, 0.0, list[float]()

    def run(self, alive: bool = True) -> None:
        leave_out(lambda: self.told.append(self.now), self.unsent, lambda _: alive, self.sleep, lambda: self.now)

    def unsent(self) -> list[Unsent]:
        return [LATE] if self.told[-1] < self.ends else []

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_rank_that_had_begun_nothing_costs_the_pause() -> None:
    story = Story(ends=0.0)
    story.run()
    assert story.told == [0.0, PAUSE_S], "what it had begun is looked at after the pause"


def test_what_it_had_begun_is_waited_for() -> None:
    story = Story(ends=0.5)
    story.run()
    assert 0.5 <= story.now < 0.6


def test_a_rank_that_lives_and_never_ends_is_not_gone_on_without() -> None:
    with pytest.raises(TransportError, match="set_active: rank 3 was left out, but its combine 8 has not ended"):
        Story(ends=1e9).run()


def test_a_rank_that_is_not_known_to_live_is_taken_for_dead() -> None:
    story = Story(ends=1e9)
    story.run(alive=False)
    assert story.now > SENDING_S


def test_nothing_is_waited_for_where_all_take_part_or_are_dead() -> None:
    assert not is_needed([True, True], lambda _: False)
    assert not is_needed([True, False], lambda rank: rank == 1)
    assert is_needed([True, False, False], lambda rank: rank == 1)
