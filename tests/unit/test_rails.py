"""By whom rows of a dispatch reach other hosts."""

from __future__ import annotations

import random

import pytest

from ep_kernels.transports.nvlink.network.rails import Rails

ALL = [True] * 6


def rails(rails: Rails, rank: int) -> list[int | None]:
    """Of each source to that rank's landing."""
    return [rails.rail(source, rank) for source in range(len(rails.mask))]


def test_ranks_of_a_host_take_turns() -> None:
    two = Rails((0, 0, 0, 3, 3, 3), (0, 0, 0, 3, 3, 3), ALL)
    assert [two.rail(source, 4) for source in (0, 1, 2)] == [3, 4, 5]
    assert [two.rail(source, 0) for source in (3, 4, 5)] == [0, 1, 2]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_rank_and_three(rank: int) -> None:
    uneven = Rails((0, 1, 1, 1), (0, 1, 1, 1), [True] * 4)
    assert uneven.rail(0, rank) == 1
    assert [uneven.rail(source, 0) for source in (1, 2, 3)] == [0, 0, 0]


def test_only_those_who_take_part_count() -> None:
    """Of hosts whose numbers are not in a row, too."""
    mixed = Rails((0, 1, 0, 1, 0, 1), (0, 1, 0, 1, 0, 1), [True, False, False, True, True, True])
    assert rails(mixed, 3)[0::2] == [3, None, 5]
    assert rails(mixed, 0)[1::2] == [None, 0, 4]
    assert Rails(mixed.hosts, mixed.landings, [True, False, True, False, True, False]).rail(0, 3) is None


def test_who_shares_no_landing_gets_all_rows_itself() -> None:
    """As a rank whose boxes are on its GPU, beside two that share."""
    apart = Rails((0, 0, 0, 3, 3, 3), (0, 0, 0, 3, 4, 3), ALL)
    assert [apart.rail(source, 4) for source in (0, 1, 2)] == [4, 4, 4]
    assert [apart.rail(source, 3) for source in (0, 1, 2)] == [3, 5, 3]


def test_all_ranks_of_a_landing_find_the_same() -> None:
    hosts = [0, 0, 2, 2, 2, 0]
    for _ in range(50):
        made = Rails(hosts, hosts, [random.random() < 0.7 for _ in hosts])
        assert rails(made, 2) == rails(made, 3) == rails(made, 4)
        assert all(one is None or (made.mask[one] and hosts[one] == 2) for one in rails(made, 3))
