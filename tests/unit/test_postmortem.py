"""Post-mortem records: made where a wait fails, found in logs and in the control plane, told in words."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from crossdock.cli import postmortem
from crossdock.cli.postmortem import conclusion, in_order, read, story, words
from crossdock.common.config import ConfigFileError
from crossdock.common.postmortem_record import MAX_CHARS, parse
from crossdock.control.server.server import MAX_RECORDS, Postmortems
from crossdock.protocol.v1 import control_pb2 as pb
from ep_kernels import LatencySample, PeerTimeout
from ep_kernels.postmortem import record_of

S = 1_000_000_000
TIMEOUT = PeerTimeout(peer=2, op="dispatch", phase="payload", expected=812, seen=811, waited_s=3.0)


def sample(op: str, seq: int, start_s: float, waits_s: tuple[float, ...]) -> LatencySample:
    waits = tuple(int(wait * S) for wait in waits_s)
    return LatencySample(op, "ll", seq, 1, int(start_s * S), 0, waits, S // 10)


def test_a_record_holds_what_the_error_and_the_last_second_say() -> None:
    samples = [
        sample("dispatch", 810, 96.0, (9.0, 9.0, 9.0)),  # more than a second before the end of the last one
        sample("dispatch", 811, 99.5, (0.0, 0.25, 0.5)),
        sample("combine", 811, 99.9, (0.0, 0.0, 0.125)),
    ]
    found = record_of(TIMEOUT, samples, 103 * S)
    assert json.loads(json.dumps(found)) == found
    assert [found[key] for key in ("op", "phase", "peer", "expected", "seen", "waited_s")] == [
        "dispatch", "payload", 2, 812, 811, 3.0,
    ]  # fmt: skip
    assert found["last_good"] == {"op": "combine", "seq": 811, "ago_s": 3.0}
    assert found["waits_s"] == {"dispatch": [0.0, 0.25, 0.5], "combine": [0.0, 0.0, 0.125]}


def test_without_samples_and_of_other_errors() -> None:
    assert record_of(TIMEOUT, [], 0)["last_good"] is None
    assert "block" not in record_of(TIMEOUT, [], 0)
    of_kernel = PeerTimeout(peer=2, op="combine", phase="payload", expected=2, seen=1, waited_s=1.0, block=131)
    assert record_of(of_kernel, [], 0)["block"] == 131
    found = record_of(ValueError("x" * 5000), [], 0)
    assert set(found) == {"reason", "last_good", "waits_s"}
    assert len(str(found["reason"])) == 1000


def record(rank: int, peer: int, unix_s: float = 100.0, epoch: int = 7, **more: Any) -> dict[str, Any]:
    made = record_of(TIMEOUT, [sample("combine", 811, 97.0, (0.0, 0.0, 0.125))], 100 * S)
    return {"unix_s": unix_s, "rank": rank, "epoch": epoch, "steps": 9, **made, "peer": peer, **more}


def test_words_say_who_waited_for_whom_since_when() -> None:
    said = words(record(0, 2))
    assert "rank 0 in epoch 7: dispatch 812 waited 3.000 s for rank 2 (payload), which was last seen at 811" in said
    assert "last operation that ended well was combine 811, 2.900 s before" in said
    assert "waited 0.125 s for rank 2 in combine" in said
    assert "for rank 2 (payload, block 131), which" in words(record(0, 2, block=131))
    assert "its process is gone" in words(record(0, 2, gone=True))
    assert words({"rank": 1, "epoch": 2, "reason": "no"}) == "rank 1 in epoch 2: no"
    assert words({"rank": 1, "epoch": 2, "peer": 0, "waits_s": "x", "waited_s": None}), "whatever a log may hold"


def test_the_conclusion_follows_the_chain() -> None:
    assert "rank 2: ranks 0, 3 waited for it; it has no record itself" in conclusion([record(0, 2), record(3, 2)])
    chain = conclusion([record(0, 1), record(1, 2)])
    assert "rank 2: rank 1 waited for it" in chain
    assert "rank 1:" not in chain
    circle = conclusion([record(0, 1), record(1, 0)])
    assert "rank 0: rank 1 waited for it; it waited for rank 1 itself" in circle
    old = conclusion([record(0, 2, epoch=6), record(0, 1)])
    assert old.startswith("epoch 7 ended at rank 1")
    assert conclusion([]) == ""


def test_logs_of_all_ranks_become_one_story(tmp_path: Path) -> None:
    first, second = record(0, 2, unix_s=100.25), record(1, 2, unix_s=100.125)
    line = "2026-11-25T12:00:00.000Z warning crossdock.worker.steps.engine postmortem {} host=a rank=0"
    log = tmp_path / "a.log"
    log.write_text("\n".join(["noise {", line.format(json.dumps(first)), line.format("{broken"), '{"a": 1}']))
    other = tmp_path / "b.log"
    other.write_text(f"{json.dumps(second)}\n{line.format(json.dumps(first))}\n")
    events = read([log, other])
    assert [event.record for event in events] == [second, first], "by time, each once"
    lines = story(events)
    assert lines[0].startswith("00:01:40.125  rank 1")
    assert "rank 2: ranks 0, 1 waited for it" in lines[-1]
    with pytest.raises(ConfigFileError, match="No such file"):
        read([tmp_path / "none"])


HOSTILE: list[dict[str, Any]] = [
    {"peer": "1"}, {"peer": [1]}, {"peer": None}, {"epoch": "7"}, {"epoch": {}}, {"epoch": 10**400}, {"rank": True},
    {"unix_s": float("nan")}, {"unix_s": float("inf")}, {"unix_s": 1e300}, {"unix_s": "now"}, {"waited_s": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("fields", HOSTILE)
def test_a_record_with_wrong_types_is_none(fields: dict[str, Any]) -> None:
    text = json.dumps({**record(0, 2), **fields})
    assert parse(text) is None
    kept = Postmortems()
    kept.record(pb.HeartbeatRequest(worker=pb.WorkerId(uid="a/0"), postmortem=text))
    assert not kept.message().postmortems


def test_a_record_that_is_nested_too_deeply_is_none() -> None:
    assert parse('{"rank": 1, "x": ' + "[" * 8000) is None


def test_whatever_else_a_record_holds_has_words() -> None:
    """And a text of a worker moves no cursor of the terminal: escapes of JSON get past a check of the line itself."""
    strange = record(
        0, 2, last_good={"op": ["x"], "seq": {}, "ago_s": 10**400}, phase="\x1b[2J\x1b]0;x\x07", seen=-1,
        waits_s={"dispatch": [10**400, float("nan"), "x", 0.5], "combine": 3},
    )  # fmt: skip
    text = json.dumps(strange)
    assert text.isprintable()
    found = parse(text)
    assert found is not None
    lines = story(in_order([found, record(1, 2, reason="no\nyes")], [postmortem.Event(1.0, "epoch 1\x9b2J")]))
    assert all(line.isprintable() for line in lines)
    assert "\\u001b[2J" in "".join(lines)
    assert "0.500 s for rank 3 in dispatch" in "".join(lines)


def test_a_log_of_any_size_and_kind_is_read_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    line = f"2026 warning x postmortem {json.dumps(record(0, 2))}\n".encode()
    with log.open("wb") as file:
        file.write(b"\xff\x00{" * 100_000 + b"\n" + line + line[:-30])
        file.truncate(1 << 30)  # and a gigabyte without an end of line
    tracemalloc.start()
    lines = postmortem._lines(log)
    found = [one for one in map(parse, itertools.islice(lines, 500)) if one is not None]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [record(0, 2)]
    assert most < 8 << 20


def test_the_control_plane_keeps_each_record_once_and_not_too_many() -> None:
    kept = Postmortems()

    def says(uid: str, text: str) -> None:
        kept.record(pb.HeartbeatRequest(worker=pb.WorkerId(uid=uid), postmortem=text))

    good = json.dumps(record(0, 2))
    for text in (good, good, "", "{", '{"rank": "x"}', "x" * (MAX_CHARS + 1), good.replace("{", "{\n", 1)):
        says("a/0", text)
    assert [one.record for one in kept.message().postmortems] == [good]
    for number in range(MAX_RECORDS + 5):
        says("b/0", json.dumps(record(1, 2, unix_s=number)))
    assert len(kept.message().postmortems) == MAX_RECORDS
    assert parse(kept.message().postmortems[-1].record) == record(1, 2, unix_s=MAX_RECORDS + 4)


def test_changes_of_the_group_stand_between_the_records() -> None:
    change = postmortem.Event(100.2, "epoch 8 is EXCHANGING: rank 2 lost")
    events = in_order([record(0, 2, unix_s=100.3), record(1, 2, unix_s=100.1)], [change])
    assert [event.text.split()[1] for event in events] == ["1", "8", "0"]
    assert postmortem.event_dict(change) == {"unix_s": 100.2, "text": change.text, "record": None}
