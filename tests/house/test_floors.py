"""Who may import whom. The house has floors, imports point down, and heavy packages live on the floors named here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import PRODUCT, imports_of, module_of, name_of, python_files

WIRE = {
    f"crossdock.protocol.{name}" for name in ("v1", "wire", "native", "frames", "rows", "same_host", "shared_memory")
}
"""Messages and frames with tensors."""
FLOORS: dict[str, set[str]] = {
    "ep_kernels": set(),
    "ep_kernels.tools": {"ep_kernels"},
    "crossdock.protocol": set(),
    "crossdock.protocol.v1": set(),
    "crossdock.protocol.wire": {"crossdock.protocol.v1"},
    "crossdock.protocol.native": {"ep_kernels"},
    "crossdock.protocol.frames": {"crossdock.protocol.native"},
    "crossdock.protocol.rows": {"crossdock.protocol.native", "crossdock.protocol.frames"},
    "crossdock.protocol.same_host": set(),
    "crossdock.protocol.shared_memory": set(),
    "crossdock.common": {"crossdock.protocol.v1"},
    "crossdock.control": {"crossdock.common", "crossdock.protocol.v1"},
    "crossdock.topo": {"crossdock.common", "crossdock.control", "crossdock.protocol.v1"},
    "crossdock.topo.facts": {"crossdock.protocol.v1", "ep_kernels"},
    "crossdock.worker.checkpoints.families": set(),
    "crossdock.worker": {
        "crossdock.worker.checkpoints.families",
        "crossdock.common",
        *WIRE,
        "crossdock.topo.facts",
        "ep_kernels",
    },
    "crossdock.client": {"crossdock.common", *WIRE, "ep_kernels"},
    "crossdock.deep_ep": {"crossdock.common", "ep_kernels"},
    "crossdock.vllm_plugin": {"crossdock.common", "crossdock.deep_ep", "ep_kernels"},
    "crossdock.tune": {"crossdock.common", "ep_kernels"},
    "crossdock.doctor": {
        "crossdock.common",
        "crossdock.control",
        "crossdock.protocol.v1",
        "crossdock.topo.facts",
        "crossdock.tune",
        "ep_kernels",
    },
    "crossdock.host": {"crossdock.common", "crossdock.protocol.v1"},
    "crossdock.demo": {
        "crossdock.client",
        "crossdock.common",
        "crossdock.host",
        "crossdock.protocol.v1",
        "crossdock.worker.checkpoints.families",
        "ep_kernels",
    },
}
"""Each floor may import itself and those named beside it. `crossdock.cli` may import every one of them, lazily."""

ANYTHING = (
    "crossdock.cli",
    "crossdock.__main__",
    "benchmarks",
    "benchmarks.vllm",
)

RESERVED: dict[str, set[str]] = {
    "torch": {
        "ep_kernels",
        *WIRE - {"crossdock.protocol.v1"},
        "crossdock.worker",
        "crossdock.client",
        "crossdock.demo",
        "crossdock.doctor",
        "crossdock.tune",
        "crossdock.deep_ep",
        "crossdock.vllm_plugin",
        "benchmarks",
        "benchmarks.vllm",
    },
    "numpy": {"crossdock.common", "crossdock.worker", "crossdock.client", "crossdock.demo", "benchmarks"},
    "safetensors": {"crossdock.worker", "crossdock.demo", "benchmarks"},
    "triton": {"crossdock.worker"},
    "transformers": {"crossdock.client", "crossdock.demo", "benchmarks"},
    "vllm": {"crossdock.vllm_plugin", "benchmarks.vllm"},
    "grpc": {
        "crossdock.common",
        "crossdock.control",
        "crossdock.doctor",
        "crossdock.worker",
        "crossdock.client",
        "crossdock.host",
        "benchmarks",
    },
    "prometheus_client": {"crossdock.common", "crossdock.demo"},
    "typer": {"crossdock.cli"},
    "yaml": {"crossdock.common"},
    "kubernetes": {"crossdock.control"},
    "docker": {"crossdock.host"},
    "opentelemetry": {"crossdock.common"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
}
"""Packages that live on exactly these floors. Nothing of the product unpickles anything. Of vLLM the product knows the
plugin alone; `benchmarks.vllm` measures vLLM itself."""

DATA_PLANE_NEEDS = {"ep_kernels": {"torch", "msgspec", "pynvml", "cuda"}, "ep_kernels.tools": {"rich"}}


def floor_of(module: str) -> str | None:
    """The floor on which a module lives; None for foreign packages and for the root package."""
    known = [*FLOORS, *ANYTHING]
    return max((f for f in known if module == f or module.startswith(f + ".")), key=len, default=None)


def faults_of(path: Path) -> list[str]:
    here = floor_of(module_of(path))
    faults = []
    for name, line in imports_of(path):
        there, package = floor_of(name), name.split(".")[0]
        upward = there not in (None, here) and here not in ANYTHING and there not in FLOORS.get(here or "", set())
        misplaced = package in RESERVED and here not in RESERVED[package]
        if upward or misplaced:
            faults.append(f"{name_of(path)}:{line} imports {name}")
    return faults


def test_imports_point_down() -> None:
    faults = [fault for path in python_files(*PRODUCT) for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_every_module_lives_on_a_floor() -> None:
    homeless = [
        name_of(p) for p in python_files(*PRODUCT) if module_of(p) != "crossdock" and not floor_of(module_of(p))
    ]
    assert not homeless, f"name their floor in FLOORS: {homeless}"


def test_the_data_plane_stands_on_torch_and_msgspec_only() -> None:
    foreign = {
        f"{name_of(path)}:{line} imports {name}"
        for path in python_files("ep_kernels")
        for name, line in imports_of(path)
        if name.split(".")[0]
        not in {"ep_kernels", *sys.stdlib_module_names, *DATA_PLANE_NEEDS[floor_of(module_of(path)) or ""]}
    }
    assert not foreign, "\n".join(sorted(foreign))


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        ("import torch", "services/crossdock/control/planted.py"),
        ("from crossdock.worker import engine", "services/crossdock/control/planted.py"),
        ("from ..worker import engine", "services/crossdock/control/planted.py"),
        ("from crossdock.control import group", "services/crossdock/worker/planted.py"),
        ("def f():\n    import grpc", "ep_kernels/planted.py"),
        ("import crossdock.common.config", "ep_kernels/planted.py"),
        ("import prometheus_client", "services/crossdock/worker/planted.py"),
        ("import pickle", "services/crossdock/client/planted.py"),
    ],
)
def test_the_rule_sees_a_planted_fault(
    planted: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.house.tree.ROOT", tmp_path)
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(planted)
    assert len(faults_of(path)) == 1


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("crossdock.cli.app", ["torch", "grpc", "transformers", "msgspec", "prometheus_client"]),
        (
            "crossdock.control.process, crossdock.host.supervisor, crossdock.host.run, crossdock.cli.status",
            ["torch", "numpy", "docker"],
        ),
        ("crossdock.client, crossdock.worker.process, crossdock.deep_ep", ["torch._dynamo", "transformers"]),
    ],
)
def test_what_starts_quickly_loads_nothing_heavy(modules: str, absent: list[str]) -> None:
    code = f"import sys, {modules}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
