"""What a release consists of: one version, the same bytes from the same files, nothing forgotten."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import crossdock
from deploy import dist
from tests.house.tree import ROOT


def names(path: Path) -> set[str]:
    with tarfile.open(path) as tar:
        return set(tar.getnames())


def test_code_and_chart_have_one_version() -> None:
    assert dist.version() == crossdock.__version__


def test_another_version_in_the_chart_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Chart.yaml").write_text(f'version: 9.9.9\nappVersion: "{crossdock.__version__}"\n')
    monkeypatch.setattr(dist, "CHART", tmp_path)
    with pytest.raises(SystemExit, match=r"version: expected .*, got 9\.9\.9"):
        dist.version()


def test_equal_files_give_equal_archives(tmp_path: Path) -> None:
    files = dist.below(dist.CHART)
    for name in ("a.tgz", "b.tgz"):
        dist.archive(tmp_path / name, files, dist.CHART.parent)
    assert (tmp_path / "a.tgz").read_bytes() == (tmp_path / "b.tgz").read_bytes()
    assert {"crossdock/Chart.yaml", "crossdock/values.schema.json", "crossdock/dashboard.json"} <= names(
        tmp_path / "a.tgz"
    )


def test_the_images_context_is_what_the_dockerfile_reads() -> None:
    found = {str(path.relative_to(ROOT)) for path in dist.context()}
    assert {"Dockerfile", ".dockerignore", "pyproject.toml", "services/crossdock/cli/app.py"} <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]


def test_the_sums_are_of_every_file_and_not_of_themselves(tmp_path: Path) -> None:
    for name in ("b.tgz", "a.json"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in dist.add_sums(tmp_path)] == ["a.json", "b.tgz"]
    before = (tmp_path / "SHA256SUMS").read_text()
    assert [line.split()[1] for line in before.splitlines()] == ["a.json", "b.tgz"]
    dist.add_sums(tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text() == before
