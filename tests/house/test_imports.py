"""What a file imports of this repository is there: also where no test imports that file (programs run by hand), and
mypy does not read it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.tree import GENERATED, PRODUCT, imports_of, module_of, name_of, parsed, python_files, text_of

TOPS = ("benchmarks", "crossdock", "ep_kernels", "tests")


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """That these statements of a module bind."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        else:
            yield from (
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )
            for part in ("body", "orelse", "finalbody"):
                yield from names_in(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from names_in(handler.body)


def known() -> set[str]:
    """Every module, and every name that one binds, dotted."""
    found = set()
    for path in python_files(*PRODUCT, "tests"):
        module = module_of(path)
        found |= {module, *module.split(".")[:1]}
        if "__getattr__" not in (names := set(names_in(parsed(text_of(path)).body))):
            found |= {f"{module}.{name}" for name in names}
        else:  # its own `__all__` says
            found |= {f"{module}.*"}
    return found


def faults_of(imports: Iterator[tuple[str, int]], there: set[str]) -> list[str]:
    """Imports of ours that lead nowhere."""
    generated = ".".join(GENERATED.parts[-3:])
    faults = []
    for name, line in imports:
        top, parent = name.split(".")[0], name.rpartition(".")[0]
        if top in TOPS and not name.startswith(generated) and name not in there and f"{parent}.*" not in there:
            faults.append(f"{line}: {name}")
    return faults


def test_what_is_imported_is_there() -> None:
    there = known()
    faults = [
        f"{name_of(path)}:{fault}"
        for path in python_files(*PRODUCT, "tests")
        for fault in faults_of(imports_of(path), there)
    ]
    assert not faults, "\n".join(faults)


def test_the_rule_sees_it() -> None:
    there = {"tests", "tests.house", "tests.house.tree", "tests.house.tree.ROOT", "tests.lazy.*"}
    wanted = ["tests.house.tree.ROOT", "tests.house.tree.NONE", "tests.gone", "tests.lazy.some", "torch.gone"]
    assert faults_of(iter([(name, 1) for name in wanted]), there) == ["1: tests.house.tree.NONE", "1: tests.gone"]
