"""A name says one thing: no two public classes of the product share one, and no two files of one tree.

Trees: `ep_kernels` and `services/crossdock`. Names with a leading underscore are a module's own business.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.tree import name_of, parsed, python_files, text_of

TREES = ("ep_kernels", "services/crossdock")

CLASSES = {
    "DeadlineExceeded": "a client's error, and the services' own of the same status, which callers do not see",
    "Unavailable": "likewise",
    "Group": "who the ranks are, for the data plane; the control plane's record of one",
    "Work": "a collective under way, named as in torch.distributed; a request as the worker knows it",
    "Shape": "a record of the region's byte map, named as in C++; what is to be placed",
}
"""Two of a name, and why."""

FILES = {
    "transport.py": "each transport's folder has one: how it is found",
    "collectives.py": "the class Collectives; each transport's folder has one: how its collectives are found",
    "inspection.py": "each transport's folder may have one: what tools ask a transport",
    "run.py": "what a command does: `crossdock up`, `demo`, `doctor`, `tune`",
    "rank.py": "the program of one rank that such a command starts",
    "process.py": "the program of a long-running process: worker, control plane",
    "errors.py": "the errors of a package that users import",
    "low_latency.py": "LL in DeepEP's API, and in vLLM's",
    "high_throughput.py": "HT, likewise",
    "buffer.py": "a module path of DeepEP's, which callers import",
}
"""Names that several packages of a tree have, and what each says everywhere."""


def _twice(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name, place in named:
        found[name].add(place)
    return {name: sorted(places) for name, places in sorted(found.items()) if len(places) > 1}


def classes_twice(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Public classes at the top of several of these files, by name."""
    return _twice(
        (node.name, name_of(path))
        for path in paths
        for node in parsed(text_of(path)).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def files_twice(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Names of files that several folders have."""
    return _twice((path.name, name_of(path)) for path in paths if not path.name.startswith("__"))


def test_no_two_classes_have_one_name() -> None:
    found = classes_twice(python_files(*TREES))
    faults = {name: places for name, places in found.items() if name not in CLASSES}
    assert not faults, "\n".join(f"{name}: {', '.join(places)}" for name, places in faults.items())


def test_no_two_files_of_a_tree_have_one_name() -> None:
    faults = {
        name: places for tree in TREES for name, places in files_twice(python_files(tree)).items() if name not in FILES
    }
    assert not faults, "\n".join(f"{name}: {', '.join(places)}" for name, places in faults.items())


def test_the_rules_see_a_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.tree.ROOT", tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("class Same: ...")
        (tmp_path / folder / "same.py").write_text(f"class Twice: ...\nclass _Own: ...\nclass {folder.title()}: ...")
    paths = sorted(tmp_path.rglob("same.py"))
    assert classes_twice(paths) == {"Twice": ["one/same.py", "two/same.py"]}
    assert files_twice(sorted(tmp_path.rglob("*.py"))) == {"same.py": ["one/same.py", "two/same.py"]}
