"""`python -m ep_kernels.tools.same_code`: comments change nothing, an instruction does, and a cut variant is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ep_kernels import jit
from ep_kernels.tools import same_code
from tests.house.tree import ROOT

pytest.importorskip("cuda.bindings.nvrtc")
KERNEL = "ep_kernels/kernels/barrier.cuh"


def checkout(folder: Path, old: str = "", new: str = "") -> Path:
    """A copy of ep_kernels, with `old` replaced in the source of the barrier."""
    shutil.copytree(ROOT / "ep_kernels", folder / "ep_kernels", ignore=shutil.ignore_patterns("cubins", "__pycache__"))
    source = folder / KERNEL
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new, 1))
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return same_code.compile_version(ROOT, "sm_90a", "barrier", tmp_path_factory.mktemp("ours") / "code")


def test_comments_and_line_numbers_are_no_difference(tmp_path: Path, ours: dict[str, bytes]) -> None:
    commented = checkout(tmp_path / "new", "\n", "\n// Of no effect.\n\n\n")
    theirs = same_code.compile_version(commented, "sm_90a", "barrier", tmp_path / "code")
    assert dict(same_code.compare(ours, theirs)) == {"barrier": ""}


def test_another_instruction_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = checkout(tmp_path / "new", "threadIdx.x", "(threadIdx.x ^ 1)")
    assert same_code.main([str(ROOT), str(changed), "--only", "barrier"]) == 1
    said = capsys.readouterr().out
    assert "  barrier  " in said
    assert "0 the same, 1 differ" in said


def test_a_variant_that_was_cut_is_listed_and_no_difference() -> None:
    binary = jit.compile_source('extern "C" __global__ void a(int* out) { *out = 1; }', "a", "sm_90a").cubin
    other = jit.compile_source('extern "C" __global__ void a(int* out) { *out = threadIdx.x; }', "a", "sm_90a").cubin
    found = dict(
        same_code.compare({"cut": binary, "kept": binary, "changed": binary}, {"kept": binary, "changed": other})
    )
    assert (found["cut"], found["kept"]) == ("gone", "")
    assert found["changed"]


def test_what_is_no_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same_code.main([str(tmp_path / "none"), str(ROOT), "--only", "barrier"]) == 2
    assert "expected a checkout or a git revision" in capsys.readouterr().err
    broken = checkout(tmp_path / "broken", "\n", "\nnot C++;\n")
    with pytest.raises(same_code.VersionError, match="NVRTC_ERROR_COMPILATION"):
        same_code.compile_version(broken, "sm_90a", "barrier", tmp_path / "code")


def test_only_machine_code_is_read() -> None:
    with pytest.raises(same_code.VersionError, match="64-bit ELF"):
        same_code.code_of(b"#!/bin/sh")
