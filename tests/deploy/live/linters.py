"""What others' programs find wrong with our workflows, the chart and the Dockerfile: nothing that is not said here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.bed import tools
from tests.deploy.bed.release import CHART
from tests.deploy.bed.say import Missing
from tests.deploy.live.api_server import EVERYTHING, EXAMPLES
from tests.house.tree import ROOT

VALUES = {"defaults": {}, "everything": EVERYTHING, **{p.stem: yaml.safe_load(p.read_text()) for p in EXAMPLES}}
PASSED = 10
OPTIONAL = ("container-seccomp-profile", "container-ports-check")
ACCEPTED = {
    "container-resources": "a CPU limit holds up steps for which all ranks wait; memory depends on the model",
    "container-ephemeral-storage-request-and-limit": "root is read-only, logs go to stderr: nothing written grows",
    "container-image-pull-policy": "a tag is a version; who moves tags sets image.pullPolicy",
    "pod-networkpolicy": "it wants a policy for egress too, which would have to know the API server",
    "deployment-replicas": "workers serve on without their one control plane; control.replicas for another",
    "deployment-strategy": "a control plane without election is replaced by Recreate: two would both decide",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints spread them; two may share an only node",
    "service-targets-pod": "kube-score does not know that a LeaderWorkerSet makes pods",
    "container-security-context-user-group-id": "a worker with worker.rdma.ipcLock is root: only root gets IPC_LOCK",
}
"""Checks of kube-score that the chart fails with some values, and why that is meant."""


def need(name: str) -> str:
    try:
        return str(tools.need(name)[name])
    except Missing as error:
        pytest.skip(str(error))


def run(*words: str, given: str = "") -> tuple[int, str]:
    """Exit status and both outputs."""
    done = subprocess.run(words, cwd=ROOT, input=given, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    files = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yaml"))
    assert len(files) == 2
    assert run(need("actionlint"), "-no-color", *files) == (0, "")


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: the extra [dev] has it for x86_64 only")
    assert run(hadolint, "Dockerfile") == (0, "")


def test_helm_lint_finds_nothing(helm: str, tmp_path: Path) -> None:
    for name, values in VALUES.items():
        (tmp_path / name).write_text(json.dumps(values))
        code, said = run(need(helm), "lint", "--strict", str(CHART), "--values", str(tmp_path / name))
        assert (code, "WARNING" in said) == (0, False), said


def test_the_tests_of_the_chart_pass_with_this_helm(helm: str, tmp_path: Path) -> None:
    """`make test` skips those that need helm on a machine without."""
    (tmp_path / "helm").symlink_to(need(helm))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/deploy/test_chart.py"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def complaints(values: object) -> set[str]:
    """Checks of kube-score that some object of the chart fails or nearly fails."""
    code, rendered = run(need("helm3"), "template", "moe", str(CHART), "--values", "-", given=json.dumps(values))
    assert code == 0, rendered
    flags = [f"--enable-optional-test={name}" for name in OPTIONAL]
    version = f"v{tools.KUBERNETES.rpartition('.')[0]}"
    _, said = run(
        need("kube-score"),
        "score",
        "-",
        "--output-format=json",
        f"--kubernetes-version={version}",
        *flags,
        given=rendered,
    )
    checks: list[dict[str, Any]] = [check for thing in json.loads(said) for check in thing["checks"]]
    assert set(OPTIONAL) <= {check["check"]["id"] for check in checks if not check["skipped"]}
    return {check["check"]["id"] for check in checks if not check["skipped"] and check["grade"] < PASSED}


def test_kube_score_finds_in_the_chart_what_is_meant_and_nothing_else() -> None:
    found = {name: complaints(values) for name, values in VALUES.items()}
    assert {name: ids - set(ACCEPTED) for name, ids in found.items()} == {name: set() for name in found}
    assert set.union(*found.values()) == set(ACCEPTED), "an exception that nothing needs any more"
