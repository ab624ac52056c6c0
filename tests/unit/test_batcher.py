"""The queue of one rank: order, fairness, cutting and removal. Pure: time is a number that the test gives."""

from __future__ import annotations

import random
from collections import Counter

import torch

from crossdock.worker.steps.batcher import Batcher, Head
from crossdock.worker.steps.work import Work


def work(
    client: str,
    layer: int = 1,
    num_tokens: int = 1,
    arrived_ns: int = 0,
    deadline_ns: int = 1 << 60,
    stream: str = "",
) -> Work:
    return Work(
        client=client,
        stream=stream,
        layer=layer,
        x=torch.empty(num_tokens, 0),
        topk_ids=torch.empty(num_tokens, 0, dtype=torch.int32),
        topk_weights=torch.empty(num_tokens, 0),
        deadline_ns=deadline_ns,
        arrived_ns=arrived_ns,
        reply=lambda _: None,
    )


def filled(*works: Work) -> Batcher:
    batcher = Batcher()
    for each in works:
        batcher.add(each)
    return batcher


def cut(batcher: Batcher, layer: int, max_tokens: int, now_ns: int = 100) -> list[tuple[object, int, int]]:
    return [(piece.work.client, piece.start, piece.stop) for piece in batcher.take(layer, max_tokens, now_ns)]


def test_an_empty_queue_wants_nothing() -> None:
    batcher = Batcher()
    assert not batcher
    assert len(batcher) == 0
    assert batcher.head(0) is None
    assert batcher.take(1, 8, 0) == []
    assert batcher.clear() == []


def test_head_is_the_oldest_request_of_who_waited_longest() -> None:
    batcher = filled(work("b", layer=5, arrived_ns=20), work("a", layer=3, arrived_ns=10, num_tokens=4))
    batcher.add(work("b", layer=3, arrived_ns=30, num_tokens=2))
    assert batcher.head(now_ns=100) == Head(layer=3, waited_ns=90, num_tokens=6)


def test_one_request_per_client_and_round() -> None:
    batcher = filled(*[work("a", arrived_ns=i) for i in range(3)], *[work("b", arrived_ns=10 + i) for i in range(3)])
    assert [client for client, _, _ in cut(batcher, 1, 4)] == ["a", "b", "a", "b"]
    assert len(batcher) == 2


def test_other_layers_stay() -> None:
    batcher = filled(work("a", layer=1), work("a", layer=2), work("b", layer=2))
    assert cut(batcher, 2, 8) == [("a", 0, 1), ("b", 0, 1)]
    assert batcher.head(100) == Head(1, 100, 1)


def test_long_requests_are_cut_and_continued() -> None:
    batcher = filled(work("a", num_tokens=10))
    assert cut(batcher, 1, 4) == [("a", 0, 4)]
    assert batcher.head(100) == Head(1, 0, 6)
    assert cut(batcher, 1, 4) == [("a", 4, 8)]
    last = batcher.take(1, 4, 100)
    assert [(piece.start, piece.stop, piece.is_last) for piece in last] == [(8, 10, True)]
    assert not batcher


def test_a_step_that_serves_requests_as_a_whole_begins_none_that_it_cannot_end() -> None:
    batcher = filled(work("cut", num_tokens=6))
    cut(batcher, 1, 4, now_ns=1)
    for client, num_tokens in (("too long", 9), ("fits later", 7), ("fits", 3), ("other layer", 9)):
        batcher.add(work(client, 2 if client == "other layer" else 1, num_tokens, arrived_ns=5))
    assert (batcher.has_cut(1), batcher.has_cut(2), batcher.has_cut(3)) == (True, False, False)
    assert [piece.work.client for piece in batcher.take(1, 8, 10, whole=True)] == ["cut", "fits"]
    assert not batcher.has_cut(1)
    assert [piece.work.client for piece in batcher.take(1, 8, 10, whole=True)] == ["fits later"]
    assert batcher.take(1, 8, 10, whole=True) == []
    assert batcher.head(10) is not None, "it waits"
    assert cut(batcher, 1, 8) == [("too long", 0, 8)]


def test_a_lone_request_is_not_begun_either() -> None:
    batcher = filled(work("a", num_tokens=9))
    assert batcher.take(1, 8, 10, whole=True) == []
    batcher.add(work("a", num_tokens=1))
    assert batcher.take(1, 8, 10, whole=True) == [], "requests of one stream stay in order"
    assert cut(batcher, 1, 10) == [("a", 0, 9), ("a", 0, 1)]


def test_a_long_request_does_not_hold_up_a_short_one() -> None:
    batcher = filled(work("long", num_tokens=1000))
    cut(batcher, 1, 8, now_ns=10)
    batcher.add(work("short", arrived_ns=5))
    assert cut(batcher, 1, 8, now_ns=20) == [("short", 0, 1), ("long", 8, 15)]


def test_a_flood_of_one_client_delays_another_by_one_step() -> None:
    batcher = filled(*[work("flood", layer=i % 3, arrived_ns=i) for i in range(300)])
    now_ns = 1000
    cut(batcher, 0, 8, now_ns)
    batcher.add(work("late", layer=7, arrived_ns=now_ns + 1))
    head = batcher.head(now_ns + 10)
    assert head is not None
    cut(batcher, head.layer, 8, now_ns + 10)
    second = batcher.head(now_ns + 20)
    assert second is not None
    assert 7 in {head.layer, second.layer}


def test_riding_along_costs_no_turn() -> None:
    """A client whose requests for a busy layer are always taken along still gets its oldest request served."""
    batcher = filled(work("a", layer=9, arrived_ns=0))
    for now_ns in range(10, 200, 10):
        batcher.add(work("a", layer=1, arrived_ns=now_ns))
        batcher.add(work("b", layer=1, arrived_ns=now_ns))
        head = batcher.head(now_ns + 5)
        assert head is not None
        if head.layer == 9:
            return
        cut(batcher, head.layer, 8, now_ns + 5)
    raise AssertionError("layer 9 was never the head")


def test_nobody_starves_and_nothing_is_lost_under_random_load() -> None:
    draw, batcher, taken = random.Random(), Batcher(), Counter[int]()
    works = [work(f"c{draw.randrange(5)}", draw.randrange(4), draw.randint(1, 40), i) for i in range(200)]
    for each in works:
        batcher.add(each)
    longest = 0
    for now_ns in range(1000, 100_000, 10):
        head = batcher.head(now_ns)
        if head is None:
            break
        longest = max(longest, head.waited_ns) if now_ns > 2000 else 0
        pieces = batcher.take(head.layer, 16, now_ns)
        assert 0 < sum(piece.num_tokens for piece in pieces) <= 16
        assert sum(piece.num_tokens for piece in pieces) == min(16, head.num_tokens)
        for piece in pieces:
            assert piece.start == taken[id(piece.work)]
            taken[id(piece.work)] = piece.stop
    assert not batcher
    assert all(taken[id(each)] == each.num_tokens for each in works)
    assert longest <= 10 * 5, "five clients take turns, so nobody waits longer than five steps"


def test_removed_requests_are_gone() -> None:
    first, second = work("a", num_tokens=10), work("a", layer=2)
    batcher = filled(first, second)
    cut(batcher, 1, 4)
    assert batcher.remove(first)
    assert not batcher.remove(first)
    assert batcher.take(1, 8, 0) == []
    assert batcher.head(0) == Head(2, 0, 1)
    assert batcher.clear() == [second]
    assert not batcher.remove(second)


def test_expired() -> None:
    early, late = work("a", deadline_ns=10), work("b", deadline_ns=20)
    batcher = filled(late, early)
    assert batcher.expire(9) == []
    assert batcher.expire(10) == [early]
    assert batcher.expire(10) == []
    batcher.add(earlier := work("a", deadline_ns=15))
    assert batcher.expire(14) == []
    assert batcher.expire(30) == [late, earlier]
    assert not batcher
    assert batcher.expire(40) == []


def test_more_streams_give_a_client_no_more_turns() -> None:
    flood = [work("flood", stream=f"s{i}", arrived_ns=i) for i in range(60)]
    batcher = filled(*flood, *[work("small", arrived_ns=100 + i) for i in range(3)])
    assert [client for client, _, _ in cut(batcher, 1, 6, now_ns=200)] == ["flood", "small"] * 3


def test_streams_of_one_client_take_turns() -> None:
    flood = [work("host", stream="flood", num_tokens=8, arrived_ns=i) for i in range(50)]
    batcher = filled(*flood, work("host", stream="small", arrived_ns=60, layer=2))
    heads = []
    for now_ns in (100, 110):
        head = batcher.head(now_ns)
        assert head is not None
        heads.append(head.layer)
        cut(batcher, head.layer, 8, now_ns)
    assert heads == [1, 2]


class Queueing(Batcher):
    """Keeps no request apart."""

    def add(self, work: Work) -> None:
        super().add(work)
        self._queue_lone()


def test_a_request_that_is_kept_apart_is_served_like_any_other() -> None:
    draw = random.Random(7)
    for _ in range(300):
        both = Batcher(), Queueing()
        pairs = list[tuple[Work, Work]]()
        for now_ns in range(1, 30):
            event = draw.choice(("add", "add", "take", "take", "remove", "expire", "clear"))
            if event == "add":
                fields = (f"c{draw.randrange(2)}", draw.randrange(2), draw.randint(1, 12), now_ns, draw.randint(5, 60))
                pairs.append((work(*fields), work(*fields)))
                for batcher, one in zip(both, pairs[-1], strict=True):
                    batcher.add(one)
            elif event == "take":
                heads = [batcher.head(now_ns) for batcher in both]
                assert heads[0] == heads[1]
                layer = heads[0].layer if heads[0] is not None and draw.random() < 0.8 else 1
                assert cut(both[0], layer, 8, now_ns) == cut(both[1], layer, 8, now_ns)
            elif event == "remove" and pairs:
                pair = draw.choice(pairs)
                assert len({batcher.remove(one) for batcher, one in zip(both, pair, strict=True)}) == 1
            elif event in ("expire", "clear"):
                gone = [batcher.expire(now_ns) if event == "expire" else batcher.clear() for batcher in both]
                assert [one.arrived_ns for one in gone[0]] == [one.arrived_ns for one in gone[1]]
            assert len(both[0]) == len(both[1])
            assert bool(both[0]) == bool(both[1])
