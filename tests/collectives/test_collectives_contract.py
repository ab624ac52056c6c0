"""The suite that every transport with collectives passes: bit for bit what the reference says, for any group.

What happens when peers are late or dead is in test_collective_faults.py.
"""

from collections.abc import Callable

import pytest

from crossdock.common.transports import needs_gpu
from tests.collectives import stories
from tests.worlds import World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_size_dtype_and_place(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.every_size, transport, (0, 1, 7, 4099))


@pytest.mark.parametrize("size", [5, 8])
def test_many_ranks(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.every_size, transport, (7, 1030))


@pytest.mark.parametrize("size", [2, 3])
def test_larger_than_staging(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.large, transport)


@pytest.mark.parametrize("size", [1, 3])
def test_special_values(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.special_values, transport)


@pytest.mark.parametrize("size", [1, 3])
def test_coalesced_parts(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.coalesced, transport)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_several_under_way(world: Worlds, transport: str, in_flight: int) -> None:
    world(3).run(stories.several_under_way, transport, in_flight)


def test_completion_is_asked_without_waiting(world: Worlds, transport: str) -> None:
    assert max(world(3).run(stories.polled, transport)[1:]) < 0.4


def test_shards_in_order_of_arrival(world: Worlds, transport: str) -> None:
    orders = world(3).run(stories.follows_arrivals, transport)
    assert [sorted(order) for order in orders] == [[0, 1, 2]] * 3
    assert [order[0] for order in orders] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_matmuls(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.matmuls, transport)


@pytest.mark.parametrize("size", [2, 3])
def test_matmuls_bit_by_bit(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.exact_matmuls, transport)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_matmuls_along_the_last_dimension(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.columns, transport)


def test_products_of_other_widths(world: Worlds, transport: str) -> None:
    """What ranks send does not depend on how wide the weights of each are."""
    first, second = world(2).run(stories.products_of_other_widths, transport)
    assert first[0] == second[0] > 0
    assert (first[1], second[1]) == (True, False)


def test_callers_that_run_something_beside(world: Worlds, transport: str) -> None:
    assert world(2).run(stories.told_beside, transport) == [[False, False, True, True, False]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments_are_refused_before_anything_is_sent(world: Worlds, transport: str, size: int) -> None:
    world(size).run(stories.refused, transport)


DIFFERENCES = {
    "bytes": "rank 1 brought bytes 16, this rank 32",
    "none": "rank 1 brought bytes 32, this rank 64",
    "dtype": "rank 1 brought dtype torch.int32, this rank torch.float32",
    "sum": "rank 1 brought dtype torch.bfloat16, this rank torch.float32",
    "operation": "rank 1 brought operation all_reduce, this rank all_gather",
    "parts": "rank 1 brought sizes of parts",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_bring_different_arguments(world: Worlds, transport: str, what: str) -> None:
    said = world(3).run(stories.differing, transport, what)
    assert DIFFERENCES[what] in said[0]
    assert DIFFERENCES[what] in said[2]
    assert "rank 0 brought" in said[1] or "rank 2 brought" in said[1]


def test_registered_tensors_of_different_sizes(world: Worlds, transport: str) -> None:
    said = world(3).run(stories.differing_empty, transport)
    assert set(said) == {"shape: expected 8 bytes as on rank 0, got 9 on rank 1"}


def test_registered_memory_returns(world: Worlds, transport: str) -> None:
    first, *others = world(3).run(stories.pool_reused, transport)
    assert all(other == first for other in others)


def test_inactive_ranks(world: Worlds, transport: str) -> None:
    world(3).run(stories.inactive, transport)


def test_nothing_is_left_behind(world: Worlds, transport: str) -> None:
    assert world(2).run(stories.born_and_closed, transport, 40) == [[], []]


def test_configurations_that_differ(world: Worlds, transport: str) -> None:
    said = world(2).run(stories.config_mismatch, transport)
    assert said[0] == said[1]
    assert said[0].startswith("pool_bytes: expected 1048576 as on rank 0")


def test_process_groups_that_only_some_have(world: Worlds, transport: str) -> None:
    said = world(2).run(stories.groups_of_two_kinds, transport)
    assert set(said) == {"group: expected no process group as on rank 0, got 'a process group on rank 1'"}


def test_versions_that_choose_by_other_limits(world: Worlds, transport: str) -> None:
    for said in world(2).run(stories.versions_mixed, transport):
        assert "of rank 1 differs from" in said
        assert said.endswith("install the same version of crossdock everywhere")


@pytest.mark.slow
def test_ten_thousand_iterations(world: Worlds, transport: str) -> None:
    world(2).run(stories.many_iterations, transport, 10_000)


def test_groups_of_one_world(world: Worlds, transport: str) -> None:
    world(4).run(stories.groups, transport)


def test_samples(world: Worlds, transport: str) -> None:
    records = [("all_gather", 48), ("reduce_scatter", 48), ("all_reduce", 48)]
    assert world(3).run(stories.samples, transport) == [records] * 3


def test_forked_child(world: Worlds, transport: str) -> None:
    if needs_gpu(transport):
        pytest.skip("a process that uses CUDA cannot be forked")
    world(2).run(stories.after_fork, transport)
