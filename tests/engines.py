"""Which calls of `deep_ep` an engine makes, counted and recorded: `make test-sglang ARGS=--record-calls`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

import crossdock
from crossdock.deep_ep import Buffer, ElasticBuffer

FILE = Path(crossdock.__file__).parent / "deep_ep" / "tried.json"
Calls = dict[str, list[str]]
"""By class, names in alphabetical order."""


class Tried(msgspec.Struct, frozen=True):
    """One release of an engine, and what its own classes called of `deep_ep` in the tests."""

    engine: str
    version: str
    calls: Calls


def tried() -> list[Tried]:
    """All that are recorded, by name."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Tried])


@contextmanager
def counted() -> Iterator[Calls]:
    """What is called meanwhile; complete at the end."""
    found: Calls = {}
    with ExitStack() as stack:
        for kind in (Buffer, ElasticBuffer):
            for name in (n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n))):
                stack.enter_context(mock.patch.object(kind, name, _told(kind, name, found)))
        yield found


def _told(kind: type, name: str, found: Calls) -> Any:
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        names = found.setdefault(kind.__name__, [])
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if name not in names and caller not in ("crossdock", "tests"):
            names.append(name)
            names.sort()
        return plain(*args, **kwargs)

    is_static = any(isinstance(vars(base).get(name), staticmethod) for base in kind.__mro__)
    return staticmethod(call) if is_static else call


def record(config: pytest.Config, engine: str, version: str, calls: Calls) -> None:
    """Add them to `crossdock/deep_ep/tried.json`, with --record-calls."""
    if not config.getoption("--record-calls"):
        return
    known = {(each.engine, each.version): each for each in tried()}
    before = known.get((engine, version), Tried(engine, version, {})).calls
    both = {name: sorted({*before.get(name, []), *calls.get(name, [])}) for name in sorted({*before, *calls})}
    known[engine, version] = Tried(engine, version, both)
    rows = sorted(known.values(), key=lambda each: (each.engine, each.version))
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def table() -> str:
    """Which engine calls what, as Markdown."""
    known = tried()
    names = sorted({(kind, name) for each in known for kind, found in each.calls.items() for name in found})
    head = " | ".join(f"{each.engine} {each.version}" for each in known)
    rows = [
        f"| `{kind}.{name}` | " + " | ".join("yes" if name in each.calls.get(kind, []) else "" for each in known) + " |"
        for kind, name in names
    ]
    return "\n".join([f"| call | {head} |", "|---" * (1 + len(known)) + "|", *rows])
