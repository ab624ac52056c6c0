"""A transport is one folder: no other file knows it by name. Who must know something asks `common/transports.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossdock.common import transports
from tests.house.tree import files, imports_of, name_of, parsed, python_files, text_of

FOLDER = "ep_kernels/transports"
NAMES = set(transports.names())
DEVICES = {facts.device_type for facts in transports.installed().values()}
DEFAULTS = {
    "ep_kernels/config.py": "the default of MoEConfig",
    "services/crossdock/common/config.py": "the default of WorkerConfig",
    "services/crossdock/demo/run.py": "the default of `crossdock demo`",
    "services/crossdock/cli/app.py": "the default of `crossdock demo`",
}
"""Where one transport is the default."""
OTHER_MEANINGS = {"services/crossdock/doctor/hardware.py": "`nvlink` is the doctor's check of the links of a GPU"}
TOOLS = "ep_kernels/tools/"
"""Kernels are compiled before there is a transport to ask; they are those of one."""


def names_in(path: Path) -> Iterator[str]:
    """Names of transports in a Python file: as a text of its own (a device's name is one only where it is compared with
    a transport), or as a package that is imported."""
    for node in ast.walk(parsed(text_of(path))):
        if isinstance(node, ast.Constant) and node.value in NAMES - DEVICES:
            yield f"{node.lineno} {node.value!r}"
        elif isinstance(node, ast.Compare) and "transport" in ast.unparse(node.left):
            compared = {part.value for side in node.comparators for part in ast.walk(side) if _is_text(part)}
            yield from (f"{node.lineno} compared with {name!r}" for name in compared & NAMES)
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[:2] == FOLDER.split("/") and NAMES.intersection(parts[2:3]):
            yield f"{line} imports {module}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_module_knows_a_transport_by_name() -> None:
    faults = [
        f"{name_of(path)}:{fault}"
        for path in python_files("ep_kernels", "services")
        if not name_of(path).startswith((*(f"{FOLDER}/{name}/" for name in NAMES), TOOLS))
        and name_of(path) not in {**DEFAULTS, **OTHER_MEANINGS}
        for fault in names_in(path)
    ]
    assert not faults, "\n".join(faults)


def test_defaults_and_other_meanings_import_no_transport() -> None:
    faults = [
        f"{path}:{fault}"
        for path in map(Path, {**DEFAULTS, **OTHER_MEANINGS})
        for fault in names_in(next(p for p in python_files("ep_kernels", "services") if name_of(p) == str(path)))
        if "imports" in fault or "compared" in fault
    ]
    assert not faults, "\n".join(faults)


def test_no_template_of_the_chart_knows_one() -> None:
    faults = [
        f"{name_of(path)}: {found}"
        for path in files("helm")
        if path.parent.name == "templates"
        for found in re.findall(rf'"(?:{"|".join(NAMES)})"', text_of(path))
    ]
    assert not faults, "\n".join(faults)


def test_each_transport_says_what_others_must_know() -> None:
    folders = {path.parent.name for path in python_files(FOLDER) if path.name == "transport.py"}
    assert folders == NAMES == set(transports.installed())


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ('f("nvlink")', 1),
        ('transport != "cpu"', 1),
        ('config.transport in ("cpu", "other")', 1),
        ("from ep_kernels.transports.nvlink import plan", 1),
        ("import ep_kernels.transports.cpu.native", 1),
        ('torch.device("cpu")', 0),
        ('device.type == "cpu"', 0),
        ("from ep_kernels.transports import base", 0),
        ('"""About nvlink."""', 0),
    ],
)
def test_the_rule_sees_a_name(text: str, num_faults: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.house.tree.ROOT", tmp_path)
    path = tmp_path / "services" / "crossdock" / "planted.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert len(list(names_in(path))) == num_faults
