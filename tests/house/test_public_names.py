"""What users may import. A name leaves `public_names.txt` only after one minor version of deprecation."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

MODULES = ["ep_kernels", "ep_kernels.collectives", "crossdock.client", "crossdock.deep_ep"]
LIST = Path(__file__).with_name("public_names.txt")


def listed(module: str) -> list[str]:
    prefix = f"{module}."
    return [line.removeprefix(prefix) for line in LIST.read_text().split() if line.rpartition(".")[0] == module]


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_the_listed_ones(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(listed(module))


@pytest.mark.parametrize("module", MODULES)
def test_public_names_exist_and_are_documented(module: str) -> None:
    found = importlib.import_module(module)
    for name in found.__all__:
        thing = getattr(found, name)
        assert not (inspect.isclass(thing) or inspect.isfunction(thing)) or inspect.getdoc(thing), f"{module}.{name}"


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    names = LIST.read_text().split()
    assert names == sorted(set(names))
