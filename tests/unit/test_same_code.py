"""`python -m benchmarks.same_code`: comments change nothing, an instruction does, and a cut variant is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import same_code
from ep_kernels import jit
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


def listing(functions: dict[str, list[str]]) -> str:
    """As nvdisasm writes it: an address, and 16 bytes in two lines; `@name` stands for the address behind a call."""
    lines, address = [], 0
    for name, texts in functions.items():
        lines.append(f"{name}:")
        for text in texts:
            here = text.replace("@next", f"{address + 32:#x}")
            lines.append(f"        /*{address:04x}*/   {here} ;   /* 0x{0:016x} */")
            lines.append(f"                             /* 0x{7 << 41:016x} */")
            address += 16
    return "\n".join(lines)


def test_names_and_order_of_functions_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_code.kernels, "disassemble", bytes.decode)
    first, second = ["IADD3 R4, R4, 0x1, RZ", "RET.REL.NODEC R6 `(k)"], ["IMAD R4, R4, R4, RZ", "RET.REL.NODEC R6 `(k)"]

    def entry(callee: str, other: str) -> list[str]:
        return ["MOV R6, @next", f"CALL.REL.NOINC `({callee})", "MOV R6, @next", f"CALL.REL.NOINC `({other})", "EXIT"]

    def read(functions: dict[str, list[str]]) -> list[str] | None:
        return same_code.functions(listing(functions).encode())

    plain = read({"k": entry("$a", "$b"), "$a": first, "$b": second})
    assert plain is not None
    assert len(plain) == 3
    assert plain == read({"k": entry("$z", "$b"), "$b": second, "$z": first})
    assert plain == read({"$b": second, "$a": first, "k": entry("$a", "$b")})
    assert plain != read({"k": entry("$b", "$a"), "$a": first, "$b": second})
    assert plain != read(
        {"k": entry("$a", "$b"), "$a": first, "$b": [second[0].replace("R4, RZ", "R5, RZ"), second[1]]}
    )
    assert read({"k": ["LDC R1, c[0x4][0x8]", "EXIT"]}) is None


def test_what_is_no_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same_code.main([str(tmp_path / "none"), str(ROOT), "--only", "barrier"]) == 2
    assert "expected a checkout or a git revision" in capsys.readouterr().err
    broken = checkout(tmp_path / "broken", "\n", "\nnot C++;\n")
    with pytest.raises(same_code.VersionError, match="NVRTC_ERROR_COMPILATION"):
        same_code.compile_version(broken, "sm_90a", "barrier", tmp_path / "code")


def test_only_machine_code_is_read() -> None:
    with pytest.raises(same_code.VersionError, match="64-bit ELF"):
        same_code.code_of(b"#!/bin/sh")
