"""The recipes: objects of the types that they name, lines that differ from upstream's own, settings that load."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdock.common.config import FrameworkConfig
from tests import tools
from tests.deploy.object_types import OWN_READING, definition, faults_of, group_of
from tests.deploy.test_chart import render
from tests.house.tree import ROOT

RECIPES = ROOT / "deploy" / "recipes"
NAMES = sorted(path.name for path in RECIPES.iterdir() if path.is_dir())
OF_OUR_CHART = ("transformers",)
"""Recipes that are values of Crossdock's own chart."""
MARK = "  # crossdock"
"""Ends the lines that upstream's own does not have."""
FREE = {"labels", "matchLabels", "annotations", "data", "limits", "requests"}
"""Fields whose keys are the user's."""


def source(name: str) -> Path:
    """The recipe's one file of YAML."""
    (path,) = (RECIPES / name).glob("*.yaml")
    return path


def objects(name: str) -> list[Any]:
    """What the recipe gives to the cluster, or to another project's chart. Skips where its types are not known."""
    if name in OF_OUR_CHART:
        if tools.lack("helm"):
            tools.skip("helm", "not installed")
        return list(render("--values", str(source(name))).values())
    found = [one for one in yaml.safe_load_all(source(name).read_text()) if one]
    for path in filter(None, map(definition, found)):
        if not path.exists():
            tools.skip("definitions of other projects' types", f"{path.name} is not in the cache")
    return found


def text_of(name: str, suffix: str) -> str:
    """The recipe's file of that kind."""
    return next((RECIPES / name).glob(f"*{suffix}")).read_text()


def marked(name: str) -> list[str]:
    """The lines of the recipe that upstream's own does not have."""
    return [line.strip().removesuffix(MARK) for line in text_of(name, ".yaml").splitlines() if line.endswith(MARK)]


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_of_the_type_that_it_names(name: str) -> None:
    for thing in objects(name):
        assert faults_of(thing) == []


def keys(thing: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every field that has a name of its type's."""
    for key, one in thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ():
        if isinstance(thing, dict) and not (path and path[-1] in FREE) and path != ("spec", "selector"):
            yield (*path, key)
        yield from keys(one, (*path, key))


def misspelt(thing: Any, path: tuple[Any, ...]) -> Any:
    """The object with an X behind the name of that field."""
    made = parent = copy.deepcopy(thing)
    for key in path[:-1]:
        parent = parent[key]
    parent[f"{path[-1]}X"] = parent.pop(path[-1])
    return made


@pytest.mark.parametrize("name", NAMES)
def test_every_misspelt_field_is_refused(name: str) -> None:
    tried = 0
    for thing in objects(name):
        for path in keys(thing):
            if path != ("apiVersion",):  # by which the type is found
                assert faults_of(misspelt(thing, path)), f"{thing.get('kind')}: {path}"
                tried += 1
    assert tried > 10


def test_every_recipe_has_a_page_that_the_list_leads_to() -> None:
    page = (RECIPES / "README.md").read_text()
    assert set(re.findall(r"\]\(([a-z-]+)/README\.md\)", page)) == set(NAMES)
    assert all(source(name).name in text_of(name, ".md") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_three_lines_of_each_engine_that_differ(name: str) -> None:
    lines = marked(name)
    images = [line for line in lines if "crossdock:" in line or line.startswith("repository")]
    assert len(lines) == 3 * len(images) > 0
    shown = re.findall(r"^```\n(.*?)^```$", text_of(name, ".md"), re.DOTALL | re.MULTILINE)
    assert set(lines) == {line.strip() for block in shown for line in block.splitlines() if line.strip()}


def in_the_image() -> dict[str, str]:
    """The files of settings that the engine's image has, by path."""
    text = (RECIPES / "Dockerfile").read_text()
    return dict(re.findall(r"^COPY <<EOF (\S+)\n(.*?)^EOF$", text, re.MULTILINE | re.DOTALL))


def settings(name: str) -> list[dict[str, str]]:
    """CROSSDOCK_* of each engine of the recipe."""
    pairs = re.findall(r"\{name: (CROSSDOCK_\w+), value: (\S+)\}", text_of(name, ".yaml"))
    return [{key: value} for key, value in pairs]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_OUR_CHART])
def test_the_plugin_is_on_and_has_a_network_where_the_group_has_several_hosts(name: str, tmp_path: Path) -> None:
    text = text_of(name, ".yaml")
    files = in_the_image()
    for thing in yaml.safe_load_all(text):
        if thing.get("kind") == "ConfigMap":
            files |= {f"/etc/{thing['metadata']['name']}/{key}": value for key, value in thing["data"].items()}
    found = []
    for environment in settings(name):
        if "CROSSDOCK_CONFIG" in environment:
            (tmp_path / "c.yaml").write_text(files[environment["CROSSDOCK_CONFIG"]])
            environment["CROSSDOCK_CONFIG"] = str(tmp_path / "c.yaml")
        found.append(FrameworkConfig.from_env(environment))
    assert found
    assert {one.vllm for one in found} == {"native"}
    several = bool(re.search(r"size: 2|nodeCount: 2|dataLocal: 8", text))
    assert all((one.network is not None) == several for one in found)
    assert len({one.group for one in found}) == len(found), "metrics of two groups would be one"
    assert "deepep_v2" in text


def test_settings_of_the_image_load(tmp_path: Path) -> None:
    files = in_the_image()
    assert set(files) == {"/etc/crossdock/tcp.yaml", "/etc/crossdock/verbs.yaml"}
    for path, text in files.items():
        (tmp_path / "c.yaml").write_text(text)
        network = FrameworkConfig.from_env({"CROSSDOCK_CONFIG": str(tmp_path / "c.yaml")}).network
        assert network is not None
        assert network.provider == Path(path).stem


def test_values_of_other_charts_are_told_from_objects() -> None:
    assert group_of({"servingEngineSpec": {}}) == "" in OWN_READING
    assert group_of({"apiVersion": "v1"}) == "v1"
    assert group_of({"apiVersion": "apps/v1"}) == "apps"
