"""The repository as the house rules see it: which files are ours, and what they import."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("ep_kernels", "services", "benchmarks")
GENERATED = ROOT / "services" / "crossdock" / "protocol" / "v1"

_SKIPPED = {"out", "build", "dist", "__pycache__", "node_modules", "results"}


def files(*tops: str) -> Iterator[Path]:
    """Every file below these folders of the repository (none named: all of it) that a person wrote."""
    for top in tops or (".",):
        for folder, subfolders, names in os.walk(ROOT / top):
            kept = [s for s in subfolders if s not in _SKIPPED and not s.endswith(".egg-info")]
            subfolders[:] = sorted(s for s in kept if not s.startswith(".") or s in (".ci", ".github"))
            if not Path(folder).is_relative_to(GENERATED):
                yield from (Path(folder) / name for name in sorted(names) if not name.endswith((".so", ".pyc")))


def python_files(*tops: str) -> list[Path]:
    """The Python files among `files`."""
    return [path for path in files(*tops) if path.suffix == ".py"]


def text_of(path: Path) -> str:
    """The text of a file; "" for one that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a Python text, which is not to be written to: many rules walk the same one."""
    return ast.parse(text)


def name_of(path: Path) -> str:
    """The path as people write it, from the root of the repository."""
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """The dotted module name under which a file is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "services":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that a file imports, inside functions too."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parsed(text_of(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
