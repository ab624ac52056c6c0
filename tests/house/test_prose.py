"""User pages are read once: sentences under 35 words, no table cell above 40.

A sentence ends at `.`, `!`, `?`, `:` or `;` before a space, or with its block: a paragraph, a list item, a table cell.
Fences and headings are no prose. A word has a letter or a digit; a link is its text; a code span, and a list of them,
is one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "helm" / "crossdock" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy" / "recipes").rglob("*.md")),
]
SENTENCE = 34
CELL = 40

_ENDS = re.compile(r"(?<=[.!?:;])[\"')*_]*\s+")
_SHORT = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.")
_ITEM = re.compile(r"^\s*(?:(?:[*+-]|\d+[.)])\s+|>\s?)")
_RULE = re.compile(r"[\s|:-]+")


def plain(text: str) -> str:
    """What a reader sees: links as their text, no HTML, code as one word, a list of code too."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"code(?:,\s+code)+", "code", text)
    return _SHORT.sub(r"\1", re.sub(r"<[^<>]*>", " ", text))


def words(text: str) -> int:
    """How many words have a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def cells(row: str) -> list[str]:
    """The cells of a table's row; a bar in a code span or after a backslash is text."""
    return re.split(r"(?<!\\)\|", plain(row.strip().strip("|")))


def blocks(page: str) -> Iterator[tuple[int, bool, str]]:
    """The line, whether it is a table's cell, and the text of each paragraph, list item and cell."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), page, flags=re.DOTALL)
    fence, begun, held = "", 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        row = not fence and line.lstrip().startswith("|")
        apart = bool(fence or mark or row) or not line.strip() or line.startswith("#") or bool(_ITEM.match(line))
        if apart and held:
            yield begun, False, plain("\n".join(held))
            held = []
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif row and not _RULE.fullmatch(line):
            yield from ((number, True, cell) for cell in cells(line))
        elif not (fence or mark or row or line.startswith("#") or not line.strip()):
            begun = begun if held else number
            held.append(_ITEM.sub("", line, count=1))


def too_long(page: str) -> list[str]:
    """Each sentence and cell above the limits: line, number of words, beginning."""
    faults = []
    for number, is_cell, text in blocks(page):
        if is_cell and words(text) > CELL:
            faults.append(f"{number}: a cell of {words(text)} words: {text.strip()[:60]}")
        for sentence in _ENDS.split(text):
            if words(sentence) > SENTENCE:
                faults.append(f"{number}: a sentence of {words(sentence)} words: {' '.join(sentence.split())[:60]}")
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_cells_of_user_pages_are_short(page: Path) -> None:
    faults = too_long(page.read_text(encoding="utf-8"))
    assert not faults, "\n".join(faults)


def test_the_rule_sees_a_planted_fault() -> None:
    long = " ".join(["word"] * 35)
    half = " ".join(["word"] * 20)
    page = f"""# {long}

Short. [Two]({long}) words.
{half} (`a b c`, `d`): {half}; e.g. {half}

* {long}
  1. {half}
{half}
```
{long}
```
| a | `b | c {long}` {half} |
|---|---|
| {long} word. {half} \\| | {half} |
"""
    assert [fault[: fault.index(" words")] for fault in too_long(page)] == [
        "6: a sentence of 35",
        "7: a sentence of 40",
        "14: a cell of 56",
        "14: a sentence of 36",
    ]
