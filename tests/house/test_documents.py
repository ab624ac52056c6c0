"""What documents name exists: linked files and sections, make targets, options of commands, metrics, labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from typer.main import get_group

from crossdock.cli.app import app
from crossdock.common.metrics import ControlMetrics, FrameworkMetrics, HostMetrics, WorkerMetrics
from tests.house.tree import ROOT, files, name_of, text_of

METRICS = {
    declared.name: set(declared.labels)
    for metrics in (WorkerMetrics(), ControlMetrics(), HostMetrics(), FrameworkMetrics())
    for declared in metrics.declarations()
}
FROM_PROMETHEUS = {"job", "group", "namespace", "instance", "process", "le"}
"""Labels that a scrape, or the page of a host, adds."""
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts} | {"--help"}
    for name, command in get_group(app).commands.items()
}


def documents() -> list[Path]:
    """Every page. The changelog apart: it names what there was."""
    return [path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]


def anchors(text: str) -> set[str]:
    """The names that a page's sections have in links, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(path: Path) -> list[str]:
    """Links of a page to a file or a section that is not there."""
    faults = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        name, _, section = link.partition("#")
        target = path.parent / name if name else path
        if "://" in link:
            continue
        if not target.exists() or (section and target.suffix == ".md" and section not in anchors(text_of(target))):
            faults.append(link)
    return faults


def unknown_labels(text: str) -> list[str]:
    """Metrics, as `name{label}` or `name{label="value"}`, that nobody exports, or not with this label."""
    faults = []
    for name, inside in re.findall(r"\b(crossdock_[a-z_]+) ?\{([^}]*)\}", text):
        labels = set(re.findall(r"(\w+) *(?:=~|!=|=)", inside) or re.findall(r"\w+", inside))
        known = METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name))
        if known is None or labels - known - FROM_PROMETHEUS:
            faults.append(f"{name}{{{inside}}}")
    return faults


def unknown_options(text: str) -> list[str]:
    """Options beside a command of ours that it does not have."""
    faults = []
    for command, rest in re.findall(r"\bcrossdock ([a-z-]+)\b([^`\n#|>)]*)", text.replace("\\\n", " ")):
        given = re.findall(r"(?<![\w-])(--[a-z-]+)", rest)
        faults += [f"crossdock {command} {option}" for option in given if option not in OPTIONS.get(command, given)]
    return faults


def test_links_in_the_documents_lead_somewhere() -> None:
    pages = [*documents(), ROOT / "CHANGELOG.md"]
    faults = [f"{name_of(path)}: {link}" for path in pages for link in dead_links(path)]
    assert not faults, "\n".join(faults)


def test_make_targets_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {
        (name_of(path), target)
        for path in files()
        if path.suffix == ".md" or path.parent.name == ".ci"
        for target in re.findall(r"(?:`|^|\$ |step )make ([a-z-]+)", text_of(path), re.MULTILINE)
    }
    assert named
    assert {target for _, target in named} <= targets, {(p, t) for p, t in named if t not in targets}


def cited_results(texts: Iterable[str]) -> set[str]:
    """The folders under docs/results that these link to, or name in quotes."""
    return {name for text in texts for name in re.findall(r"(?:results/|\")(20\d\d-\d\d-\d\d-[\w-]+)", text)}


def test_folders_of_results_are_those_that_something_cites() -> None:
    kept = {path.name for path in (ROOT / "docs" / "results").iterdir() if path.is_dir()}
    cited = cited_results(text_of(path) for path in files() if path != Path(__file__))
    assert kept == cited, f"cited by nothing: {sorted(kept - cited)}; not there: {sorted(cited - kept)}"


@pytest.mark.parametrize("look", [unknown_labels, unknown_options])
def test_metrics_and_options_named_in_documents_exist(look: Callable[[str], list[str]]) -> None:
    faults = [f"{name_of(path)}: {fault}" for path in documents() for fault in look(text_of(path))]
    assert not faults, "\n".join(faults)


def test_the_rules_see_a_planted_fault(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n[1](#a-b-c) [2](#none) [3](page.md#a-b-c) [4](page.md#d) [5](other.md)\n# A b c\n[6](#a-b-c-1)"
    )
    assert dead_links(page) == ["#none", "page.md#d", "other.md"]
    history = "`2026-11-01-cpux8`"  # in git history, no folder any more
    assert cited_results(["[csv](../results/2026-11-01-a/b)", 'R / "2026-11-02-c"', history]) == {
        "2026-11-01-a",
        "2026-11-02-c",
    }
    text = '`crossdock_epoch{process="w"}` crossdock_rpc_refusals_total{reason} crossdock_epoch{rank} crossdock_no{a}'
    assert unknown_labels(text) == ["crossdock_epoch{rank}", "crossdock_no{a}"]
    assert unknown_options("`crossdock top --once --two`, crossdock up --model x") == ["crossdock top --two"]
