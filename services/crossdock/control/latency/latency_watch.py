"""Latency of a group: the reports of its members over the last interval, and the verdict on them.

A verdict is taken up when two looks in a row agree, and dropped when two in a row say something else: one bad second
names no rank. It is shown in views, exported as a metric, and logged when it changes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossdock.common import log as logs
from crossdock.common.call_errors import InvalidArgument
from crossdock.common.metrics import ControlMetrics
from crossdock.control.group.group_state import Group, Member, Phase, Slow
from crossdock.control.latency import verdict
from crossdock.control.latency.verdict import Judgement, RankTimes, Usual
from crossdock.protocol.v1 import control_pb2 as pb

INTERVAL_S = 15.0
"""Reports are kept this long, at least LEAST of each member; and until they hold enough steps, up to LONGEST_S."""
LEAST, LONGEST_S = 3, 60.0
SURE = 0.7
"""Confidence from which on a slow rank may be replaced."""
JUDGE_EVERY_S = 5.0
MAX_REPORTS = 256
_LEAST_S, _MOST_S = 1e-9, 1e9
_MOST_COUNT = 1 << 40
"""Limits of a report's figures: MAX_REPORTS of them still add up in a message, and time divides."""
_NEW = 0.1
"""Share of a calm interval in what is usual."""
_UNKNOWN = Judgement("unknown", detail="no report yet")

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict and when it was first said."""

    finding: Judgement
    since: float


class LatencyWatch:
    """Reports and verdict of one group."""

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._reports: dict[str, deque[tuple[float, pb.LatencyReport]]] = {}
        self._totals: dict[str, pb.LatencyReport] = {}
        self.said = Said(_UNKNOWN, 0.0)
        self._last = _UNKNOWN
        self._look_at = 0.0
        self._usual: Usual | None = None
        self._epoch = 0
        self._exported: tuple[str, str] | None = None

    def record(self, group: Group, request: pb.HeartbeatRequest, now: float) -> None:
        """Keep the report of a member's heartbeat, and take it out of its stats."""
        report, uid = request.stats.latency, request.worker.uid
        member = group.member(uid)
        if member is not None and report.interval_s and request.epoch == group.epoch:
            report.DiscardUnknownFields()  # they may be as large as a message
            kept = self._reports.setdefault(uid, deque(maxlen=MAX_REPORTS))
            kept.append((now, pb.LatencyReport.FromString(report.SerializeToString())))
            self._totals.pop(uid, None)
        request.stats.ClearField("latency")

    def forget(self, uid: str) -> None:
        self._reports.pop(uid, None)
        self._totals.pop(uid, None)

    def tick(self, group: Group, now: float) -> None:
        """Look at the reports, at intervals."""
        if group.epoch != self._epoch or group.phase is not Phase.SERVING:
            self._epoch, self._usual, self._last = group.epoch, None, _UNKNOWN
            self._reports.clear()
            self._totals.clear()
            self._say(_UNKNOWN, now)
            return
        if now < self._look_at:
            return
        self._look_at = now + JUDGE_EVERY_S
        self._expire(now)
        found = verdict.judge(self.times(group), self._usual)
        agreed, self._last = found.named == self._last.named, found
        if found.kind == "nothing":
            self._learn(group)
        if agreed or found.named == self.said.finding.named:
            self._say(found, now)

    def slow(self, group: Group, held_s: float, now: float) -> Slow | None:
        """The rank that was called slow for `held_s` and still is, for sure."""
        found, uids = self.said.finding, {member.rank: member.uid for member in group.members}
        held = found.kind == "slow_rank" and now - self.said.since >= held_s and found.named == self._last.named
        if not (held and min(found.confidence, self._last.confidence) >= SURE and found.ranks[0] in uids):
            return None
        return Slow(uids[found.ranks[0]], f"slow for {now - self.said.since:.0f} s: {found.detail}")

    def times(self, group: Group) -> Mapping[int, RankTimes]:
        """The ranks' figures of the interval."""
        hosts = host_names(group.members)
        return {
            member.rank: _times(self.total(member.uid), hosts[member.rank])
            for member in group.members
            if member.rank in group.taking_part
        }

    def total(self, uid: str) -> pb.LatencyReport:
        """A member's reports of the interval, added up. Kept until the next report: any caller may ask for views."""
        total = self._totals.get(uid)
        if total is None and uid in self._reports:
            total = self._totals[uid] = pb.LatencyReport()
            for _, report in self._reports[uid]:
                _add(total, report)
        return pb.LatencyReport() if total is None else total

    def show(self, view: pb.GroupView, now: float) -> None:
        """Put the verdict, and each member's figures of the interval, into a view."""
        for member in view.members:
            member.stats.latency.CopyFrom(self.total(member.worker.uid))
        view.verdict.CopyFrom(self._message(now))

    def _message(self, now: float) -> pb.Verdict:
        found = self.said.finding
        return pb.Verdict(
            kind="VERDICT_KIND_UNSPECIFIED" if found.kind == "unknown" else found.kind.upper(),
            ranks=found.ranks,
            hosts=found.hosts,
            expert=max(0, found.expert),
            confidence=found.confidence,
            lost_share=found.lost_share,
            text=text_of(found),
            age_s=max(0.0, now - self.said.since),
            interval_s=INTERVAL_S,
        )

    def _expire(self, now: float) -> None:
        self._totals.clear()
        for kept in self._reports.values():
            steps = sum(report.steps for _, report in kept)
            while len(kept) > LEAST and kept[0][0] <= now - INTERVAL_S:
                steps -= kept[0][1].steps
                if steps < verdict.MIN_STEPS and kept[0][0] > now - LONGEST_S:
                    break
                kept.popleft()

    def _learn(self, group: Group) -> None:
        now = verdict.usual_of(self.times(group))
        if now is None:
            return
        self._usual = self._usual.mixed(now, _NEW) if self._usual is not None else now

    def _say(self, found: Judgement, now: float) -> None:
        before = self.said.finding
        changed = found.named != before.named
        self.said = Said(found, now if changed else self.said.since)
        self._measure()
        if changed and found.kind != "unknown" and {found.kind, before.kind} != {"unknown", "nothing"}:
            say = log.info if found.kind == "nothing" else log.warning
            figures = {"confidence": found.confidence, "lost_share": round(found.lost_share, 3)}
            say("verdict", kind=found.kind, text=text_of(found), before=before.kind, **figures)

    def _measure(self) -> None:
        found, before = self.said.finding, self._exported
        gauge = self._metrics.verdict_lost_ratio
        self._exported = (found.kind, _subject(found)) if found.kind not in {"unknown", "nothing"} else None
        if self._exported is not None:
            gauge.labels(*self._exported).set(found.lost_share)
        if before is not None and before != self._exported:  # afterwards: no scrape may find a gap
            gauge.remove(*before)


def check(report: pb.LatencyReport, world_size: int) -> None:
    """Check the report of a heartbeat. Raises InvalidArgument."""
    if len(report.operations) > len(verdict.OPS):
        raise InvalidArgument(f"latency: expected <= {len(verdict.OPS)} operations, got {len(report.operations)}")
    times = [report.interval_s, report.step_s, report.experts_s]
    if any(0 < number < _LEAST_S for number in times):
        raise InvalidArgument(f"latency: expected 0 or >= {_LEAST_S:g} seconds, got {times}")
    counts = [report.steps, report.tokens, report.rows, report.hot_rows, *(one.count for one in report.operations)]
    if max(counts) > _MOST_COUNT:
        raise InvalidArgument(f"latency: expected counts <= {_MOST_COUNT}, got {max(counts)}")
    numbers = [*times]
    for one in report.operations:
        if one.op not in verdict.OPS or len(one.late_s) > world_size:
            got = f"{one.op[:16]!r} and {len(one.late_s)}"
            raise InvalidArgument(f"latency: expected one of {verdict.OPS} and <= {world_size} ranks, got {got}")
        numbers += [one.p50_s, one.p99_s, one.wait_s, *one.late_s]
    if not all(math.isfinite(number) and 0 <= number <= _MOST_S for number in numbers):
        raise InvalidArgument("latency: expected seconds >= 0, got others")


def text_of(found: Judgement) -> str:
    return f"{_headline(found)}: {found.detail}" if found.detail else _headline(found)


def _headline(found: Judgement) -> str:
    ranks = ", ".join(map(str, found.ranks))
    match found.kind:
        case "slow_rank":
            return f"rank {ranks} is slow"
        case "slow_host":
            return f"host {found.hosts[0]} (ranks {ranks}) is slow"
        case "slow_link":
            ends = " and ".join(found.hosts) if len(found.hosts) > 1 else f"ranks {ranks}"
            return f"the link between {ends} is slow"
        case "hot_expert":
            return f"expert {found.expert} on rank {ranks} is hot"
        case "skewed_routing":
            return f"the routing favours rank {ranks}"
        case "uniform_slowness":
            return "all ranks are slower than before"
        case "nothing":
            return "nothing stands out"
    return "not known yet"


def _subject(found: Judgement) -> str:
    """The named rank, host, link or expert, as the value of a label."""
    if found.kind == "hot_expert":
        return f"expert {found.expert}"
    if found.hosts:
        return " - ".join(found.hosts)
    return " - ".join(f"rank {rank}" for rank in found.ranks) if found.kind != "uniform_slowness" else "all"


def _add(total: pb.LatencyReport, report: pb.LatencyReport) -> None:
    for name in ("interval_s", "steps", "step_s", "experts_s", "tokens", "rows"):
        setattr(total, name, getattr(total, name) + getattr(report, name))
    if report.hot_expert == total.hot_expert:
        total.hot_rows += report.hot_rows
    elif report.hot_rows > total.hot_rows:
        total.hot_expert, total.hot_rows = report.hot_expert, report.hot_rows
    sums = {one.op: one for one in total.operations}
    for one in report.operations:
        into = sums.get(one.op)
        if into is None:
            total.operations.add().CopyFrom(one)
            continue
        whole = into.count + one.count
        into.p50_s += (one.p50_s - into.p50_s) * one.count / max(whole, 1)  # of the interval, about
        into.p99_s = max(into.p99_s, one.p99_s)
        into.count, into.wait_s = whole, into.wait_s + one.wait_s
        late = [a + b for a, b in zip(into.late_s, one.late_s, strict=False)]
        into.late_s[:] = late if len(into.late_s) == len(one.late_s) else list(one.late_s)


def host_names(members: Sequence[Member]) -> dict[int, str]:
    """By rank, a name of those that share memory with it, for people: that of the first one's host, with the memory
    domain behind it where a host has several."""
    domains = {member.rank: member.worker.place.memory_domain or member.worker.place.hostname for member in members}
    hosts: dict[str, str] = {}
    for member in members:
        hosts.setdefault(domains[member.rank], member.worker.place.hostname)
    alike = Counter(hosts.values())
    names = {domain: host if alike[host] == 1 else f"{host} ({domain})" for domain, host in hosts.items()}
    return {rank: names[domain] for rank, domain in domains.items()}


def _times(total: pb.LatencyReport, host: str) -> RankTimes:
    late = {one.op: tuple(one.late_s) for one in total.operations}
    waits_s = sum(one.wait_s for one in total.operations)
    return RankTimes(
        total.steps, total.step_s, waits_s, total.experts_s, total.rows, total.hot_expert, total.hot_rows, late, host
    )
