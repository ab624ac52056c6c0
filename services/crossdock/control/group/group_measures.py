"""The group's state as metrics: gauges of its members, and how long it was without service, and why."""

from __future__ import annotations

from collections import Counter

from crossdock.common.metrics import ControlMetrics
from crossdock.control.group import blame
from crossdock.control.group.group_state import Group, Phase

STATES = ("ready", "joining", "sick", "spare", "cordoned", "quarantined")
_EXCLUDED = ("cordoned", "quarantined")


class GroupMeasures:
    """Metrics of one leadership.

    Args:
        metrics: of the control plane.
    """

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._since: float | None = None
        self._cause = self._lost = ""

    def lost(self, cause: str) -> None:
        """A member was lost; called before `changed`."""
        self._metrics.members_lost_total.labels(cause=cause).inc()
        self._lost = self._lost or cause

    def blamed(self, rank: int) -> None:
        """A member reported that rank silent."""
        self._metrics.silent_rank_reports_total.labels(rank=str(rank)).inc()

    def changed(self, before: Group, after: Group, now: float) -> None:
        """The state has changed. Time without service counts from the end of a serving epoch; its cause is the first
        loss, else silence that was reported."""
        if (after.phase, after.epoch) == (before.phase, before.epoch):
            self._lost = ""
            return
        self._metrics.group_state_transitions_total.labels(to=after.phase.value).inc()
        if before.phase is Phase.SERVING and self._since is None:
            self._since, self._cause = now, self._lost or ("silent" if after.broken_ranks else "other")
        self._lost = ""
        if after.phase is Phase.SERVING and self._since is not None:
            self._metrics.reform_duration_seconds.labels(cause=self._cause).observe(now - self._since)
            self._since = None

    def measure(self, group: Group) -> None:
        """Set the gauges."""
        metrics, active = self._metrics, group.active
        metrics.epoch.set(group.epoch)
        metrics.members.set(len(group.members))
        metrics.active_ranks.set(len(group.members) if active is None else len(active))
        barred = Counter(bar.cause for bar in group.bars)
        for cause in _EXCLUDED:
            metrics.excluded_workers.labels(cause=cause).set(barred[cause])
        for phase in Phase:
            metrics.group_state.labels(state=phase.value).set(phase is group.phase)
        self.measure_members(group)

    def measure_members(self, group: Group) -> None:
        """Set the gauges that change without a change of the view, too."""
        sick = blame.sick(group)
        self._metrics.sick_ranks.set(len(sick))
        states = Counter(
            "sick" if member.uid in sick else "ready" if member.ready else "joining" for member in group.members
        )
        states["spare"] = len(group.spares)
        states.update({cause: sum(bar.cause == cause for bar in group.bars) for cause in _EXCLUDED})
        for state in STATES:
            self._metrics.member_states.labels(state=state).set(states[state])
