"""Words that the glossary gives one meaning: where names of the product may have them, and what names have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.house.tree import ROOT, name_of, parsed, python_files, text_of


class Use(NamedTuple):
    """Where a word may stand in a name.

    Attributes:
        folders: in any name there.
        names: elsewhere.
    """

    folders: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()


USES = {
    "plan": Use(("ep_kernels/",)),
    "step": Use(("ep_kernels/", "services/crossdock/"), frozenset()),
    "turn": Use(names=frozenset({"_Turn", "_turn"})),
    "way": Use(),
    "room": Use(names=frozenset({"has_room", "make_room", "_make_room", "_on_room", "_room"})),
    "means": Use(),
    "look": Use(("services/crossdock/deep_ep/",), frozenset({"look_for_peer", "_look_at_the_write"})),
    "quiet": Use(("ep_kernels/",), frozenset({"QUIET_S"})),
    "given": Use(
        names=frozenset({"GIVEN_UP", "_GIVEN_UP", "given_up", "is_given_up", "has_given_up", "_GIVEN", "_GIVEN_AT"})
    ),
    "told": Use(),
}
NEVER = {
    "step": ("services/crossdock/control/group/", "services/crossdock/host/", "ep_kernels/transports/nvlink/gpu/"),
}
"""Folders whose subject once had the word for something else."""


def words_of(name: str) -> set[str]:
    """The words of a name in snake or camel case, without a plural's s."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return words | {word[:-1] for word in words if word.endswith("s")}


def declared(stem: str, text: str) -> Iterator[str]:
    """Names of a module, its classes and functions, and of what it assigns at its top."""
    yield stem
    tree = parsed(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def misused(where: str, name: str) -> list[str]:
    """Words of a name that mean something else there."""
    return [
        word
        for word, use in USES.items()
        if word in words_of(name)
        and (where.startswith(NEVER.get(word, ())) or not (where.startswith(use.folders) or name in use.names))
    ]


def test_names_have_words_in_their_meaning() -> None:
    faults = [
        f"{name_of(path)}: {name}: {word}"
        for path in python_files("ep_kernels", "services")
        for name in sorted(set(declared(path.stem, text_of(path))))
        for word in misused(name_of(path), name)
    ]
    assert not faults, "docs/glossary.md has the words:\n" + "\n".join(faults)


def test_no_exception_outlives_its_name() -> None:
    known = {name for path in python_files("ep_kernels", "services") for name in declared(path.stem, text_of(path))}
    assert {name for use in USES.values() for name in use.names} <= known


def test_the_glossary_has_these_words() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Words with one meaning")[2]
    assert set(USES) <= set(re.findall(r"^\| ([a-z ]+) \|", page, re.M))


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        ("services/crossdock/host/docker_plan.py", "docker_plan", ["plan"]),
        ("services/crossdock/control/topology/means.py", "Means", ["means"]),
        ("services/crossdock/common/security.py", "_LOOK_S", ["look"]),
        ("services/crossdock/control/group/group.py", "next_step", ["step"]),
        ("ep_kernels/transports/nvlink/calls/plan.py", "plan_stages", []),
        ("services/crossdock/worker/steps/steps.py", "choose_step", []),
        ("services/crossdock/common/config.py", "ControlPlane", []),
        ("services/crossdock/worker/steps/batcher.py", "return_rooms", ["room"]),
    ],
)
def test_the_rule_sees_a_planted_name(where: str, name: str, words: list[str]) -> None:
    assert misused(where, name) == words


def test_names_of_a_module() -> None:
    text = "A, B = 1, 2\nclass C:\n    def d(self): ...\nasync def e(): ...\n_F: int = 3\n"
    assert set(declared("module", text)) == {"module", "A", "B", "C", "d", "e", "_F"}
