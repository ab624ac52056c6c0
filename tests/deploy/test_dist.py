"""What a release consists of: one version, the same bytes from the same files, nothing forgotten."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import crossdock
from tests.house.tree import ROOT


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crossdock_dist", ROOT / "deploy" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(path: Path) -> set[str]:
    with tarfile.open(path) as tar:
        return set(tar.getnames())


def test_code_and_chart_have_one_version(dist: ModuleType) -> None:
    assert dist.version() == crossdock.__version__


def test_another_version_in_the_chart_is_refused(
    dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Chart.yaml").write_text(f'version: 9.9.9\nappVersion: "{crossdock.__version__}"\n')
    monkeypatch.setattr(dist, "CHART", tmp_path)
    with pytest.raises(SystemExit, match=r"version: expected .*, got 9\.9\.9"):
        dist.version()


def test_equal_files_give_equal_archives(dist: ModuleType, tmp_path: Path) -> None:
    files = dist.below(dist.CHART)
    for name in ("a.tgz", "b.tgz"):
        dist.archive(tmp_path / name, files, dist.CHART.parent)
    assert (tmp_path / "a.tgz").read_bytes() == (tmp_path / "b.tgz").read_bytes()
    assert {"crossdock/Chart.yaml", "crossdock/values.schema.json", "crossdock/dashboard.json"} <= names(
        tmp_path / "a.tgz"
    )


def test_the_images_context_is_what_the_dockerfile_reads(dist: ModuleType) -> None:
    found = {str(path.relative_to(ROOT)) for path in dist.context()}
    assert {"Dockerfile", ".dockerignore", "pyproject.toml", "services/crossdock/cli/app.py"} <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]


def test_a_release_is_made_of_the_files_that_make_dist_writes() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    said = "\n".join(step.get("run", "") for step in release["jobs"]["files"]["steps"])
    assert "make dist" in said
    assert "dist/crossdock-chart-*.tgz" in said
    assert release["jobs"]["images"]["strategy"]["matrix"]["target"] == ["control", "worker"]
