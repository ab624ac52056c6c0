"""What `crossdock top` and the latency lines of `crossdock status` make of a group view."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from crossdock.cli import status, top
from crossdock.cli.latency_view import waits
from crossdock.cli.top import as_dict, as_screen
from crossdock.common.call_errors import Unavailable
from crossdock.protocol.v1 import control_pb2 as pb


def report(rank: int, size: int) -> pb.LatencyReport:
    """Everybody waits for rank 1."""
    made = pb.LatencyReport(interval_s=15, steps=300, step_s=10.0, experts_s=2.5, tokens=3000, rows=6000)
    late = [4.2 if peer == 1 != rank else 0.1 * (peer != rank) for peer in range(size)]
    made.operations.add(op="combine", count=300, p50_s=41.25e-6, p99_s=0.0123, late_s=late, wait_s=4.5)
    return made


def view(size: int = 4) -> pb.GroupView:
    made = pb.GroupView(epoch=7, state=pb.SERVING, world_size=size)
    for rank in range(size):
        stats = pb.WorkerStats(queued_requests=rank, latency=report(rank, size))
        made.members.add(rank=rank, worker=pb.WorkerId(uid=f"a/{rank}"), hostname="a", ready=True, stats=stats)
    made.verdict.CopyFrom(
        pb.Verdict(
            kind=pb.SLOW_RANK,
            ranks=[1],
            confidence=0.91,
            lost_share=0.4,
            text="rank 1 is slow: x",
            age_s=12,
            interval_s=15,
        )
    )
    return made


def rendered(what: object, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_waits_are_shares_of_a_ranks_own_steps() -> None:
    found = waits(view())
    assert found[0] == pytest.approx({0: 0.0, 1: 0.42, 2: 0.01, 3: 0.01})
    assert found[1] == pytest.approx({0: 0.01, 1: 0.0, 2: 0.01, 3: 0.01})
    assert waits(pb.GroupView(members=[pb.Member(rank=3)])) == {3: {}}


def test_json_has_rates_quantiles_waits_and_the_verdict() -> None:
    said = json.loads(json.dumps(as_dict(view())))
    assert (said["state"], said["epoch"], said["world_size"]) == ("SERVING", 7, 4)
    first = said["ranks"][0]
    assert (first["tokens_per_s"], first["steps_per_s"], first["rows_per_s"]) == (200, 20, 400)
    assert (first["busy_share"], first["experts_share"]) == (0.6667, 0.25)
    assert first["operations"] == {"combine": {"count": 300, "p50_s": 41.25e-6, "p99_s": 0.0123, "wait_s": 4.5}}
    assert first["waits_for"]["1"] == 0.42
    assert said["verdict"] == {
        "kind": "slow_rank", "ranks": [1], "hosts": [], "expert": None, "confidence": 0.91, "lost_share": 0.4,
        "text": "rank 1 is slow: x", "age_s": 12.0, "interval_s": 15.0,
    }  # fmt: skip


def test_the_screen_has_a_row_per_rank_twice_and_the_verdict() -> None:
    lines = rendered(as_screen(view(), "a:7400")).splitlines()
    assert lines[0].startswith("SERVING  epoch 7  4/4 ranks")
    rows = [line.split() for line in lines[3:7]]
    assert [row[:2] for row in rows] == [[str(rank), "ready"] for rank in range(4)]
    assert rows[0][-1] == "41.2us/12.3ms"
    heat = [line.split() for line in lines if line.startswith("rank ")][-4:]
    assert heat[0] == ["rank", "0", ".", "42", "1", "1"]
    assert heat[1] == ["rank", "1", "1", ".", "1", "1"]
    assert "latency: rank 1 is slow: x (confidence 0.91, for 12 s); `crossdock drain 1` takes it out" in lines[-1]


def test_a_control_plane_that_is_gone_for_a_while_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader, or a restart: the last view stays, with the reason, until there is another."""
    answers = [view(), Unavailable("connection\x1b[2J refused"), view(2), KeyboardInterrupt()]

    def fetch(*_: object) -> pb.GroupView:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    screen = Console(width=120, force_terminal=True, color_system=None)
    monkeypatch.setattr(top, "fetch", fetch)
    monkeypatch.setattr(top, "console", lambda: screen)
    with screen.capture() as capture, pytest.raises(KeyboardInterrupt):
        top.top(every_s=0.01)
    shown = capture.get()
    assert "no answer, this is the last view: connection\\u001b[2J refused" in shown
    assert shown.index("4/4 ranks") < shown.index("no answer") < shown.index("2/2 ranks")


def test_of_64_ranks_what_does_not_fit_is_named() -> None:
    said = rendered(as_screen(view(64), "a:7400", 80), 80)
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "not shown: peers 17 and up" in said


def test_a_group_without_reports() -> None:
    made = pb.GroupView(state=pb.FORMING, world_size=2, members=[pb.Member(rank=0)])
    made.verdict.text = "not known yet"
    assert "not known yet" in rendered(as_screen(made, "a:1"))
    assert as_dict(made)["verdict"]["kind"] == "unknown"  # type: ignore[index]


def test_status_says_the_same() -> None:
    made = view()
    assert "latency: rank 1 is slow" in rendered(status.as_table(made, "a:7400", (), 160), 160)
    assert status.as_dict(made)["verdict"] == as_dict(made)["verdict"]
    made.verdict.CopyFrom(pb.Verdict(kind=pb.NOTHING, text="nothing stands out"))
    assert "latency" not in rendered(status.as_table(made, "a:7400", (), 160), 160)
