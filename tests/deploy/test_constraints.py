"""The pinned dependencies of the container images: all of them, by hash, within the ranges of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.tree import ROOT

EXTRAS = {"control": ("control",), "worker": ("worker", "otlp")}
"""Of pyproject.toml, by image."""
PARTS = tuple(EXTRAS)


def pinned(part: str) -> dict[str, list[Requirement]]:
    """By name. Of one package there may be several versions, for different interpreters."""
    text = (ROOT / "deploy" / "constraints" / f"{part}.txt").read_text().replace("\\\n", " ")
    found: dict[str, list[Requirement]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement, *hashes = line.split(" --hash=")
        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes), line
        one = Requirement(requirement.strip())
        assert re.fullmatch(r"==[^*,]+", str(one.specifier)), line
        found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_what_pyproject_wants_is_pinned_within_its_ranges(part: str) -> None:
    """`make constraints` after a change of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pinned(part)
    extras = [text for extra in EXTRAS[part] for text in project["optional-dependencies"][extra]]
    for text in (*project["dependencies"], *extras):
        wanted = Requirement(text)
        versions = [str(one.specifier)[2:] for one in pins.get(canonicalize_name(wanted.name), [])]
        assert versions, f"{wanted.name} is not pinned"
        assert all(wanted.specifier.contains(version) for version in versions), (text, versions)


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_one_interpreter_gets_one_version_of_each(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for part in PARTS:
        for name, pins in pinned(part).items():
            markers = [Marker(str(one.marker)).evaluate(environment) for one in pins if one.marker]
            assert sum(markers) + (len(pins) - len(markers)) <= 1, (part, name)


def test_the_images_install_nothing_else() -> None:
    """pip refuses a dependency without a hash, so the lists are whole where a build ends."""
    text = (ROOT / "Dockerfile").read_text()
    for part in PARTS:
        assert re.search(rf"pip --python /app/bin/python install --require-hashes --requirement /{part}\.txt", text)
    installs = re.findall(r"pip --python /app/bin/python install (.*)", text)
    assert all("--require-hashes" in one or "--no-deps" in one or "${PIP_ARGS}" in one for one in installs), installs


CONTROL_MB, BASE_MB, OTHER_MB = 250, 126, 9
"""Unpacked: the limit of the control plane's image; its base with Python, tini and certificates; our own code, and the
folders and scripts of an environment."""


def left_out() -> tuple[str, set[str]]:
    """The folder and the packages that the image of the control plane removes after pip has installed them."""
    stage = re.search(r"AS control-dependencies\n(.*?)\nFROM", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    assert stage is not None
    folder = re.search(r"rm -r /app/lib/python3\.\*/site-packages/(\S+)", stage[1])
    names = re.search(r"uninstall --quiet --yes \\\n([^\\\n]*)", stage[1])
    assert folder is not None
    assert names is not None
    return f"{folder[1]}/", {canonicalize_name(name) for name in names[1].split()}


def test_the_image_of_the_control_plane_has_room_for_its_dependencies() -> None:
    """Measured on the packages of this environment; tests/deploy/live builds the image and measures that."""
    folder, names = left_out()
    pins = [(name, one.marker) for name, versions in pinned("control").items() for one in versions]
    wanted = {name for name, marker in pins if marker is None or marker.evaluate()}
    assert names <= wanted
    files = [
        Path(str(file.locate()))
        for name in wanted - names
        for file in distribution(name).files or ()
        if not str(file).startswith(folder)
    ]
    num_bytes = sum(path.stat().st_size for path in files if path.exists())
    assert 60 < num_bytes / 1e6 < CONTROL_MB - BASE_MB - OTHER_MB


def test_nothing_that_stays_in_that_image_needs_what_it_leaves_out() -> None:
    """But for Kubernetes' client, whose part for asyncio is left out, too."""
    _, names = left_out()
    needing = {
        name
        for name in set(pinned("control")) - names - {"kubernetes", "colorama"}
        for line in distribution(name).requires or ()
        if (one := Requirement(line)).name in names and not one.marker
    }
    assert not needing
