"""What tests need of the machine: a compiler is brought where there is none, what else is missing is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import compiler, tools
from tests.house.tree import ROOT

PROVIDE = """
import json, os, sys, sysconfig
from pathlib import Path
from shutil import which
from tests import compiler
sysconfig.get_path = lambda name: sys.argv[1]
for _ in range(2):
    compiler.provide(Path(sys.argv[1]))
names = {name: which(name) for name in ("g++", "c++", "gcc", "cc")}
print(json.dumps([names, os.environ["PATH"], os.environ["CPLUS_INCLUDE_PATH"]]))
"""
BINDING = """
#include <omp.h>
#include <Python.h>
#if defined(_OPENMP) || !defined(__AVX512F__) || !defined(__EVEX512__)
#error "expected one thread, and registers of 512 bits"
#endif
static PyObject* call(PyObject*, PyObject* const*, Py_ssize_t) { Py_RETURN_NONE; }
static PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, ""},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "binding", NULL, -1, methods};
PyMODINIT_FUNC PyInit_binding(void) { return omp_get_max_threads() == 1 ? PyModule_Create(&module) : nullptr; }
"""


def skipped(*reasons: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(longrepr=("tests/a.py", 1, f"Skipped: {reason}")) for reason in reasons]


def test_a_machine_without_a_compiler_gets_one(tmp_path: Path) -> None:
    """As inductor calls it, though the machine has neither a compiler nor the headers of Python."""
    pytest.importorskip("ziglang", reason="it comes with the extra [dev]")
    environment = {**os.environ, "PATH": str(tmp_path / "empty")}
    environment.pop("CPLUS_INCLUDE_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", PROVIDE, str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, path, headers = json.loads(done.stdout)
    assert set(names.values()) == {str(tmp_path / name) for name in names}
    assert (path, headers) == (f"{tmp_path / 'empty'}:{tmp_path}", str(compiler.FOLDER / "python"))
    (tmp_path / "binding.cpp").write_text(BINDING)
    flags = ["-std=c++20", "-march=native", "-mavx512f", "-fPIC", "-shared", "-fopenmp", "-lgomp", "-nostdlib++"]
    made = tmp_path / "binding.so"
    command = [names["g++"], str(tmp_path / "binding.cpp"), *flags, "-o", str(made)]
    built = subprocess.run(
        command, env={**os.environ, "CPLUS_INCLUDE_PATH": headers}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert subprocess.run(
        [sys.executable, "-c", "import binding; print(binding.call())"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.strip() == "None"  # fmt: skip


def test_what_the_machine_has_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g++").touch(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "here")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    compiler.provide(tmp_path / "made")
    assert (os.environ["PATH"], os.environ["CPLUS_INCLUDE_PATH"]) == (str(tmp_path), "here")
    assert not (tmp_path / "made").exists()


def test_what_was_missing_is_told_in_three_lines() -> None:
    reasons = [tools.reason("helm", "not installed")] * 3 + [tools.reason("CUDA devices", "wants 2")] * 1200
    reasons += [tools.reason("promtool", "not installed"), tools.reason("libfabric", "not installed"), "other modes"]
    assert tools.said(skipped(*reasons[:3], "has no fp8")) == [
        f"3 tests did not run for lack of helm ({tools.TOOLS['helm'].cure})"
    ]
    first, second, third = tools.said([*skipped(*reasons), SimpleNamespace(longrepr=None)])
    assert first == f"1,200 tests did not run for lack of CUDA devices ({tools.TOOLS['CUDA devices'].cure})"
    assert second.startswith("3 tests did not run for lack of helm (")
    assert third.startswith("2 tests did not run for lack of: promtool 1 (apt install prometheus), libfabric 1 (")
    assert tools.said([]) == []


def test_a_tool_that_is_missing_skips_with_its_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    mark = tools.needs("promtool").mark
    assert mark.args == (True,)
    assert mark.kwargs["reason"] == "needs promtool: not installed (apt install prometheus)"
    (tmp_path / "promtool").touch(0o755)
    assert tools.needs("promtool").mark.args == (False,)
    with pytest.raises(pytest.skip.Exception, match=r"needs network namespaces: refused \(root, or user"):
        tools.skip("network namespaces", "refused")


def run_one_that_skips(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest over one test, which lacks helm."""
    (folder / "test_one.py").write_text("from tests import tools\ndef test_one(): tools.skip('helm', 'gone')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    command += ["--rootdir", str(folder), "-c", os.devnull, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_skip_for_lack_of_what_must_be_there_is_a_failure(tmp_path: Path) -> None:
    done = run_one_that_skips(tmp_path, "--must-have", "helm", "--must-have", "promtool")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "needs helm: gone (" in done.stdout
    assert run_one_that_skips(tmp_path, "--must-have", "promtool").returncode == 0


def test_the_lines_stand_at_the_end_of_a_run(tmp_path: Path) -> None:
    done = run_one_that_skips(tmp_path)
    *_, skip, line, last = done.stdout.strip().splitlines()
    assert "test_one.py:2: needs helm: gone (" in skip, done.stdout + done.stderr
    assert line == f"1 test did not run for lack of helm ({tools.TOOLS['helm'].cure})"
    assert last.startswith("1 skipped")
