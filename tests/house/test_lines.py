"""No line of code or documentation is longer than 120 columns."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import files, name_of, text_of

COLUMNS = 120
SUFFIXES = {".md", ".py", ".cuh", ".cu", ".h", ".hpp", ".c", ".cpp"}
PRAGMA = re.compile(r"\s*# (type: ignore|noqa|fmt:|mypy:).*$")
LINK_ALONE = re.compile(r"\s*(?:[-*] )?(?:\[[^\]]*\]\(\S*\)|<?https?://\S+>?)[.,;:]?\s*$")


def long_lines(text: str, suffix: str) -> list[int]:
    """Numbers of the lines that are too long.

    In Markdown a table's row, a line that is one link, and what a command printed (a block that is fenced as `console`
    and does not begin with `$`) may be longer; in Python a comment that a checker reads.
    """
    found, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        if suffix == ".md":
            mark = line.strip()
            if mark.startswith("```"):
                fence = "" if fence else mark
            printed = fence == "```console" and not mark.startswith("$")
            if printed or (not fence and (mark.startswith("|") or LINK_ALONE.match(line))):
                continue
        elif suffix == ".py":
            line = PRAGMA.sub("", line)  # noqa: PLW2901
        if len(line) > COLUMNS:
            found.append(number)
    return found


def test_lines_keep_their_length() -> None:
    faults = [
        f"{name_of(path)}:{number}"
        for path in files()
        if path.suffix in SUFFIXES
        for number in long_lines(text_of(path), path.suffix)
    ]
    assert not faults, f"longer than {COLUMNS} columns:\n" + "\n".join(faults)


LONG = "x " * 61


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        (LONG, ".md", [1]),
        (f"| {LONG} |", ".md", []),
        (f"* [{LONG}](page.md)", ".md", []),
        (f"see [{LONG}](page.md) too", ".md", [1]),
        (f"```console\n$ {LONG}\n{LONG}\n```\n{LONG}", ".md", [2, 5]),
        (f"```python\n{LONG}\n```", ".md", [2]),
        (f"{'x' * 110}  # type: ignore[arg-type]", ".py", []),
        (f"// {LONG}", ".cuh", [1]),
    ],
)
def test_the_rule_sees_a_long_line(text: str, suffix: str, expected: list[int]) -> None:
    assert long_lines(text, suffix) == expected
