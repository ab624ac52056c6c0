"""`crossdock trace`: clocks aligned from the operations themselves, and a file that Perfetto reads."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from crossdock.cli.trace import LANES, Offset, answers_of, clock_dict, clock_words, events, of_one_epoch, offsets
from crossdock.common.call_errors import InvalidArgument, Unavailable
from crossdock.protocol.v1.control_pb2 import Member
from crossdock.protocol.v1.expert_pb2 import Operation, TraceRequest, TraceResponse
from crossdock.worker.requests.service import trace_of
from ep_kernels import LatencySample
from tests import tools

US = 1000


def made(clocks: Sequence[int], steps: int = 40, seed: int = 0) -> dict[int, list[Operation]]:
    """Steps of ranks whose clocks are ahead by `clocks` ns; a way takes 5 to 50 us, whichever direction."""
    chance, size, at = random.Random(seed), len(clocks), [1_000_000] * len(clocks)
    found: dict[int, list[Operation]] = {rank: [] for rank in range(size)}
    for seq in range(1, steps + 1):
        for op in ("exchange", "dispatch", "combine"):
            starts = [moment + chance.randrange(20 * US, 200 * US) for moment in at]
            sent = [start + chance.randrange(5 * US, 30 * US) for start in starts]
            for rank in range(size):
                arrived = [sent[peer] + chance.randrange(5 * US, 50 * US) for peer in range(size)]
                waits = [max(0, arrived[peer] - sent[rank]) if peer != rank else 0 for peer in range(size)]
                at[rank] = sent[rank] + max(waits)
                found[rank].append(
                    Operation(
                        op=op, mode="ll", seq=seq, tokens=3, start_ns=starts[rank] + clocks[rank],
                        send_ns=sent[rank] - starts[rank], total_ns=at[rank] - starts[rank], wait_ns=waits,
                    )
                )  # fmt: skip
    return found


def test_offsets_are_within_their_stated_error() -> None:
    clocks = (0, 3_000_000_000, -47 * US, 12)
    found = offsets(made(clocks, seed=random.randrange(1 << 30)))
    assert found[0] == Offset(0, 0.0)
    for rank, clock in enumerate(clocks):
        assert abs(found[rank].offset_ns + clock) <= found[rank].error_ns + 1, rank
        assert found[rank].error_ns <= 50 * US


def test_without_a_common_operation_nothing_is_claimed() -> None:
    trace = made((0, 0), steps=2)
    trace[1] = []
    assert math.isinf(offsets(trace)[1].error_ns)
    assert clock_dict(offsets(trace)[1]) == {"offset_ns": 0, "error_ns": None}
    assert "cannot be aligned" in clock_words(1, offsets(trace)[1])
    assert clock_words(2, Offset(-1500, 250.0)) == "rank 2: clock -1.5 us, +- 0.2 us"


def test_epochs_are_not_mixed_and_all_ranks_begin_together() -> None:
    def answer(rank: int, epoch: int, *seqs: int) -> TraceResponse:
        return TraceResponse(rank=rank, epoch=epoch, operations=[Operation(op="dispatch", seq=seq) for seq in seqs])

    found = of_one_epoch([answer(1, 7, 4, 5), answer(0, 7, 2, 3, 4), answer(2, 6, 90)])
    assert {rank: [one.seq for one in each] for rank, each in found.items()} == {0: [4], 1: [4, 5]}
    assert of_one_epoch([]) == {}


def file_of(clocks: Sequence[int]) -> dict[str, Any]:
    trace = made(clocks, steps=10)
    return {"traceEvents": list(events(trace, offsets(trace)))}


def test_the_file_has_a_process_per_rank_a_lane_per_phase_and_slices_that_nest() -> None:
    found = json.loads(json.dumps(file_of((0, 5_000_000))))["traceEvents"]
    names = [one["args"]["name"] for one in found if one["ph"] == "M" and one["name"] == "process_name"]
    assert names[0] == "rank 0 (clock +- 0.0 us)"
    assert names[1].startswith("rank 1 (clock +- ")
    lanes = [one["args"]["name"] for one in found if one["name"] == "thread_name" and one["pid"] == 2]
    assert lanes == list(LANES)
    slices = [one for one in found if one["ph"] == "X"]
    assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in slices if one["pid"] == 1)
    assert Counter(one["cat"] for one in slices if one["name"] == "experts" and one["pid"] == 1) == {"experts": 10}
    whole = {
        one["name"]: one for one in slices if one["pid"] == 1 and one["cat"] == "dispatch" and one["args"].get("seq")
    }
    parts = [one for one in slices if one["pid"] == 1 and one["cat"] == "dispatch" and "seq" not in one["args"]]
    assert len(whole) == 10
    for part in parts:
        inside = [
            one for one in whole.values()
            if one["ts"] - 1e-6 <= part["ts"] and part["ts"] + part["dur"] <= one["ts"] + one["dur"] + 1e-6
        ]  # fmt: skip
        assert len(inside) == 1, part
    assert any(part["name"] == "wait for rank 1" for part in parts)


def test_perfettos_own_processor_reads_it(tmp_path: Path) -> None:
    api = pytest.importorskip("perfetto.trace_processor", reason="perfetto is not installed")
    config = api.TraceProcessorConfig(bin_path=tools.path("trace_processor_shell"))
    nothing, path = tmp_path / "nothing.json", tmp_path / "trace.json"
    nothing.write_text('{"traceEvents": []}')
    path.write_text(json.dumps(file_of((0, 5_000_000, -70))))
    try:
        api.TraceProcessor(trace=str(nothing), config=config).close()
    except Exception as error:  # where none is on PATH, the package fetches one at first use
        tools.skip("trace_processor_shell", f"cannot be fetched or started: {type(error).__name__}: {error}")
    with api.TraceProcessor(trace=str(path), config=config) as processor:
        counts = "select thread.name as lane, count(*) as n from slice join thread_track on track_id = thread_track.id "
        counts += "join thread using (utid) where depth = 0 group by lane"
        assert {row.lane: row.n for row in processor.query(counts)} == dict.fromkeys(LANES, 30)


def sample(seq: int) -> LatencySample:
    return LatencySample("dispatch", "ll", seq, 5, 1000 + seq, 10, (0, 7), 30)


def test_what_a_worker_answers() -> None:
    samples = [sample(seq) for seq in range(10)]
    found = trace_of(samples, TraceRequest(steps=2), 1, 9)
    assert (found.rank, found.epoch, [one.seq for one in found.operations]) == (1, 9, [4, 5, 6, 7, 8, 9])
    last = found.operations[-1]
    assert (last.op, last.mode, last.tokens, last.start_ns, last.send_ns, last.total_ns, list(last.wait_ns)) == (
        "dispatch", "ll", 5, 1009, 10, 30, [0, 7],
    )  # fmt: skip
    for steps in (0, 1001):
        with pytest.raises(InvalidArgument, match=r"expected 1\.\.1000"):
            trace_of(samples, TraceRequest(steps=steps), 1, 9)
    several: Mapping[int, Sequence[Operation]] = {0: found.operations, 1: found.operations}
    assert len(offsets(several)) == 2


def test_a_rank_that_does_not_answer_hides_no_other() -> None:
    members = [Member(rank=rank) for rank in range(3)]

    def ask(member: Member) -> TraceResponse:
        if member.rank == 1:
            raise Unavailable("no answer within 10 s")
        return TraceResponse(rank=member.rank)

    answers, missing = answers_of(members, ask)
    assert [answer.rank for answer in answers] == [0, 2]
    assert missing == {"1": "no answer within 10 s"}
    with pytest.raises(Unavailable):
        answers_of(members[1:2], ask)
    assert answers_of([], ask) == ([], {})
