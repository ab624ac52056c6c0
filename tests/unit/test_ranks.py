"""Rank assignment: tables for the rules, random clusters for what must always hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.control.group.ranks import Place, Slot, assign_rank, assign_ranks


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


def test_ranks_that_share_memory_are_consecutive() -> None:
    """Two pods of one node have its name and local ranks of their own."""
    pods = [Place(f"pod-{pod}/{local}", "node", local, memory_domain=f"m{pod}") for local in (0, 1) for pod in (1, 0)]
    ranks = assign_ranks([*pods, Place("other/0", "a", 0, memory_domain="m9")])
    assert sorted(ranks, key=ranks.__getitem__) == ["other/0", "pod-0/0", "pod-0/1", "pod-1/0", "pod-1/1"]
    slots = [Slot(pods[0], live=True), Slot(), Slot(), Slot(pods[1], live=True)]
    assert [assign_rank(pods[number], slots) for number in (2, 3)] == [1, 2], "beside their own"


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


@given(clusters(), st.data())
def test_a_newcomer_never_takes_a_live_slot(places: list[Place], data: st.DataObject) -> None:
    slots = [Slot(one, live=data.draw(st.booleans())) for one in places]
    newcomer = data.draw(st.sampled_from(places)) if places else Place("x", "x")
    rank = assign_rank(newcomer, slots)
    if rank is None:
        assert all(one.live for one in slots)
    else:
        assert not slots[rank].live


def cluster(hosts: int, per_host: int, hosts_per_domain: int, *, crossed: bool = False) -> list[Place]:
    """A large cluster: NVLink domains of so many hosts (0: none); crossed: GPUs are wired to rails in reverse."""
    found = []
    for host in range(hosts):
        domain = f"nvl-{host // hosts_per_domain}" if hosts_per_domain else ""
        area = (f"zone-{host // 64 % 2}", f"block-{host // 32}", f"rack-{host // 8}")
        for local in range(per_host):
            rail = per_host - 1 - local if crossed else local
            found.append(Place(f"h{host}/{local}", f"h{host}", local, domain, rail, area))
    return found


@pytest.mark.parametrize(
    ("hosts", "per_host", "hosts_per_domain"),
    [(1, 8, 1), (2, 8, 1), (4, 4, 4), (18, 4, 18), (36, 4, 18), (64, 8, 1), (128, 8, 0), (256, 8, 1), (512, 4, 16)],
)
@pytest.mark.parametrize("crossed", [False, True])
def test_large_clusters(hosts: int, per_host: int, hosts_per_domain: int, crossed: bool) -> None:
    """Up to 2,048 ranks: domains and hosts are consecutive, each rank stands on the rail of its number, areas too."""
    places = cluster(hosts, per_host, hosts_per_domain, crossed=crossed)
    ranks = assign_ranks(reversed(places))
    ordered = sorted(places, key=lambda one: ranks[one.uid])
    assert [ranks[one.uid] for one in ordered] == list(range(hosts * per_host))
    assert [one.rail for one in ordered] == [*range(per_host)] * hosts
    for key in (lambda one: one.neighbourhood, lambda one: one.hostname, lambda one: one.area):
        runs = [name for name, _ in itertools.groupby(ordered, key)]
        if hosts_per_domain <= 8 or key(ordered[0]) != ordered[0].area:  # a domain that is larger than a rack wins
            assert len(runs) == len(set(runs)), f"not consecutive: {runs}"


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 8), (18, 4), (256, 8)])
def test_a_returning_host_gets_its_ranks_back(hosts: int, per_host: int) -> None:
    """In any order of arrival, beside strangers' holes, and under new names: by uid, else by host and local rank."""
    places = cluster(hosts, per_host, 1)
    ranks = assign_ranks(places)
    slots = [Slot(one, live=True) for one in sorted(places, key=lambda one: ranks[one.uid])]
    away = [one for one in places if one.hostname in {"h0", f"h{hosts - 1}"}]
    for one in away:
        slots[ranks[one.uid]] = Slot(one)
    for renamed in (False, True):
        now = list(slots)
        for one in reversed(away):
            back = Place(f"new-{one.uid}", one.hostname, one.local_rank, one.nvlink_domain) if renamed else one
            rank = assign_rank(back, now)
            assert rank == ranks[one.uid]
            now[rank] = Slot(back, live=True)


def test_labels_that_some_workers_lack_tear_no_domain_apart() -> None:
    places = [Place(f"h{n}/0", f"h{n}", 0, f"d{n % 2}", 0, ("", "", "r" if n < 3 else "")) for n in range(6)]
    ordered = [uid for uid, _ in sorted(assign_ranks(places).items(), key=lambda item: item[1])]
    assert ordered == ["h0/0", "h2/0", "h4/0", "h1/0", "h3/0", "h5/0"]


def test_rails_count_only_where_all_of_a_host_tell_theirs() -> None:
    places = [
        Place("a/0", "a", 0, rail=1),
        Place("a/1", "a", 1, rail=0),
        Place("b/0", "b", 0, rail=1),
        Place("b/1", "b", 1),
    ]
    assert assign_ranks(places) == {"a/1": 0, "a/0": 1, "b/0": 2, "b/1": 3}
