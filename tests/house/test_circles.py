"""No module needs itself, by whatever way: imports under TYPE_CHECKING and inside functions count too.

A circle that only types close still makes two files one: neither can be read, moved or tested without the other. The
cure is to name what is needed of the other side (a Protocol beside its user), or to move what both need below both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.tree import imports_of, module_of, python_files


def imports_by_module(paths: list[Path]) -> dict[str, set[str]]:
    """What each of these modules imports of the others. `from a import b` is a.b where that is a module, else a."""
    modules = {module_of(path): path for path in paths}

    def nearest(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {there for name, _ in imports_of(path) if (there := nearest(name)) not in ("", module)}
        for module, path in modules.items()
    }


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other: the strongly connected components of more than one."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            fresh = graph[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        reached[start] = seen
    together = {tuple(sorted({b for b in reached[a] if a in reached[b]})) for a in graph if a in reached[a]}
    return sorted(map(list, together))


def test_no_modules_import_each_other() -> None:
    found = circles(imports_by_module(python_files("ep_kernels", "services")))
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


ROOMS = ("services/crossdock/worker", "services/crossdock/control", "ep_kernels/transports/nvlink")
"""Parts that are divided into folders, besides modules that use several of them."""


@pytest.mark.parametrize("part", ROOMS)
def test_no_rooms_import_each_other(part: str) -> None:
    graph, top = imports_by_module(python_files(part)), part.removeprefix("services/").replace("/", ".")

    def room(module: str) -> str:
        return ".".join(module.split(".")[: top.count(".") + 2])

    rooms: dict[str, set[str]] = {}
    for module, needed in graph.items():
        rooms.setdefault(room(module), set()).update({room(there) for there in needed} - {room(module), top})
    assert len(rooms) > 5
    found = circles(rooms)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


@pytest.mark.parametrize(
    "closing",
    [
        "import crossdock.one",
        "from crossdock import one",
        "from .one import f",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from crossdock.one import f",
        "def g():\n    from crossdock.one import f",
    ],
)
def test_the_rule_sees_a_planted_circle(closing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.tree.ROOT", tmp_path)
    folder = tmp_path / "services" / "crossdock"
    folder.mkdir(parents=True)
    for name, text in (("one", "from crossdock.two import g"), ("two", "import crossdock.three"), ("three", closing)):
        (folder / f"{name}.py").write_text(text)
    assert circles(imports_by_module(sorted(folder.glob("*.py")))) == [
        ["crossdock.one", "crossdock.three", "crossdock.two"]
    ]
