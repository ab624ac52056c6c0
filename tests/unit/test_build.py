"""The native build: what is asked for, what is refused, staleness; real compilations of scratch copies."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import ep_kernels
from benchmarks import native as bench_native
from crossdock.protocol import native as frames_native
from ep_kernels import jit
from ep_kernels.errors import TransportError
from ep_kernels.transports import build
from ep_kernels.transports.cpu import native

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


@pytest.mark.parametrize("transport", ["cpu", "nvlink"])
def test_the_libraries_in_use_are_current(transport: str) -> None:
    found = build.native_of(transport)
    assert found.is_current()
    assert found in [build.native_of(path.parent.name) for path in build.HERE.glob("*/native")]


def test_the_library_of_frames_is_built_beside_them(backend: ModuleType) -> None:
    found = frames_native.library()
    assert found.is_current()
    assert backend._build_all()[-1] == found.library
    assert frames_native.load().cd_build_id().decode() == found.build_id()


def test_the_loaded_library_says_what_it_was_built_from() -> None:
    assert native.load().cd_build_id().decode() == build.native_of("cpu").build_id()


def test_compiler_wheel_is_asked_for_only_without_a_compiler(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert backend._compiler_requirement(None) == backend._compiler_requirement({"portable": "no"}) == []
    assert backend._compiler_requirement({"portable": "yes"}) == [backend.COMPILER_WHEEL]
    with pytest.raises(ValueError, match="portable: expected yes or no, got 'true'"):
        backend._compiler_requirement({"portable": "true"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend._compiler_requirement(None) == [backend.COMPILER_WHEEL]


def scratch(folder: Path, transport: str = "nvlink") -> build.Native:
    """A transport's sources in a folder of their own."""
    shutil.copytree(build.native_of(transport).sources, folder / "native")
    return build.Native(folder / "native", folder / "_native.so", build.native_of(transport).included)


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda **_: None)
    with pytest.raises(build.BuildError, match=r"g\+\+, clang\+\+ or c\+\+.*ziglang"):
        scratch(tmp_path).build()


def test_compiler_errors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda **_: ["/bin/sh", "-c", "echo no such thing >&2; exit 3", "sh"])
    with pytest.raises(build.BuildError, match="exit code 3\nno such thing"):
        scratch(tmp_path).build()
    assert not list(tmp_path.glob("*.so*"))


def test_build_and_staleness(tmp_path: Path) -> None:
    copied = scratch(tmp_path, "cpu")
    made = copied.build().stat().st_mtime_ns
    assert copied.build().stat().st_mtime_ns == made, "built again though current"
    assert native.load(copied).cd_abi() == native.load().cd_abi()
    header = copied.sources / "rows.hpp"
    header.write_text(header.read_text() + "\n")
    assert not copied.is_current()
    native.load.cache_clear()
    with pytest.raises(TransportError, match=r"older than its sources.*python build_backend\.py"):
        native.load(copied)
    native.load.cache_clear()


def test_a_library_depends_on_the_headers_that_it_includes(tmp_path: Path) -> None:
    shutil.copytree(build.NETWORK / "native", tmp_path / "network")
    halves = {name: replace(build.native_of(name), included=(tmp_path / "network",)) for name in ("cpu", "nvlink")}

    def changed_by(header: str) -> set[str]:
        before = {name: half.build_id() for name, half in halves.items()}
        with (tmp_path / "network" / header).open("a") as file:
            file.write("\n")
        return {name for name, half in halves.items() if half.build_id() != before[name]}

    assert changed_by("ring.hpp") == {"cpu", "nvlink"}
    assert changed_by("proxy.hpp") == set()
    text = (tmp_path / "network" / "ring.hpp").read_text()
    (tmp_path / "network" / "ring.hpp").write_text(f'#include "proxy.hpp"\n{text}')
    assert changed_by("proxy.hpp") == {"cpu", "nvlink"}


def test_every_transport_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "native").mkdir(parents=True)
        (tmp_path / name / "native" / "a.cpp").write_text(f'extern "C" const char* {name}() {{ return CD_BUILD_ID; }}')
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "NETWORK", tmp_path / "two")
    two = tmp_path / "two" / "_native.so"
    assert build.build_all() == [tmp_path / "one" / "_native.so", two, two]
    assert all(build.native_of(name).is_current() for name in ("one", "two"))


def test_missing_and_broken_libraries_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"is missing.*python build_backend\.py"):
        native.load(build.Native(tmp_path, tmp_path / "none.so"))
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(TransportError, match="does not load"):
        native.load(build.Native(tmp_path, broken))


BUILD_WHEEL = "import sys, build_backend; print(build_backend.build_wheel(sys.argv[1], {'portable': 'yes'}))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for the package index, of a copy of this checkout that has shipped its cubins (of one kernel),
    unpacked."""
    pytest.importorskip("cuda.bindings.nvrtc")
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "tree"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "cubins", "*.pyc")
    for name in ("ep_kernels", "services"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for name in ("pyproject.toml", "build_backend.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "build" / "lib" / "ep_kernels").mkdir(parents=True)
    (tree / "build" / "lib" / "ep_kernels" / "removed_since.py").touch()
    for arch in jit.SHIPPED_ARCHS:
        ship_barrier(tree / "ep_kernels" / "cubins", arch)
    command = [sys.executable, "-c", BUILD_WHEEL, str(place)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = place.glob("crossdock-*-py3-none-manylinux_2_28_*.whl")
    with zipfile.ZipFile(made) as packed:
        packed.extractall(place / "unpacked")
    return place / "unpacked"


def ship_barrier(folder: Path, arch: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "shipped_variants", lambda: iter([jit.Variant("barrier")]))
        jit.Compiler(None, folder).ship(arch)


def test_the_wheel_brings_kernels_that_need_no_compiler(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "compile_source", lambda *_: pytest.fail("compiled although it was shipped"))
    monkeypatch.setattr(jit, "compiler_version", lambda: pytest.fail("NVRTC was asked for its version"))
    compiler = jit.Compiler(None, wheel / "ep_kernels" / "cubins")
    found = {arch: compiler.get(jit.Variant("barrier"), arch) for arch in jit.SHIPPED_ARCHS}
    assert all(cubin.startswith(b"\x7fELF") for cubin in found.values())
    assert len(set(found.values())) == len(jit.SHIPPED_ARCHS)


def test_the_wheel_is_whole_and_has_nothing_else(wheel: Path) -> None:
    packed = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    libraries = {f"ep_kernels/{folder}/_native.so" for folder in ("transports/cpu", "transports/nvlink", "network")}
    assert libraries | {"crossdock/protocol/_native.so"} <= packed
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ep_kernels").rglob("*.cuh")}
    assert sources <= packed, "kernels are compiled from these where no cubin fits"
    assert "ep_kernels/removed_since.py" not in packed
    assert not [name for name in packed if name.endswith((".cpp", ".hpp", ".pyc"))]


@pytest.mark.parametrize("compiler", [["g++"], ["python", "-m", "ziglang", "c++"]])
def test_the_wheels_compiler_gets_the_flags_that_it_needs(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(build, "_run", commands.append)
    for name in build.X86_VARIANTS:
        build.native_of("cpu")._compile(compiler, Path(name), tmp_path)
    assert ["-mevex512" in command for command in commands] == [False, "ziglang" in compiler]


def test_the_wheels_compiler_compiles_the_intrinsics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are built with it, and on hosts without a compiler every install is."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiler, ours = build.find_compiler(), build.native_of("cpu")
    assert compiler is not None
    assert compiler == build.find_compiler(portable=True)
    for name in build.X86_VARIANTS:
        assert ours._compile(compiler, ours.sources / name, tmp_path).stat().st_size


def test_sources_include_nothing_that_needs_the_cpp_runtime() -> None:
    """The wheel's compiler links none: such a library compiles and does not load."""
    allowed = {"algorithm", "atomic", "cerrno", "cstdarg", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "new"}
    allowed |= {"type_traits", "utility"}
    sources = [
        path for native in every_native() for path in native.sources.iterdir() if path.suffix in (".cpp", ".hpp")
    ]
    assert len(sources) > 40
    for path in sources:
        included = set(re.findall(r"^#include <([a-z_]+)>$", path.read_text(), re.MULTILINE))
        assert included <= allowed, path


def every_native() -> list[build.Native]:
    transports = [build.native_of(path.parent.name) for path in build.HERE.glob("*/native")]
    return [*transports, build.network(), frames_native.library(), bench_native.LIBRARY]
