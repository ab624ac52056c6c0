"""`crossdock postmortem`: what happened when waits failed, in words, in order, over all ranks.

From log files of workers, or from the control plane. `story` is pure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from crossdock.cli.console import DEFAULT_TARGET, Json, SecurityFile, Timeout, security_of, show_json
from crossdock.common.postmortem_record import is_number, parse

Record = Mapping[str, Any]
_MOST_LINE = 1 << 16
"""Characters of a line of a log that are read at once."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `record`: of a rank; None: a change of the group."""

    unix_s: float
    text: str
    record: Record | None = None


def postmortem(
    files: Annotated[list[Path] | None, typer.Argument(help="Log files of workers; by default --target.")] = None,
    target: Annotated[str, typer.Option("--target", "-t", help="host:port of the control plane.")] = "",
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Show the waits for a rank that failed, of all ranks, in order of time. Exit status 1 if none did."""
    from crossdock.common.config import ConfigFileError

    if files and target:
        raise ConfigFileError("expected FILES or --target, got both")
    events = read(files) if files else fetch(target or DEFAULT_TARGET, timeout_s, security)
    records = [event.record for event in events if event.record is not None]
    if as_json:
        show_json({"events": [event_dict(event) for event in events], "conclusion": conclusion(records)})
    elif not records:
        print("no wait has failed, as far as is known here")
    else:
        print(*story(events), sep="\n")
    raise typer.Exit(0 if records else 1)


def read(files: Iterable[Path]) -> list[Event]:
    """The records in log files, in order, each once. Raises ConfigFileError."""
    from crossdock.common.config import ConfigFileError

    distinct = {}
    for path in files:
        try:
            for record in filter(None, map(parse, _lines(path))):
                distinct[json.dumps(record, sort_keys=True)] = record
        except OSError as error:
            raise ConfigFileError(f"FILES: {path}: {error.strerror}") from None
    return in_order(distinct.values(), [])


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file of any size; long ones in pieces."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_MOST_LINE):
            yield line


def fetch(target: str, timeout_s: float, security: Path | None) -> list[Event]:
    """What the control plane has kept, in order. Raises CallError."""
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import GroupState, PostmortemsRequest

    kept = ask_leader(target, security_of(security), "Postmortems", PostmortemsRequest(), timeout_s)
    records = [{**record, "uid": one.uid} for one in kept.postmortems if (record := parse(one.record)) is not None]
    changes = [
        Event(one.unix_s, f"epoch {one.epoch} is {GroupState.Name(one.state)}: {one.reason}") for one in kept.changes
    ]
    return in_order(records, changes)


def in_order(records: Iterable[Record], changes: Iterable[Event]) -> list[Event]:
    failed = [Event(_number(record.get("unix_s")), words(record), record) for record in records]
    return sorted([*failed, *changes], key=lambda event: event.unix_s)


def words(record: Record) -> str:
    who = f"rank {record.get('rank')} in epoch {record.get('epoch')}"
    if "peer" not in record:
        return f"{who}: {record.get('reason')}"
    peer = record["peer"]
    end = "its process is gone" if record.get("gone") else "it was given up" if record.get("given_up") else ""
    phase = record.get("phase") if record.get("block") is None else f"{record.get('phase')}, block {record['block']}"
    parts = [
        f"{who}: {record.get('op')} {record.get('expected')} waited {_number(record.get('waited_s')):.3f} s for rank"
        f" {peer} ({phase}), which was last seen at {record.get('seen')}" + (f": {end}" if end else "")
    ]
    good = record.get("last_good")
    if isinstance(good, dict):
        parts.append(
            f"its last operation that ended well was {good.get('op')} {good.get('seq')},"
            f" {_number(good.get('ago_s')):.3f} s before"
        )
    waits = _longest(record.get("waits_s"))
    if waits:
        parts.append(f"in the second before that it waited {waits}")
    return "; ".join(parts)


def conclusion(records: Sequence[Record]) -> str:
    """Who was silent first, of the last epoch with records: whom others waited for and who waited for no rank."""
    if not records:
        return ""
    epoch = max(_number(record.get("epoch")) for record in records)
    waiting = {r["rank"]: r["peer"] for r in records if r.get("epoch") == epoch and "peer" in r and "rank" in r}
    if not waiting:
        return f"epoch {epoch:.0f}: no rank names another"
    blamed = sorted(set(waiting.values()) - set(waiting)) or sorted(set(waiting.values()))
    lines = []
    for peer in blamed:
        by = sorted(rank for rank, named in waiting.items() if named == peer)
        gone = any(r.get("gone") for r in records if r.get("peer") == peer and r.get("epoch") == epoch)
        itself = f"it waited for rank {waiting[peer]} itself" if peer in waiting else "it has no record itself"
        state = "its process is gone" if gone else itself
        lines.append(f"rank {peer}: rank{'s' if len(by) > 1 else ''} {', '.join(map(str, by))} waited for it; {state}")
    return f"epoch {epoch:.0f} ended at " + "; ".join(lines)


def story(events: Sequence[Event]) -> list[str]:
    """A line for each event, printable, and the conclusion. Times are those of the hosts' own clocks."""
    from crossdock.common.log import printable

    records = [event.record for event in events if event.record is not None]
    lines = [f"{_clock(event.unix_s)}  {printable(event.text)}" for event in events]
    return [*lines, "", conclusion(records)]


def event_dict(event: Event) -> dict[str, object]:
    return {"unix_s": event.unix_s, "text": event.text, "record": event.record}


def _longest(waits: object, most: int = 3) -> str:
    """The longest waits of all operations: "0.41 s for rank 2 in dispatch, ..."."""
    if not isinstance(waits, dict):
        return ""
    cells = [
        (_number(seconds), rank, op)
        for op, row in waits.items()
        if isinstance(row, list)
        for rank, seconds in enumerate(row)
    ]
    longest = sorted((cell for cell in cells if cell[0] > 0), reverse=True)[:most]
    return ", ".join(f"{seconds:.3f} s for rank {rank} in {op}" for seconds, rank, op in longest)


def _number(value: object) -> float:
    return float(value) if is_number(value) else 0.0  # type: ignore[arg-type]


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}"
