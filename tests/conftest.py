"""Markers that ask the machine: a test that cannot run here is skipped with the reason, or fails with it where
`--must-have` says so. Hypothesis asks no clock."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import compiler, tools

compiler.provide()

# How long an example takes is the machine's affair.
settings.register_profile("any machine", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("any machine")

# Modules and tests are many and none is garbage: the collector looks at none of them, then or later.
gc.disable()

_SLOW = {"services": 0, "transports": 1, "collectives": 2}
"""Folders of slow files, the slowest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """--over-hosts: the contract suite over several hosts. --all-families: each of them serves, not a few."""
    parser.addoption(
        "--must-have",
        action="append",
        default=[],
        choices=sorted(tools.TOOLS),
        metavar="TOOL",
        help="a test that skips for lack of this tool (of tests/tools.py) fails",
    )
    parser.addoption("--all-families", action="store_true", help="tests/services/test_families.py: serve every family")
    parser.addoption("--record-families", default="", help="add a line for each family that is served to this file")
    parser.addoption(
        "--over-hosts",
        choices=("none", "short", "full", "gpus"),
        default="none",
        help="transports' tests: on one host alone (none), one group over two hosts as well (short), or over hosts in "
        "every split by every provider, and nothing else (full); of GPUs, over two hosts (gpus)",
    )
    parser.addoption("--record-calls", action="store_true", help="engines: keep what they call of deep_ep (tried.json)")
    parser.addoption("--whole-layer", action="store_true", help="tests/services/test_fp8_layer.py: 11.3 GB of experts")
    parser.addoption("--rxe", action="store_true", help="tests/rxe: start the guest")
    parser.addoption("--rxe-out", help="tests/rxe: folder for the results of the yardsticks")
    parser.addoption(
        "--provider",
        action="append",
        help="tests of the network's bytes: of these providers, not of those that every machine has",
    )


def _order(items: list[pytest.Item]) -> None:
    """The order in which files are given out: a long one that begins last would keep one worker busy alone. Those that
    start processes first; in a folder those of many tests, of which the next file is not given out too early."""
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (_SLOW.get(item.path.parent.name, len(_SLOW)), -sizes[item.path]))


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries complain at the end of what nobody has freed."""
    gc.unfreeze()


def _num_gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()  # asks NVML: is_available() would start CUDA, and rank processes are forked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu(n)` tests where there are fewer than n devices; beside other workers, begin with the slow files."""
    if hasattr(config, "workerinput"):
        _order(items)
    wanting = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not wanting:
        return
    present = _num_gpus()
    for item, marker in wanting:
        needed = marker.args[0] if marker.args else 1
        if present < needed:
            why = tools.reason("CUDA devices", f"wants {needed}, this machine has {present}")
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip for lack of what the machine must have is a failure."""
    report = yield
    if report.skipped and tools.lacked_by(report) in item.config.getoption("must_have"):
        report.outcome, report.longrepr = "failed", report.longrepr[2]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """After the list of skips: what the machine lacked."""
    yield
    for line in tools.said(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)
