"""The latency part of a group view, for `crossdock status` and `crossdock top`: verdict, wait matrix. No I/O here."""

from __future__ import annotations

from rich.text import Text

from crossdock.protocol.v1.control_pb2 import (
    NOTHING,
    SLOW_RANK,
    VERDICT_KIND_UNSPECIFIED,
    GroupView,
    Verdict,
    VerdictKind,
)


def verdict_dict(verdict: Verdict) -> dict[str, object]:
    """With plain JSON types; `kind` is "unknown" where there are too few steps to tell."""
    known = verdict.kind != VERDICT_KIND_UNSPECIFIED
    return {
        "kind": VerdictKind.Name(verdict.kind).lower() if known else "unknown",
        "ranks": list(verdict.ranks),
        "hosts": list(verdict.hosts),
        "expert": verdict.expert if VerdictKind.Name(verdict.kind) == "HOT_EXPERT" else None,
        "confidence": round(verdict.confidence, 3),
        "lost_share": round(verdict.lost_share, 3),
        "text": verdict.text,
        "age_s": round(verdict.age_s, 1),
        "interval_s": verdict.interval_s,
    }


def verdict_line(verdict: Verdict) -> list[Text]:
    """One line, or none where nothing is named."""
    if verdict.kind in {VERDICT_KIND_UNSPECIFIED, NOTHING}:
        return []
    words = f"{verdict.text} (confidence {verdict.confidence:.2f}, for {verdict.age_s:.0f} s)"
    advice = f"; `crossdock drain {verdict.ranks[0]}` takes it out" if verdict.kind == SLOW_RANK else ""
    return [Text(f"latency: {words}{advice}", style="yellow")]


def waits(view: GroupView) -> dict[int, dict[int, float]]:
    """By rank and peer: share of the rank's step time in which it waited for that peer beyond the typical one."""
    found: dict[int, dict[int, float]] = {}
    for member in view.members:
        latency = member.stats.latency
        shares: dict[int, float] = {}
        for operation in latency.operations:
            for peer, seconds in enumerate(operation.late_s):
                shares[peer] = shares.get(peer, 0.0) + seconds / max(latency.step_s, 1e-9)
        found[member.rank] = shares
    return found
