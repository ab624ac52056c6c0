"""A C++ compiler for tests on a machine without one: that of the wheel `ziglang`, under the names that inductor, triton
and tests look for. It has no OpenMP, so loops that inductor would share between threads run in one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MADE = FOLDER.parents[1] / "build" / "compiler"
_NAMES = {"g++": "c++", "c++": "c++", "gcc": "cc", "cc": "cc"}
_SCRIPT = """#!/bin/sh
for word; do
  shift
  case $word in
    -fopenmp | -lgomp) continue ;;
    -mavx512f) set -- "$@" -mevex512 ;; # without it this clang has no registers of 512 bits
  esac
  set -- "$@" "$word"
done
exec '{zig}' {kind} -idirafter '{openmp}' "$@"
"""


def provide(folder: Path = MADE) -> None:
    """Put what is missing where this process, and those that it starts, find it: a compiler, the headers of Python."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        _append("CPLUS_INCLUDE_PATH", FOLDER / "python")
    package = importlib.util.find_spec("ziglang")
    if shutil.which("g++") or package is None or package.origin is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    zig = Path(package.origin).parent / "zig"
    for name, kind in _NAMES.items():
        script, staged = _SCRIPT.format(zig=zig, kind=kind, openmp=FOLDER / "openmp"), folder / f".{name}.{os.getpid()}"
        if (folder / name).exists() and (folder / name).read_text() == script:
            continue
        staged.write_text(script)
        staged.chmod(0o755)
        staged.replace(folder / name)
    _append("PATH", folder)


def _append(variable: str, folder: Path) -> None:
    others = [one for one in os.environ.get(variable, "").split(os.pathsep) if one and one != str(folder)]
    os.environ[variable] = os.pathsep.join([*others, str(folder)])
