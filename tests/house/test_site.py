"""The site of the documents (deploy/site): its navigation has every page once, and its hooks keep links and lists."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.house.test_public_names import MODULES
from tests.house.tree import ROOT

SITE = ROOT / "deploy" / "site"
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Reads mkdocs' own tags as what stands behind them."""


Loader.add_multi_constructor("!ENV", lambda loader, _, node: loader.construct_sequence(node)[-1])
Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, name, _node: name)


def settings() -> Any:
    """Those of mkdocs.yaml."""
    return yaml.load((SITE / "mkdocs.yaml").read_text(encoding="utf-8"), Loader)


def pages(nav: list[Any]) -> Iterator[str]:
    """Every page that a navigation names."""
    for entry in nav:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(inside) if isinstance(inside, list) else [inside]


def faults(nav: list[Any], expected: set[str]) -> list[str]:
    """Pages that a navigation lacks, names twice, or that are not there."""
    named = Counter(pages(nav))
    return sorted([page for page in named | dict.fromkeys(expected, 0) if page not in expected or named[page] != 1])


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crossdock_site_hooks", SITE / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once() -> None:
    config = settings()
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "results" not in path.parts}
    outside = {place for place in config["extra"]["files"].values() if place.endswith(".md")}
    reference = {f"reference/{module}.md" for module in MODULES}
    assert faults(config["nav"], written | outside | reference) == []


def test_the_rule_sees_a_planted_fault() -> None:
    nav = ["index.md", {"Use": ["a.md", {"B": "b.md"}, {"C": ["a.md", "gone.md"]}]}]
    assert faults(nav, {"index.md", "a.md", "b.md", "new.md"}) == ["a.md", "gone.md", "new.md"]


def test_files_from_outside_the_documents_exist_and_displace_no_page() -> None:
    config = settings()
    assert [source for source in config["extra"]["files"] if not (ROOT / source).is_file()] == []
    assert [place for place in config["extra"]["files"].values() if (DOCS / place).exists()] == []
    assert set(config["extra_css"]) <= set(config["extra"]["files"].values())
    assert (ROOT / config["extra"]["public_names"]).is_file()


def linked(hooks: ModuleType, page: str, text: str, repository: str) -> str:
    """The text of this page of the repository, as the site has it."""
    there = {"vllm.md", "kernels/ll.md"}
    found = {name: SimpleNamespace(inclusion=SimpleNamespace(is_excluded=lambda: False)) for name in there}
    config = SimpleNamespace(
        repo_url=repository,
        extra={"revision": "v1", "files": {"README.md": "index.md", page: page.removeprefix("docs/")}},
    )
    file = SimpleNamespace(abs_src_path=str(ROOT / page), src_uri=page.removeprefix("docs/"))
    made: str = hooks.on_page_markdown(
        text,
        page=SimpleNamespace(file=file),
        config=config,
        files=SimpleNamespace(get_file_from_path=found.get),
    )
    return made


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/kernels/ht.md", "[a](ll.md#b) [c](../vllm.md)", "[a](ll.md#b) [c](../vllm.md)"),
        ("docs/kernels/ht.md", "[a](../../README.md#b)", "[a](../index.md#b)"),
        ("docs/torch.md", "[a\nb](../Makefile)", "[a\nb](https://crossdock.example/blob/v1/Makefile)"),
        ("docs/torch.md", "[a `[b]`](../tests/house)", "[a `[b]`](https://crossdock.example/tree/v1/tests/house)"),
        ("docs/torch.md", "[a](#b) [c](https://crossdock.example/e.md)", "[a](#b) [c](https://crossdock.example/e.md)"),
        ("docs/torch.md", "```\n[a](../Makefile)\n```", "```\n[a](../Makefile)\n```"),
        ("docs/torch.md", "[a](gone.md)", "[a](gone.md)"),
        ("tests/README.md", "[a](../docs/vllm.md)", "[a](../vllm.md)"),
    ],
)
def test_links_lead_to_the_site_or_the_source(hooks: ModuleType, page: str, text: str, expected: str) -> None:
    assert linked(hooks, page, text, "https://crossdock.example/") == expected


def test_without_an_address_of_the_repository_a_link_to_a_source_is_its_text(hooks: ModuleType) -> None:
    assert linked(hooks, "docs/torch.md", "[a](../Makefile) [b](vllm.md)", "") == "a [b](vllm.md)"


def test_lists_are_indented_as_the_site_needs_it(hooks: ModuleType) -> None:
    text = "* a\n  b\n\n  c\n* d\n\n1. e\n   f\n2. g\n\nh\n```\n* i\n  j\n```\n  k"
    expected = "* a\n    b\n\n    c\n\n* d\n\n1. e\n    f\n2. g\n\nh\n```\n* i\n  j\n```\n  k"
    assert hooks.indented(text) == expected


def test_the_release_builds_the_site_with_this_repositorys_address() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text(encoding="utf-8"))
    (step,) = (step for step in release["jobs"]["site"]["steps"] if step.get("run") == "make docs")
    read = {word for word in (SITE / "mkdocs.yaml").read_text(encoding="utf-8").split("[") if word.startswith("DOCS_")}
    assert set(step["env"]) == {word.partition(",")[0] for word in read}


def test_the_site_is_built_where_no_rule_reads() -> None:
    assert (SITE / settings()["site_dir"]).resolve() == Path(ROOT / "build" / "docs")
