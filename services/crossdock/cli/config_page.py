"""Every field of every config, from the types: `crossdock config` prints it, docs/configuration.md is the same text."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from crossdock.common import config as configs
from crossdock.common.settings import SecurityConfig

PROGRAMS: dict[type[msgspec.Struct], str] = {
    configs.HostConfig: "`crossdock up --config FILE`",
    configs.ControlConfig: "`crossdock control --config FILE`",
    configs.WorkerConfig: "`crossdock worker --config FILE`",
    configs.FrameworkConfig: "the file that CROSSDOCK_CONFIG names, inside vLLM or beside our `deep_ep`",
    SecurityConfig: "`--security FILE` of the other commands",
}
"""Who reads which config as a file of its own; the others are parts of these."""

_HEAD = """\
# Configuration

Made from the types by `make schema`; `crossdock config` prints the same. A file is YAML; `--set path.to.field=value`
changes one field and wins over the file. Unknown fields are refused. A default `{}` means the defaults of its fields.
"""
_UNITS = (("_per_s", "per second"), ("_s", "seconds"), ("_us", "microseconds"), ("_bytes", "bytes"))
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a config.

    Attributes:
        name: as it is written.
        type: in words, with limits and unit.
        default: as JSON; "" = it has none and must be given.
        meaning: of the field, and the reason of its default.
    """

    name: str
    type: str
    default: str
    meaning: str


def kinds() -> list[type[msgspec.Struct]]:
    """Every config, each program's before its parts."""
    found: list[type[msgspec.Struct]] = []
    waiting: list[type[msgspec.Struct]] = list(PROGRAMS)
    while waiting:
        kind = waiting.pop(0)
        if kind not in found:
            found.append(kind)
            waiting += [part for field in msgspec.structs.fields(kind) for part in _parts(field.type)]
    return found


def fields_of(kind: type[msgspec.Struct]) -> list[Field]:
    meanings = _meanings(kind)
    types = get_type_hints(kind, include_extras=True)
    made = []
    for field in msgspec.structs.fields(kind):
        unit = next((f" ({unit})" for end, unit in _UNITS if field.name.endswith(end)), "")
        default = "" if field.required else _default(field)
        made.append(Field(field.name, _words(types[field.name]) + unit, default, meanings.get(field.name, "")))
    return made


def page() -> str:
    """docs/configuration.md."""
    parts = [_HEAD]
    for kind in kinds():
        about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
        read = f" Read from {PROGRAMS[kind]}." if kind in PROGRAMS else ""
        rows = [_row(field) for field in fields_of(kind)]
        head = ["| field | type | default | meaning |", "|---|---|---|---|"]
        text = textwrap.fill(f"{about}{read}", 120, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join([f"## {kind.__name__}", "", text, "", *head, *rows, ""]))
    return "\n".join(parts)


def _row(field: Field) -> str:
    default = f"`{field.default}`" if field.default else "none: must be given"
    return "| " + " | ".join(map(_cell, (f"`{field.name}`", field.type, default, field.meaning))) + " |"


def as_dict() -> dict[str, list[dict[str, str]]]:
    """Plain JSON types: the fields by the name of their config."""
    return {kind.__name__: [msgspec.to_builtins(field) for field in fields_of(kind)] for kind in kinds()}


def _default(field: Any) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "{}" if isinstance(value, msgspec.Struct) else json.dumps(msgspec.to_builtins(value))


def _parts(type_: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        yield type_
    for inner in get_args(type_):
        yield from _parts(inner)


def _words(type_: Any) -> str:
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Annotated:
        limits = {sign: getattr(inner[1], name) for name, sign in _LIMITS.items()}
        return ", ".join(
            [_words(inner[0]), *(f"{sign} {limit}" for sign, limit in limits.items() if limit is not None)]
        )
    if origin in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if origin is Literal:
        return " or ".join(json.dumps(word) for word in inner)
    if origin is tuple:
        return f"list of {_words(inner[0])}"
    if origin is dict:
        return f"{_words(inner[0])}: {_words(inner[1])}"
    if type_ in _WORDS:
        return _WORDS[type_]
    return f"[{type_.__name__}](#{type_.__name__.lower()})"


def _meanings(kind: type) -> dict[str, str]:
    """The text below each field in the source of the class and of those that it extends."""
    found: dict[str, str] = {}
    for one in kind.__mro__[::-1]:
        if one.__module__.partition(".")[0] != "crossdock":
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
