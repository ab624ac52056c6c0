"""Rank assignment: tables for the rules, random clusters for what must always hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.control.ranks import Place, Slot, assign_rank, assign_ranks


def place(text: str) -> Place:
    """`host/local` or `host/local@domain`."""
    uid, _, domain = text.partition("@")
    host, _, local = uid.partition("/")
    return Place(uid, host, int(local), domain)


def slot(text: str) -> Slot:
    """`host/0` live, `(host/0)` reserved for one who left, `-` nobody's."""
    if text == "-":
        return Slot()
    return Slot(place(text.strip("()")), live=not text.startswith("("))


@pytest.mark.parametrize(
    ("arriving", "expected"),
    [
        pytest.param("a/1 a/0", "a/0 a/1", id="local-rank"),
        pytest.param("b/0 a/1 b/1 a/0", "a/0 a/1 b/0 b/1", id="host-before-local-rank"),
        pytest.param("h10/0 h9/0 h2/0", "h2/0 h9/0 h10/0", id="numbers-in-names"),
        pytest.param("h07/1 h7/0 h07/0 h7/1", "h07/0 h07/1 h7/0 h7/1", id="numbers-written-in-two-ways"),
        pytest.param("a/10 a/9", "a/9 a/10", id="numbers-in-local-ranks"),
        pytest.param("a/0@y b/0@x c/0@y d/0@x", "b/0 d/0 a/0 c/0", id="domain-before-host"),
        pytest.param("a/0 b/0@z", "b/0 a/0", id="no-domain-last"),
        pytest.param("a/1@x a/0@y", "a/1 a/0", id="two-domains-on-one-host"),
        pytest.param("", "", id="nobody"),
    ],
)
def test_fresh_group(arriving: str, expected: str) -> None:
    ranks = assign_ranks(place(text) for text in arriving.split())
    assert sorted(ranks, key=ranks.__getitem__) == expected.split()
    assert sorted(ranks.values()) == list(range(len(ranks)))


@pytest.mark.parametrize(
    ("newcomer", "slots", "expected"),
    [
        pytest.param("a/1", "a/0 (a/1) (a/2) -", 1, id="its-own-slot"),
        pytest.param("a/1", "- (a/1) -", 1, id="its-own-slot-before-a-free-one"),
        pytest.param("b/0", "(a/0) - (a/2)", 1, id="unreserved-before-reserved"),
        pytest.param("b/2", "(a/0) (b/1) a/1", 1, id="reserved-by-its-host"),
        pytest.param("c/0@x", "(a/0@y) (b/0@x)", 1, id="reserved-by-its-domain"),
        pytest.param("b/1", "a/0 - - b/0", 2, id="beside-its-host"),
        pytest.param("c/1@x", "a/0@y - b/0@x -", 1, id="beside-its-domain-lowest"),
        pytest.param("z/0", "(a/0) (b/0)", 0, id="lowest-of-strangers"),
        pytest.param("a/0", "a/1 b/0", None, id="full"),
    ],
)
def test_newcomer(newcomer: str, slots: str, expected: int | None) -> None:
    assert assign_rank(place(newcomer), [slot(text) for text in slots.split()]) == expected


def test_a_worker_under_another_name_gets_its_seat_back() -> None:
    slots = [Slot(), Slot(Place("old", "a", 3)), Slot(Place("a/0", "a", 0), live=True)]
    assert assign_rank(Place("new", "a", 3), slots) == 1


names = st.text("ab01", max_size=3)


@st.composite
def clusters(draw: st.DrawFn) -> list[Place]:
    """Hosts with a few workers each; a host lies in one domain or in none."""
    hosts = draw(st.lists(st.tuples(names, names, st.integers(1, 4)), max_size=5, unique_by=lambda host: host[0]))
    return [Place(f"{host}/{local}", host, local, domain) for host, domain, count in hosts for local in range(count)]


@settings(deadline=None)
@given(clusters(), st.randoms())
def test_neighbours_in_rank_are_neighbours_in_hardware(places: list[Place], random: object) -> None:
    shuffled = list(places)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ranks = assign_ranks(shuffled)
    assert ranks == assign_ranks(places)
    assert sorted(ranks.values()) == list(range(len(places)))
    ordered = sorted(places, key=lambda one: ranks[one.uid])
    for key in (lambda one: one.neighbourhood, lambda one: one.hostname):
        runs = [name for name, _ in itertools.groupby(ordered, key)]
        assert len(runs) == len(set(runs)), f"not consecutive: {runs}"


@settings(deadline=None)
@given(clusters(), st.data())
def test_a_newcomer_never_takes_a_live_slot(places: list[Place], data: st.DataObject) -> None:
    slots = [Slot(one, live=data.draw(st.booleans())) for one in places]
    newcomer = data.draw(st.sampled_from(places)) if places else Place("x", "x")
    rank = assign_rank(newcomer, slots)
    if rank is None:
        assert all(one.live for one in slots)
    else:
        assert not slots[rank].live
