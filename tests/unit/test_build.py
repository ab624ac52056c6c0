"""The native build: what is asked for, what is refused, staleness; one real compilation of a scratch copy."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import ep_kernels
from ep_kernels.errors import TransportError
from ep_kernels.transports.cpu import build, native

ROOT = Path(ep_kernels.__file__).parents[1]


@pytest.fixture
def backend() -> ModuleType:
    """build_backend.py of this checkout."""
    spec = importlib.util.spec_from_file_location("backend_under_test", ROOT / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_library_in_use_is_current() -> None:
    assert build.is_current()
    assert native.load().cd_build_id().decode() == build.build_id()


def test_compiler_wheel_is_asked_for_only_without_a_compiler(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert backend._compiler_requirement() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend._compiler_requirement() == [backend.COMPILER_WHEEL]


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(build.BuildError, match=r"g\+\+, clang\+\+ or c\+\+.*ziglang"):
        build.build(tmp_path / "x.so")


def test_compiler_errors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: ["/bin/sh", "-c", "echo no such thing >&2; exit 3", "sh"])
    with pytest.raises(build.BuildError, match="exit code 3\nno such thing"):
        build.build(tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


def test_build_and_staleness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "native"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    library = build.build(tmp_path / "_native.so")
    made = library.stat().st_mtime_ns
    assert build.build(library).stat().st_mtime_ns == made, "built again though current"
    assert native.load(library).cd_abi() == native.load().cd_abi()
    (sources / "rows.hpp").write_text((sources / "rows.hpp").read_text() + "\n")
    assert not build.is_current(library)
    native.load.cache_clear()
    with pytest.raises(TransportError, match=r"older than its sources.*python build_backend\.py"):
        native.load(library)
    native.load.cache_clear()


def test_missing_and_broken_libraries_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"is missing.*python build_backend\.py"):
        native.load(tmp_path / "none.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(TransportError, match="does not load"):
        native.load(broken)
