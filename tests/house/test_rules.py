"""Rules that hold for every file: one reader of the environment, size budgets, nothing unfinished, no foreign paths."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.house.tree import PRODUCT, ROOT, files, name_of, parsed, python_files, text_of

ENVIRONMENT_READERS = {"services/crossdock/common/config.py"}
ENVIRONMENT = re.compile(r"\bos\.(environ\w*|getenv\w*|putenv|unsetenv)\b|\b(secure_)?getenv\b|\b(un)?setenv\b")

FUNCTION_LINES, VALUES_LINES = 40, 150
KERNEL_COLUMNS = 120
NATIVE = {".cpp", ".hpp", ".h", ".c", ".cu", ".cuh"}

UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|NotImplemented" + r"Error)\b")

SYSTEM_ROOTS = {"proc", "sys", "dev", "tmp", "etc", "usr", "sbin", "var", "bin", "run", "metrics", "livez", "readyz"}
OWN_ROOTS = {"app", "models", "wheels", "src", "config", "definitions", "inventory", "own"}
"""Folders inside our container images, and where a JSON schema keeps its definitions."""
SERVER_ROOTS = {"api", "apis"}
"""Where a Kubernetes API server has its resources."""
SHOWN_ROOTS = {"opt", "srv"}
"""Where the pages for plain hosts install the product and its models."""
KNOWN_ROOTS = SHOWN_ROOTS | SYSTEM_ROOTS | OWN_ROOTS | SERVER_ROOTS
ABSOLUTE_PATH = re.compile(r"(?<![\w)\]}>/.:*$~%<\\-])/([a-z][\w-]*)/[\w.-]+")
HOSTS = {
    "www.apache.org", "keepachangelog.com", "semver.org", "json-schema.org", "arxiv.org", "github.com",
    "www.w3.org", "crossdock.example",
    "kubernetes.default.svc", "deb.debian.org", "localhost", "127.0.0.1", "control", "prometheus", "worker",
    "collector", "host",
}  # fmt: skip


def test_one_file_reads_the_environment() -> None:
    faults = [
        name_of(path)
        for path in files(*PRODUCT)
        if path.suffix in {".py", *NATIVE}
        and name_of(path) not in ENVIRONMENT_READERS
        and ENVIRONMENT.search(text_of(path))
    ]
    assert not faults, faults


@pytest.mark.parametrize("text", ["os.environ['A']", "os.getenv('A')", 'std::getenv("A")', "setenv(a, b, 1)"])
def test_the_environment_rule_sees_it(text: str) -> None:
    assert ENVIRONMENT.search(text)


def test_functions_keep_their_size() -> None:
    faults = []
    for path in python_files(*PRODUCT):
        text = text_of(path)
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = text.splitlines()[node.lineno - 1 : node.end_lineno]
                # Docstrings, and comments that name steps, are free.
                lines = sum(not line.lstrip().startswith("#") for line in body)
                lines -= len((ast.get_docstring(node, clean=False) or "").splitlines())
                if lines > FUNCTION_LINES:
                    faults.append(f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not faults, "\n".join(faults)


def test_the_values_fit_on_three_screens() -> None:
    lines = text_of(ROOT / "helm" / "crossdock" / "values.yaml").count("\n")
    assert lines <= VALUES_LINES, f"values.yaml: {lines} lines"


def test_kernel_lines_keep_their_width() -> None:
    faults = [
        f"{name_of(path)}:{number}"
        for path in files("ep_kernels")
        if path.suffix == ".cuh"
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if len(line) > KERNEL_COLUMNS
    ]
    assert not faults, "\n".join(faults)


def test_servers_start_only_threads_that_are_watched() -> None:
    """`common`, `control` and `worker` are in processes with /livez, which names a HelperThread that ended."""
    faults = [
        f"{name_of(path)}: {call}"
        for part in ("common", "control", "worker")
        for path in files(f"services/crossdock/{part}")
        for call in re.findall(r"\bthreading\.Thread\((?!\w*\):)|\bimport Thread\b", text_of(path))
    ]
    assert [fault for fault in faults if "helper_thread" not in fault] == []


def test_nothing_is_left_unfinished() -> None:
    faults = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in files(*PRODUCT, "protos", "deploy", "helm", "docs", "tests")
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not faults, "\n".join(faults)


def foreign_places(text: str) -> list[str]:
    """Absolute paths outside the system's own folders, and URLs of hosts that are not named above."""
    paths = [match.group(0) for match in ABSOLUTE_PATH.finditer(text) if match.group(1) not in KNOWN_ROOTS]
    urls = re.findall(r"https?://[^\s\"'<>)`{}]+", text)
    return paths + [url for url in urls if (urlsplit(url).hostname or "localhost") not in HOSTS]


def test_no_file_names_a_place_of_one_machine() -> None:
    read = [path for path in files() if path.name not in {"LICENSE", "go.sum"}]
    faults = [f"{name_of(path)}: {place}" for path in read for place in foreign_places(text_of(path))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("text", ["see {}home/me/x.py", "'{}mnt/tool/bin'", "https:{0}{0}mirror.invalid/simple"])
def test_the_rule_sees_a_foreign_place(text: str) -> None:
    assert foreign_places(text.format("/"))


def test_each_module_opens_with_a_docstring() -> None:
    bare = [
        name_of(path)
        for path in python_files(*PRODUCT, "tests", "protos")
        if text_of(path).strip() and not ast.get_docstring(parsed(text_of(path)))
    ]
    assert not bare, bare


def test_the_licence_is_whole() -> None:
    text = text_of(ROOT / "LICENSE")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert Path(ROOT / "pyproject.toml").read_text().count("Apache-2.0") == 1


def imports_from_here(text: str) -> list[str]:
    """What starts a Python that looks for modules where it was called: what follows `sys.executable` there."""
    faults = []
    for node in ast.walk(parsed(text)):
        for before, after in itertools.pairwise(getattr(node, "elts", ())):
            if ast.unparse(before) == "sys.executable" and ast.unparse(after) not in ("'-P'", "'-I'"):
                faults.append(ast.unparse(after))
    return faults + ["alone"] * (text.count("sys.executable") - len(re.findall(r"sys\.executable, ", text)))


def test_processes_of_ours_import_nothing_from_the_working_directory() -> None:
    """A stray `typer.py` there would run, and a clone named `crossdock` hide the installed package. Two start modules
    of the working directory: benchmarks are there, and `become` may be told so."""
    faults = {(name_of(path), word) for path in python_files(*PRODUCT) for word in imports_from_here(text_of(path))}
    assert faults == {("benchmarks/vllm/launch.py", "'-m'"), ("services/crossdock/demo/hosts.py", "*safe")}


@pytest.mark.parametrize("text", ["[sys.executable, '-m', x]", "(*a, sys.executable, *b)", "run(sys.executable)"])
def test_the_rule_of_the_working_directory_sees_it(text: str) -> None:
    assert imports_from_here(text)


WITH_DTYPE = {"empty", "empty_strided", "eye", "linspace", "ones", "rand", "randn", "zeros"}
WITH_DEVICE = WITH_DTYPE | {"arange", "as_tensor", "asarray", "full", "randint", "randperm", "scalar_tensor", "tensor"}
"""Functions of torch whose result depends on `torch.set_default_device` and `set_default_dtype`. They are the caller's,
and native code would take the result for something else."""


def unsaid(text: str) -> list[str]:
    """What makes a tensor without saying its device, or its dtype where that would be the default one."""
    faults = []
    for node in ast.walk(parsed(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
            continue
        name, given = ast.unparse(node.func).removeprefix("torch."), {keyword.arg for keyword in node.keywords}
        needed = ["device"] * (name in WITH_DEVICE) + ["dtype"] * (name in WITH_DTYPE)
        faults += [f"{node.lineno} torch.{name}: {word}" for word in needed if not given & {word, None}]
    return faults


def test_tensors_do_not_depend_on_the_caller_s_defaults() -> None:
    faults = [
        f"{name_of(path)}:{fault}" for path in python_files("ep_kernels", "services") for fault in unsaid(text_of(path))
    ]
    assert not faults, "\n".join(faults)


def test_the_rule_of_defaults_sees_it() -> None:
    text = "torch.zeros(3)\ntorch.arange(3, device=d)\ntorch.tensor(3, **like)\nx.new_empty(3)\ntorch.full((3,), 1)"
    assert unsaid(text) == ["1 torch.zeros: device", "1 torch.zeros: dtype", "5 torch.full: device"]


def test_one_place_looks_for_the_programs_that_tests_need() -> None:
    """But for those of `make test-deploy` and `make test-bare`, and a test that makes a PATH."""
    own = (
        "tests/tools.py",
        "tests/bare.py",
        "tests/compiler/",
        "tests/deploy/bed/",
        "tests/deploy/live/",
        "tests/services/test_netns.py",
    )
    faults = [name_of(path) for path in python_files("tests") if "shutil.w" + "hich(" in text_of(path)]
    assert [name for name in faults if not name.startswith(own)] == [], "expected tests.tools.needs"
