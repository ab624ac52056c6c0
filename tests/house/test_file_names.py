"""Each file that a comment, a docstring or a page names exists: the name of one that moved misleads the next reader.

A name is looked for by its last parts: `engine.py` is any file of that name, `steps/engine.py` one in a folder `steps`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.tree import ROOT, files, name_of, parsed, text_of

NAME = re.compile(
    r"(?<![\w./*{}<>-])(?:\.{1,2}/)*((?:[\w.-]+/)*[\w-]+(?:\.[\w-]+)*\.(?:py|cuh|cpp|hpp|md|yaml))\b(?![\w(/]|\.\w)"
)
CODE = {".cuh", ".h", ".hpp", ".cpp"}
ELSEWHERE = {
    "NAME.yaml": "of any name",
    "NAME.crd.yaml": "of any name",
    "test_MODULE.py": "of any name",
    "test_ROOM_MODULE.py": "of any name",
    "my.yaml": "a reader's own",
    "typer.py": "what a stranger may leave in a working directory",
    "test_deepep_moe.py": "vLLM's",
}
"""Names of files that are not in the tree, and whose they are."""


@cache
def _tails() -> frozenset[str]:
    """Every file of the tree, by all its last parts."""
    found = set()
    for path in files():
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[first:]) for first in range(len(parts))}
    return frozenset(found)


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and of docstrings, those of attributes included."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of blocks that show commands, configs or output."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


@cache
def remarks(suffix: str, text: str) -> list[tuple[int, str]]:
    """(line, text) of what a file says beside its code."""
    if suffix == ".py":
        return list(_of_python(text))
    if suffix in CODE:
        return [(n, line.partition("//")[2]) for n, line in enumerate(text.splitlines(), 1) if "//" in line]
    return list(_of_page(text)) if suffix == ".md" else []


def unknown(suffix: str, text: str) -> list[tuple[int, str]]:
    """(line, name) of files that are named and do not exist."""
    return [
        (number, name)
        for number, line in remarks(suffix, text)
        for name in NAME.findall(re.sub(r"https?://\S+", "", line))
        if name not in _tails() and name.rsplit("/", 1)[-1] not in ELSEWHERE
    ]


def test_names_elsewhere_are_named_somewhere() -> None:
    said = "\n".join(line for path in files() for _, line in remarks(path.suffix, text_of(path)))
    assert {name for name in ELSEWHERE if name not in said} == set()


def test_files_that_are_named_exist() -> None:
    faults = [
        f"{name_of(path)}:{number} {name}" for path in files() for number, name in unknown(path.suffix, text_of(path))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".py", "x = 1  # see gone.py", ["gone.py"]),
        (".py", '"""As in house/gone.py, and house/tree.py."""', ["house/gone.py"]),
        (".py", 'name = "gone.py"', []),
        (".cuh", "int x;  // steps/tree.py has it", ["steps/tree.py"]),
        (".md", "The [page](gone.md) and `../house/tree.py`, `a.b.yaml`.", ["gone.md", "a.b.yaml"]),
        (".md", "```\ncat gone.py\n```\nhttps://github.com/gone.py", []),
    ],
)
def test_the_rule_sees_a_planted_name(suffix: str, text: str, expected: list[str]) -> None:
    assert [name for _, name in unknown(suffix, text)] == expected
