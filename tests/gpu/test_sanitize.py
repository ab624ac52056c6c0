"""compute-sanitizer finds nothing in any kernel."""

from __future__ import annotations

import pytest

from tests.gpu import sanitize
from tests.tools import needs

needs_sanitizer = needs("compute-sanitizer")


OURS = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at combine+0x1a40
=========     by thread (9,0,0) in block (0,0,0)
"""
TORCHS = OURS.replace("combine+0x1a40", "void at::native::vectorized_elementwise_kernel<(int)4, int>(int)+0x50")
DONE = "steps passed: 44\n"


@pytest.mark.parametrize(
    ("tool", "status", "text", "ok"),
    [
        ("memcheck", 0, DONE + "========= ERROR SUMMARY: 0 errors\n", True),
        ("memcheck", 86, DONE + "========= ERROR SUMMARY: 3 errors\n", False),
        ("memcheck", 0, "========= ERROR SUMMARY: 0 errors\n", False),
        ("memcheck", 1, DONE, False),
        ("memcheck", 1, DONE + "========= ERROR SUMMARY: 0 errors\n", False),
        ("racecheck", 0, DONE + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("racecheck", 86, DONE + "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", False),
        ("initcheck", 86, TORCHS + TORCHS + DONE + "========= ERROR SUMMARY: 2 errors\n", True),
        ("initcheck", 86, TORCHS + OURS + DONE + "========= ERROR SUMMARY: 2 errors\n", False),
        ("initcheck", 86, TORCHS + DONE + "========= ERROR SUMMARY: 2 errors\n", False),
        ("memcheck", 86, TORCHS + DONE + "========= ERROR SUMMARY: 1 error\n", False),
    ],
)
def test_what_a_tool_says_is_understood(tool: str, status: int, text: str, ok: bool) -> None:
    assert sanitize.judge(tool, status, "========= COMPUTE-SANITIZER\n" + text, 1.0).ok is ok


@pytest.mark.slow
@pytest.mark.gpu(1)
@needs_sanitizer
def test_no_tool_finds_anything() -> None:
    findings = sanitize.examine(sanitize.TOOLS)
    assert [finding.tool for finding in findings] == list(sanitize.TOOLS)
    bad = [finding for finding in findings if not finding.ok]
    assert not bad, "\n\n".join(f"{finding.summary}\n{finding.report}" for finding in bad)
