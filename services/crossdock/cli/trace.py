"""`crossdock trace`: the last steps of all ranks as a file for Perfetto (ui.perfetto.dev): a lane per rank and phase.

Workers keep their last operations, so nothing is switched on and no step is slowed. `events` is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from crossdock.cli.console import DEFAULT_TARGET, Json, SecurityFile, Timeout, security_of, show_json
from crossdock.protocol.v1.control_pb2 import Member
from crossdock.protocol.v1.expert_pb2 import Operation, TraceRequest, TraceResponse

LANES = ("exchange", "dispatch", "experts", "combine")
Event = dict[str, Any]


Trace = Mapping[int, Sequence[Operation]]
"""Operations by rank."""


@dataclass(frozen=True, slots=True)
class Offset:
    """To be added to a rank's times, to have those of the reference. `error_ns`: infinite where nothing bounds it."""

    offset_ns: int
    error_ns: float


def offsets(trace: Trace) -> dict[int, Offset]:
    """The offset of each rank's clock to that of the lowest rank, estimated from the operations themselves. Pure.

    Rank i has the data of rank j at `a` on its clock, not before j sent it at `p` on j's: offset(i) - offset(j) <= a -
    p for each operation. The least of these is the upper bound, the other direction gives the lower one. The middle is
    the estimate, half of the distance its error: as small as the shortest way there and back."""
    reference = min(trace)
    found = {reference: Offset(0, 0.0)}
    for rank in trace:
        if rank == reference:
            continue
        ahead, behind = _bound(trace, rank, reference), _bound(trace, reference, rank)
        if math.isfinite(ahead) and math.isfinite(behind):  # -behind <= clock(rank) - clock(reference) <= ahead
            found[rank] = Offset(-round((ahead - behind) / 2), abs(ahead + behind) / 2)
        else:
            found[rank] = Offset(0, math.inf)
    return found


def _bound(trace: Trace, receiver: int, sender: int) -> float:
    """The least time from a send at `sender` to its arrival at `receiver`, each by its own clock; infinite: none."""
    sent = {(one.op, one.seq): one.start_ns + one.send_ns for one in trace[sender]}
    ways = [
        one.start_ns + one.send_ns + one.wait_ns[sender] - sent[one.op, one.seq]
        for one in trace[receiver]
        if (one.op, one.seq) in sent and sender < len(one.wait_ns)
    ]
    return min(ways, default=math.inf)


def trace(
    target: Annotated[str, typer.Option("--target", "-t", help="host:port of the control plane.")] = DEFAULT_TARGET,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Of each rank, the last ones.")] = 100,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("trace.json"),
    as_json: Json = False,
    timeout_s: Timeout = 10.0,
    security: SecurityFile = None,
) -> None:
    """Write the last steps of all ranks to a file that Perfetto opens (operators only)."""
    from crossdock.cli.top import fetch
    from crossdock.common.config import ConfigFileError
    from crossdock.common.log import printable

    guards = security_of(security)
    members = fetch(target, timeout_s, security).members
    answers, missing = answers_of(members, lambda member: _ask(member, guards, steps, timeout_s))
    found = of_one_epoch(answers)
    if not any(found.values()):
        raise ConfigFileError(f"--target: expected a group that has taken steps, got none from {len(members)} workers")
    apart = offsets(found)
    try:
        out.write_text(json.dumps({"traceEvents": list(events(found, apart)), "displayTimeUnit": "ns"}))
    except OSError as error:
        raise ConfigFileError(f"--out: {out}: {error.strerror}") from None
    clocks = {str(rank): clock_dict(offset) for rank, offset in apart.items()}
    counts = {str(rank): len(operations) for rank, operations in found.items()}
    if as_json:
        show_json({"file": str(out), "operations": counts, "clocks": clocks, "missing": missing})
    else:
        print(f"{out}: {sum(counts.values())} operations of {len(counts)} ranks; open it at ui.perfetto.dev")
        print(*(clock_words(rank, offset) for rank, offset in apart.items()), sep="\n")
        for rank, why in missing.items():
            print(f"rank {rank} is missing: {printable(why)}")


def answers_of(
    members: Sequence[Member], ask: Callable[[Member], TraceResponse]
) -> tuple[list[TraceResponse], dict[str, str]]:
    """The answers, and by rank why there is none: a rank that hangs or is gone must not hide the others' steps. Raises
    CallError where there is no answer."""
    from crossdock.common.call_errors import CallError

    answers, missing, last = [], {}, None
    for member in members:
        try:
            answers.append(ask(member))
        except CallError as error:
            missing[str(member.rank)], last = str(error), error
    if last is not None and not answers:
        raise last
    return answers, missing


def _ask(member: Member, guards: Any, steps: int, timeout_s: float) -> TraceResponse:
    from crossdock.common import rpc
    from crossdock.protocol.v1.expert_pb2_grpc import ExpertServiceStub

    name = guards.config.worker_name if guards is not None else ""
    with rpc.channel(member.address, security=guards, name=name) as channel:
        answer: TraceResponse = rpc.call_sync(
            ExpertServiceStub(channel).Trace, TraceRequest(steps=steps), timeout_s=timeout_s
        )
    return answer


def of_one_epoch(answers: Iterable[TraceResponse]) -> dict[int, Sequence[Operation]]:
    """Operations by rank, of those that are in the newest epoch, from when all have some: numbers of operations begin
    again with each epoch."""
    answers = list(answers)
    newest = max((answer.epoch for answer in answers), default=0)
    found = {answer.rank: list(answer.operations) for answer in answers if answer.epoch == newest}
    firsts: dict[str, int] = {}
    for operations in found.values():
        for op in {one.op for one in operations}:
            first = min(one.seq for one in operations if one.op == op)
            firsts[op] = max(firsts.get(op, 0), first)
    return {rank: [one for one in each if one.seq >= firsts[one.op]] for rank, each in sorted(found.items())}


def events(trace: Trace, apart: Mapping[int, Offset]) -> Iterator[Event]:
    """Perfetto's JSON: a process per rank, a thread per lane, a slice per operation with its sending and its wait, and
    the experts between dispatch and combine. Microseconds, from the first operation."""
    times = {rank: [one.start_ns + apart[rank].offset_ns for one in operations] for rank, operations in trace.items()}
    zero_ns = min(min(each) for each in times.values() if each)
    for rank, operations in trace.items():
        error_ns = apart[rank].error_ns
        error = f"clock +- {error_ns / 1e3:.1f} us" if math.isfinite(error_ns) else "clock not aligned"
        yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": f"rank {rank} ({error})"}}
        for number, lane in enumerate(LANES, 1):
            yield {"ph": "M", "name": "thread_name", "pid": rank + 1, "tid": number, "args": {"name": lane}}
        dispatched_ns = 0
        for one, start_ns in zip(operations, times[rank], strict=True):
            at_ns = start_ns - zero_ns
            if one.op == "combine" and dispatched_ns:
                yield _slice(rank, "experts", "experts", dispatched_ns, at_ns - dispatched_ns, {"seq": one.seq})
            yield from _operation(rank, one, at_ns)
            dispatched_ns = at_ns + one.total_ns if one.op == "dispatch" else 0


def _operation(rank: int, one: Operation, at_ns: int) -> Iterator[Event]:
    """The slice of an operation, and in it those of its two halves."""
    facts = {"seq": one.seq, "mode": one.mode, "tokens": one.tokens}
    yield _slice(rank, one.op, f"{one.op} {one.seq}", at_ns, one.total_ns, facts)
    yield _slice(rank, one.op, "send", at_ns, min(one.send_ns, one.total_ns), {})
    longest_ns = max(one.wait_ns, default=0)
    wait_ns = min(longest_ns, one.total_ns - one.send_ns)
    if wait_ns > 0:
        peer = list(one.wait_ns).index(longest_ns)
        waits = {f"rank {other}": f"{each / 1e3:.1f} us" for other, each in enumerate(one.wait_ns) if each}
        yield _slice(rank, one.op, f"wait for rank {peer}", at_ns + one.send_ns, wait_ns, waits)


def _slice(rank: int, lane: str, name: str, at_ns: int, lasts_ns: int, facts: Mapping[str, object]) -> Event:
    tid = LANES.index(lane) + 1 if lane in LANES else len(LANES) + 1
    return {
        "ph": "X", "name": name, "cat": lane, "pid": rank + 1, "tid": tid, "ts": at_ns / 1e3,
        "dur": max(0, lasts_ns) / 1e3, "args": dict(facts),
    }  # fmt: skip


def clock_dict(offset: Offset) -> dict[str, object]:
    """With plain JSON types; `error_ns` null: not known."""
    return {"offset_ns": offset.offset_ns, "error_ns": offset.error_ns if math.isfinite(offset.error_ns) else None}


def clock_words(rank: int, offset: Offset) -> str:
    if not math.isfinite(offset.error_ns):
        return f"rank {rank}: its clock cannot be aligned: no operation in common with the first rank"
    return f"rank {rank}: clock {offset.offset_ns / 1e3:+.1f} us, +- {offset.error_ns / 1e3:.1f} us"
