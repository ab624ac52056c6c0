"""`make release-check`: what fails, what is skipped, and that the release workflow runs the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import crossdock
from deploy import release
from tests.house.tree import ROOT


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A release of a tree that has a version, a changelog and no tag."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3: what it is\n")
    monkeypatch.setattr(release.dist, "ROOT", tmp_path)
    monkeypatch.setattr(release.dist, "version", lambda: "1.2.3")
    monkeypatch.setattr(release.dist, "run", lambda *words, **more: "")
    return release.Release(tmp_path / "dist", tmp_path, tmp_path)


def test_code_changelog_and_chart_of_this_tree_agree(tmp_path: Path) -> None:
    assert release.Release(tmp_path, tmp_path, tmp_path).number == crossdock.__version__
    assert re.search(rf"^## {re.escape(crossdock.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("tags", "found"), [("", "1.2.3, no tag on this commit"), ("nightly\nv1.2.3\n", "1.2.3, tagged")]
)
def test_a_version(made: Any, monkeypatch: pytest.MonkeyPatch, tags: str, found: str) -> None:
    monkeypatch.setattr(release.dist, "run", lambda *words: tags)
    assert made.version() == found


def test_another_tag_is_refused(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.dist, "run", lambda *words: "v1.2.4\n")
    with pytest.raises(SystemExit, match=r"expected v1\.2\.3, got v1\.2\.4"):
        made.version()


def test_a_version_without_a_section_of_the_changelog_is_refused(made: Any, tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.30\n\n## 0.1.0\n")
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md: expected a section 1\.2\.3"):
        made.version()


def test_steps_behind_one_that_failed_are_not_begun(made: Any) -> None:
    begun: list[str] = []

    def step(name: str, problem: BaseException | None = None) -> Any:
        def run(_: Any) -> str:
            begun.append(name)
            if problem is not None:
                raise problem
            return f"{name} found"

        return run

    steps = {
        "a": step("a"), "b": step("b"), "c": step("c", release.Skipped("no tool")),
        "d": step("d", SystemExit("expected x, got y")), "e": step("e"), "f": step("f"),
    }  # fmt: skip
    rows = release.run_steps(made, steps, ["b"])
    assert [(name, state, found) for name, state, _, found in rows] == [
        ("a", "ok", "a found"),
        ("b", "skipped", "--without"),
        ("c", "skipped", "no tool"),
        ("d", "FAILED", "expected x, got y"),
        ("e", "not begun", ""),
        ("f", "not begun", ""),
    ]
    assert begun == ["a", "c", "d"]


def test_a_failure_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "dist"), "--tools", str(tmp_path)]
    monkeypatch.setattr(release, "STEPS", {"version": lambda _: sys.exit("expected 1, got 2")})
    assert release.main(words) == 1
    assert re.search(r"^version +FAILED +0 +expected 1, got 2$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(release, "STEPS", {"version": lambda _: "1.2.3"})
    assert release.main(words) == 0


def test_what_the_machine_lacks_is_named(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.shutil, "which", lambda name: None)
    for step, reason in (("chart", "no helm on PATH"), ("bare", "needs root and debootstrap")):
        with pytest.raises(release.Skipped, match=reason):
            getattr(made, step)()


def test_the_demo_runs_from_the_wheel_alone(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[list[str], Path | None]] = []

    def run(*words: object, cwd: Path | None = None) -> str:
        called.append(([str(word) for word in words], cwd))
        return '{"passed": true, "rows": [{}, {}]}'

    monkeypatch.setattr(release.dist, "run", run)
    made.folder.mkdir()
    (made.folder / "crossdock-1.2.3-py3-none-linux_x86_64.whl").touch()
    made.families = ["mixtral"]
    assert "2 models from the wheel" in made.demo()
    python = tmp_path / "installed" / "bin" / "python"
    assert called[1][0] == [str(python), *["-m", "pip", "install", "--quiet"], f"{made.wheel}[demo]"]
    assert called[2] == ([str(python.with_name("crossdock")), *["demo", "--json", "--family", "mixtral"]], tmp_path)


@pytest.mark.parametrize("least", ["2_26", "2_31", ""])
def test_the_wheel_must_run_where_its_name_says(made: Any, monkeypatch: pytest.MonkeyPatch, least: str) -> None:
    said = f'consistent with the platform tag: "manylinux_{least}_x86_64".' if least else "no platform tag"
    monkeypatch.setattr(release.dist, "run", lambda tool, *_: said if tool.name == "auditwheel" else "")
    made.folder.mkdir()
    (made.folder / "crossdock-1.2.3-py3-none-manylinux_2_28_x86_64.whl").touch()
    if least == "2_26":
        assert made.metadata() == "twine check --strict passed; libraries need manylinux_2_26"
    else:
        with pytest.raises(SystemExit, match=f"expected libraries for that glibc, got {said}"):
            made.metadata()


def test_a_list_of_components_must_have_what_the_wheel_needs(made: Any) -> None:
    made.folder.mkdir()
    path = made.folder / "crossdock-1.2.3.cdx.json"
    bom = {"metadata": {"component": {}}, "components": [{"name": "grpcio"}, {"name": "Torch"}]}
    path.write_text(json.dumps(bom))
    with pytest.raises(SystemExit, match="expected protobuf among its components"):
        made.components()
    path.write_text(json.dumps(bom | {"components": [*bom["components"], {"name": "protobuf"}]}))
    assert made.components() == "crossdock-1.2.3.cdx.json: 3 components"
    assert json.loads(path.read_text())["metadata"]["component"]["version"] == "1.2.3"


def test_the_workflow_publishes_the_files_that_this_has_checked() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    steps = workflow["jobs"]["files"]["steps"]
    runs = [step.get("run", "") for step in steps]
    checked = runs.index("make release-check")
    attested = next(n for n, step in enumerate(steps) if "attest-build-provenance" in step.get("uses", ""))
    published = [n for n, run in enumerate(runs) if "gh release create" in run or "helm push" in run]
    assert checked < attested < min(published)
    assert "dist/crossdock-chart-*.tgz" in runs[published[-1]]
    assert workflow["jobs"]["images"]["strategy"]["matrix"]["target"] == ["control", "worker"]


def test_the_check_is_of_a_clean_clone() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrelease-check:")[2].partition("\n\n")[0]
    assert recipe.index("git clone") < recipe.index("cd build/release && ") < recipe.index("deploy.release")
