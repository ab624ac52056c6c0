"""The verdict on a group's latency: modelled groups with one fault each, recorded ones, and what heartbeats may say."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from crossdock.common.call_errors import InvalidArgument
from crossdock.common.metrics import ControlMetrics
from crossdock.control.latency import latency_watch as latency
from crossdock.control.latency import verdict
from crossdock.control.latency.verdict import Judgement, RankTimes, Usual, judge
from crossdock.protocol.v1 import control_pb2 as pb
from tests.house.tree import ROOT
from tests.unit.lockstep import Lockstep

ONE, TWO, THREE = ("a",) * 8, ("a",) * 4 + ("b",) * 4, ("a", "a", "b", "b", "c", "c")


def found(group: Lockstep, steps: int = 400, usual: Usual | None = None) -> tuple[object, ...]:
    return judge(group.run(steps, random.randrange(1 << 30)), usual).named


def test_nothing_stands_out_among_equals() -> None:
    for hosts in (ONE, ONE[:4], TWO, THREE, ("a", "a"), ("a", "b")):
        assert found(Lockstep(hosts)) == ("nothing", (), (), -1)
        assert found(Lockstep(hosts, noise=2.0)) == ("nothing", (), (), -1)


@pytest.mark.parametrize("hosts", [ONE, ONE[:4], ONE[:3], TWO, THREE, ("a", "a")])
def test_a_slow_rank(hosts: tuple[str, ...]) -> None:
    rank = random.randrange(len(hosts))
    assert found(Lockstep(hosts, slow={rank: 2.0})) == ("slow_rank", (rank,), (), -1)
    assert found(Lockstep(hosts, stop=(rank, 0.25, 0.05))) == ("slow_rank", (rank,), (), -1)


def test_a_slow_link_does_not_make_its_ends_slow_ranks() -> None:
    group = Lockstep(ONE[:4], wire_s=lambda i, j: 4e-3 * ({i, j} == {1, 3}))
    assert found(group) == ("slow_link", (1, 3), (), -1)
    one_way = Lockstep(ONE[:4], wire_s=lambda i, j: 4e-3 * ((i, j) == (1, 3)))
    assert found(one_way) == ("slow_link", (1, 3), (), -1)


def test_a_slow_line_between_hosts_and_a_slow_host() -> None:
    line = Lockstep(TWO, wire_s=lambda i, j: 4e-3 * (TWO[i] != TWO[j]))
    calm = verdict.usual_of(Lockstep(TWO).run(200, 1))
    assert found(line, usual=calm) == ("slow_link", tuple(range(8)), ("a", "b"), -1)
    assert found(line)[0] == "nothing", "of two hosts nobody knows what their line usually costs"
    assert found(line, usual=verdict.usual_of(line.run(200, 1)))[0] == "nothing", "it was never faster"
    of_three = Lockstep(THREE, wire_s=lambda i, j: 4e-3 * ({THREE[i], THREE[j]} == {"a", "c"}))
    assert found(of_three) == ("slow_link", (0, 1, 4, 5), ("a", "c"), -1)
    assert found(Lockstep(TWO, slow=dict.fromkeys(range(4, 8), 2.0))) == ("slow_host", (4, 5, 6, 7), ("b",), -1)
    assert found(Lockstep(THREE, slow={2: 2.0, 3: 2.0})) == ("slow_host", (2, 3), ("b",), -1)


def test_a_hot_expert_and_skewed_routing_are_no_slow_rank() -> None:
    hot = Lockstep(ONE, rows={5: 300}, hot={5: (42, 220)})
    assert found(hot) == ("hot_expert", (5,), (), 42)
    assert found(replace(hot, hot={5: (42, 60)})) == ("skewed_routing", (5,), (), -1)
    assert found(replace(hot, slow={5: 4.0})) == ("slow_rank", (5,), (), -1), "its rows take longer, too"


def test_all_are_slower_than_usual() -> None:
    calm = verdict.usual_of(Lockstep(ONE).run(400, 1))
    assert calm is not None
    slower = Lockstep(ONE, slow=dict.fromkeys(range(8), 3.0))
    assert found(slower, usual=calm) == ("uniform_slowness", tuple(range(8)), (), -1)
    assert found(Lockstep(ONE), usual=calm)[0] == "nothing"
    assert found(slower)[0] == "nothing", "nobody knows better"
    more_rows = Lockstep(ONE, rows=dict.fromkeys(range(8), 300))
    assert found(more_rows, usual=calm)[0] == "nothing", "three times the work in three times the time"


def test_too_few_steps_tell_nothing() -> None:
    assert found(Lockstep(ONE, slow={1: 3.0}), steps=verdict.MIN_STEPS - 1)[0] == "unknown"
    times = Lockstep(ONE, slow={1: 3.0}).run(400, 1)
    assert judge({**times, 7: replace(times[7], steps=3)}).kind == "unknown", "one rank has not been heard"
    assert judge({}).kind == "unknown"


def test_precision_and_recall_on_modelled_faults() -> None:
    """The full table is made by `python -m tests.observability.score`."""
    from tests.observability.score import modelled

    wrong, alarms = modelled(cases=40, seed=random.randrange(1 << 30))
    assert wrong <= 0.05
    assert alarms <= 0.01


def test_recorded_faults_are_named_and_calm_groups_are_not() -> None:
    """What heartbeats of real groups said, kept beside the published figures; a rule that changes must keep them."""
    from tests.observability.score import rates, read, recorded

    paths = sorted((ROOT / "docs" / "results" / "2026-11-25-verdict").glob("*.jsonl.gz"))
    counts, shown = recorded([look for path in paths for look in read(path)])
    assert counts.total() > 150
    wrong, alarms = rates(counts)
    assert wrong <= 0.05, counts
    assert alarms <= 0.01, counts
    assert rates(shown)[1] == 0, shown


def report(**fields: object) -> pb.LatencyReport:
    made = pb.LatencyReport(interval_s=1, steps=5, step_s=0.5, rows=10, hot_expert=3, hot_rows=4)
    made.operations.add(op="combine", count=5, p50_s=0.1, p99_s=0.2, late_s=[0, 1, 2])
    made.MergeFrom(pb.LatencyReport(**fields))  # type: ignore[arg-type]
    return made


def test_what_a_heartbeat_may_say() -> None:
    latency.check(report(), 3)
    latency.check(pb.LatencyReport(), 3)
    bad = [
        (report(), 2, "<= 2 ranks"),
        (pb.LatencyReport(step_s=float("nan")), 3, "seconds >= 0"),
        (pb.LatencyReport(experts_s=-1), 3, "seconds >= 0"),
        (pb.LatencyReport(operations=[pb.OperationLatency(op="x")]), 3, "one of"),
        (pb.LatencyReport(operations=[pb.OperationLatency(op="combine")] * 4), 3, "<= 3 operations"),
        (pb.LatencyReport(operations=[pb.OperationLatency(op="combine", late_s=[float("inf")])]), 3, "seconds >= 0"),
        (report(step_s=5e-324), 3, "0 or >= 1e-09 seconds"),
        (report(rows=1 << 63), 3, "counts <= 1099511627776"),
        (pb.LatencyReport(operations=[pb.OperationLatency(op="combine", count=1 << 41)]), 3, "counts <= "),
    ]
    for message, size, words in bad:
        with pytest.raises(InvalidArgument, match=words):
            latency.check(message, size)


def members(number: int) -> Any:
    """A group that serves, of members "a", "b", ..."""
    made = [
        SimpleNamespace(
            uid=chr(ord("a") + rank),
            rank=rank,
            worker=SimpleNamespace(place=SimpleNamespace(memory_domain="", hostname="h")),
        )
        for rank in range(number)
    ]
    return SimpleNamespace(
        epoch=3,
        phase=latency.Phase.SERVING,
        members=made,
        taking_part=frozenset(range(number)),
        member=lambda uid: next((one for one in made if one.uid == uid), None),
    )


SERVING = type("Serving", (), {"epoch": 3, "phase": latency.Phase.SERVING, "members": (), "taking_part": frozenset()})()


class Told:
    """A LatencyWatch of which each look finds what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metrics, self.now, self.finding = ControlMetrics(), 100.0, Judgement("nothing")
        self.made = latency.LatencyWatch(self.metrics)
        monkeypatch.setattr(latency.verdict, "judge", lambda times, usual: self.finding)
        self.made.tick(SERVING, self.now)

    def look(self, finding: Judgement) -> str:
        self.finding, self.now = finding, self.now + latency.JUDGE_EVERY_S
        self.made.tick(SERVING, self.now)
        return self.made.said.finding.kind

    def exported(self) -> Mapping[str, float]:
        family = next(one for one in self.metrics.registry.collect() if one.name == "crossdock_verdict_lost_ratio")
        return {f"{one.labels['kind']} {one.labels['subject']}": one.value for one in family.samples}


def test_one_look_names_nobody_and_two_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told, slow = Told(monkeypatch), Judgement("slow_rank", (2,), lost_share=0.4, confidence=0.9)
    told.look(Judgement("nothing"))
    for one in (Judgement("nothing"), slow, Judgement("nothing"), slow):
        assert told.look(one) == "nothing", "one look is not enough"
    assert told.exported() == {}
    assert told.look(slow) == "slow_rank"
    assert told.exported() == {"slow_rank rank 2": 0.4}
    assert "verdict" in caplog.text
    told.look(replace(slow, lost_share=0.3))
    assert told.exported() == {"slow_rank rank 2": 0.3}, "the same, with new figures, at once"
    other = Judgement("slow_rank", (1,), lost_share=0.2)
    assert told.look(other) == "slow_rank"
    assert told.made.said.finding.ranks == (2,)
    told.look(other)
    assert told.exported() == {"slow_rank rank 1": 0.2}, "one series at a time"
    told.look(Judgement("nothing"))
    assert told.look(Judgement("nothing")) == "nothing"
    assert told.exported() == {}


def test_only_a_rank_that_is_surely_slow_for_long_enough_is_offered_for_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, group, held_s = Told(monkeypatch), members(3), 30.0
    sure = Judgement("slow_rank", (2,), lost_share=0.4, confidence=0.9, detail="d")

    def offered(finding: Judgement) -> object:
        told.look(finding)
        return told.made.slow(group, held_s, told.now)

    looks = [offered(sure) for _ in range(9)]
    assert looks[:7] == [None] * 7, "named at the second look, 30 s are six more"
    assert [(one.uid, one.reason) for one in looks[7:]] == [("c", "slow for 30 s: d"), ("c", "slow for 35 s: d")]  # type: ignore[attr-defined]
    assert offered(replace(sure, confidence=0.6)) is None
    assert offered(sure) is not None
    assert offered(replace(sure, ranks=(1,))) is None, "another one, not named yet"
    assert [offered(replace(sure, kind="slow_host", ranks=(0, 1), hosts=("h",))) for _ in range(9)] == [None] * 9


def test_another_epoch_or_another_leader_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    told, slow = Told(monkeypatch), Judgement("slow_rank", (2,), lost_share=0.4)
    told.look(slow)
    assert told.look(slow) == "slow_rank"
    told.metrics.clear_group()
    assert told.exported() == {}
    forming = type("Forming", (), {"epoch": 4, "phase": latency.Phase.FORMING})()
    told.made.tick(forming, told.now)
    assert told.made.said.finding.kind == "unknown"


def test_words_name_what_was_found() -> None:
    cases = {
        "rank 2 is slow: x": Judgement("slow_rank", (2,), detail="x"),
        "host h (ranks 2, 3) is slow": Judgement("slow_host", (2, 3), ("h",)),
        "the link between ranks 0, 2 is slow": Judgement("slow_link", (0, 2)),
        "the link between a and b is slow": Judgement("slow_link", (0, 2), ("a", "b")),
        "expert 7 on rank 1 is hot": Judgement("hot_expert", (1,), expert=7),
        "the routing favours rank 1": Judgement("skewed_routing", (1,)),
        "all ranks are slower than before": Judgement("uniform_slowness", (0, 1)),
        "nothing stands out": Judgement("nothing"),
        "not known yet": Judgement("unknown"),
    }
    assert {latency.text_of(one): one for one in cases.values()} == cases
    words = {"VERDICT_KIND_UNSPECIFIED": "unknown"}
    assert {words.get(name, name.lower()) for name, _ in pb.VerdictKind.items()} == {one.kind for one in cases.values()}


def test_hosts_are_named_as_people_know_them() -> None:
    """A memory domain is made of the host's boot id, unless it is configured."""

    def place(rank: int, hostname: str, domain: str) -> Any:
        worker = SimpleNamespace(place=SimpleNamespace(memory_domain=domain, hostname=hostname))
        return SimpleNamespace(rank=rank, worker=worker)

    two = [place(0, "node-a", "9f1c/40/0"), place(1, "node-a", "9f1c/40/0"), place(2, "node-b", "77aa/40/0")]
    assert latency.host_names(two) == {0: "node-a", 1: "node-a", 2: "node-b"}
    pods = [place(0, "node-a", "9f1c/40/0"), place(1, "node-a", "9f1c/41/0"), place(2, "node-b", "77aa/40/0")]
    assert latency.host_names(pods) == {0: "node-a (9f1c/40/0)", 1: "node-a (9f1c/41/0)", 2: "node-b"}
    shared = [place(0, "pod-0", "d"), place(1, "pod-1", "d")]
    assert latency.host_names(shared) == {0: "pod-0", 1: "pod-0"}
    assert latency.host_names([place(0, "alone", "")]) == {0: "alone"}


def test_reports_add_up() -> None:
    total = pb.LatencyReport()
    for one in (report(), report(), report(hot_expert=9, hot_rows=1)):
        latency._add(total, one)
    assert (total.steps, total.rows, total.interval_s) == (15, 30, 3.0)
    assert list(total.operations[0].late_s) == [0, 3, 6]
    assert (total.operations[0].count, total.operations[0].p99_s) == (15, 0.2)


def test_the_largest_reports_that_are_accepted_add_up() -> None:
    most = 1 << 40
    count = pb.OperationLatency(op="combine", count=most, wait_s=1e9, late_s=[1e9, 1e9])
    one = pb.LatencyReport(
        interval_s=1e9, steps=most, step_s=1e9, experts_s=1e9, tokens=most, rows=most, hot_rows=most, operations=[count]
    )
    latency.check(one, 2)
    group = members(2)
    watch = latency.LatencyWatch(ControlMetrics())
    watch.tick(group, 0.0)
    for _ in range(latency.MAX_REPORTS + 1):
        for member in group.members:
            beat = pb.HeartbeatRequest(worker=pb.WorkerId(uid=member.uid), epoch=3, stats=pb.WorkerStats(latency=one))
            watch.record(group, beat, 1.0)
    watch.tick(group, 10.0)
    assert watch.total("a").rows == latency.MAX_REPORTS * most


def test_fields_that_are_not_known_are_not_kept() -> None:
    """A megabyte of them in each of 256 reports of each member."""
    group, watch = members(1), latency.LatencyWatch(ControlMetrics())
    watch.tick(group, 0.0)
    field_99 = b"\x9a\x06\x80\x80\x04" + b"x" * (1 << 16)
    nested = pb.OperationLatency.FromString(pb.OperationLatency(op="combine").SerializeToString() + field_99)
    large = pb.LatencyReport.FromString(report(operations=[nested]).SerializeToString() + field_99)
    assert large.ByteSize() > 2 << 16
    stats = pb.WorkerStats(latency=large)
    watch.record(group, pb.HeartbeatRequest(worker=pb.WorkerId(uid="a"), epoch=3, stats=stats), 1.0)
    ((_, kept),) = watch._reports["a"]
    assert kept.ByteSize() < 1000
    assert kept.steps == 5


def test_views_add_reports_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any client may ask for views, as often as its rate allows; 64 ranks' reports take 30 ms of the event loop."""
    group, added = members(2), []
    watch = latency.LatencyWatch(ControlMetrics())
    watch.tick(group, 0.0)
    add = latency._add
    monkeypatch.setattr(latency, "_add", lambda total, report: added.append(1) or add(total, report))

    def beat(uid: str) -> None:
        stats = pb.WorkerStats(latency=report())
        watch.record(group, pb.HeartbeatRequest(worker=pb.WorkerId(uid=uid), epoch=3, stats=stats), 1.0)

    def steps() -> list[int]:
        view = pb.GroupView(members=[pb.Member(worker=pb.WorkerId(uid=uid)) for uid in ("a", "b", "c")])
        watch.show(view, 2.0)
        return [member.stats.latency.steps for member in view.members]

    beat("a")
    beat("b")
    assert steps() == steps() == steps() == [5, 5, 0]
    assert len(added) == 2
    beat("b")
    assert steps() == [5, 10, 0]
    watch.forget("b")
    assert steps() == [5, 0, 0]


def times(**fields: object) -> RankTimes:
    return replace(RankTimes(100, 1.0, 0.6, 0.5, 100, 0, 10, {}, "a"), **fields)  # type: ignore[arg-type]


def test_ranks_that_compute_no_rows() -> None:
    late = {"combine": (0.0, 0.0, 0.6, 0.0)}
    idle = times(rows=0, hot_rows=0, experts_s=0.0, late_s=late)
    busy = times(rows=800, hot_rows=200, waits_s=0.0)
    assert judge({0: idle, 1: idle, 2: busy, 3: idle}).named == ("skewed_routing", (2,), (), -1)
