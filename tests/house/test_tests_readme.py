"""tests/README.md leads to every folder of tests, and from a module to the file that tests it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.house.tree import PRODUCT, ROOT, python_files

TESTS = ROOT / "tests"
NAMED_AFTER_MODULES = ("unit", "services", "transports", "collectives")
README = (TESTS / "README.md").read_text(encoding="utf-8")


def modules() -> set[str]:
    """What a test file may be named after: modules and packages of the product."""
    return {path.parent.name if path.stem == "__init__" else path.stem for path in python_files(*PRODUCT)}


def is_of_a_module(name: str, known: Iterable[str]) -> bool:
    """`test_MODULE.py`, or `test_ROOM_MODULE.py` where several rooms have one of that name."""
    words = name.removeprefix("test_").removesuffix(".py")
    return words in known or words.partition("_")[2] in known


def nowhere(files: Iterable[Path], known: set[str], readme: str) -> list[str]:
    """Test files that neither their name nor the page explains."""
    return [path.name for path in files if not is_of_a_module(path.name, known) and f"`{path.name}`" not in readme]


def test_every_folder_has_its_line() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.iterdir())} - {"__pycache__"}
    assert folders == set(re.findall(r"^\| `(\w+)/`", README, re.MULTILINE))


def test_every_file_is_found_by_the_name_of_its_module_or_in_the_page() -> None:
    files = [path for folder in NAMED_AFTER_MODULES for path in sorted((TESTS / folder).glob("test_*.py"))]
    assert not nowhere(files, modules(), README)


def test_the_page_names_no_file_that_is_gone() -> None:
    there = {path.name for path in python_files("tests")}
    assert set(re.findall(r"`(test_\w+\.py)`", README)) - {"test_MODULE.py", "test_ROOM_MODULE.py"} <= there


def test_the_rules_see_a_planted_fault() -> None:
    files = [Path(name) for name in ("test_plan.py", "test_nvlink_plan.py", "test_words.py", "test_told.py")]
    assert nowhere(files, {"plan"}, "`test_told.py`: words") == ["test_words.py"]
