"""compute-sanitizer finds nothing in any kernel."""

from __future__ import annotations

import shutil

import pytest

from tests.gpu import sanitize

needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer (of the CUDA toolkit) on PATH"
)


@pytest.mark.slow
@pytest.mark.gpu(1)
@needs_sanitizer
def test_no_tool_finds_anything() -> None:
    findings = sanitize.examine(sanitize.TOOLS)
    assert [finding.tool for finding in findings] == list(sanitize.TOOLS)
    bad = [finding for finding in findings if not finding.ok]
    assert not bad, "\n\n".join(f"{finding.summary}\n{finding.report}" for finding in bad)
