"""The chart: its values keep to the schema; rendered (where helm is installed), its config files load."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import crossdock
from crossdock.common.config import ControlConfig, HostConfig, load, split_address
from tests.house.tree import ROOT

CHART = ROOT / "helm" / "crossdock"
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def faults_of(given: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the extra [dev]")
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [fault.message for fault in jsonschema.Draft7Validator(schema).iter_errors(given)]


def test_the_default_values_keep_to_the_schema() -> None:
    assert faults_of(values()) == []


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("control", {"config": {"leas_s": 1}}),
        ("control", {"config": {"world_size": 3}}),
        ("worker", {"config": {"dtype": "int3"}}),
        ("worker", {"config": {"listen": "a:1"}}),
        ("worker", {"numWorkers": 0}),
        ("worker", {"modle": {}}),
        ("image", {"pullPolicy": "Sometimes"}),
    ],
)
def test_wrong_values_are_refused(part: str, wrong: dict[str, Any]) -> None:
    given = values()
    given[part] = {**given[part], **wrong}
    assert len(faults_of(given)) == 1


def test_the_chart_carries_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == crossdock.__version__


def render(*flags: str) -> dict[str, Any]:
    command = [str(HELM), "template", "moe", str(CHART), "--kube-version", "1.31.0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


@needs_helm
def test_helm_finds_nothing_to_complain_about() -> None:
    done = subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


@needs_helm
def test_the_rendered_configs_load(tmp_path: Path) -> None:
    flags = ["--set", "worker.numWorkers=3", "--set", "worker.model.path=a/b", "--set", "worker.config.dtype=float32"]
    made = render(*flags, "--set", "control.config.lease_s=2", "--set", "control.config.log.level=debug")
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    (tmp_path / "h.yaml").write_text(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    control = load(ControlConfig, tmp_path / "c.yaml")
    advertise = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    host = load(HostConfig, tmp_path / "h.yaml", [advertise.replace("$(POD_IP)", "10.0.0.1")])
    assert (control.world_size, control.lease_s, control.log.level) == (3, 2.0, "debug")
    assert (host.num_workers, host.control, host.worker.model, host.worker.dtype) == (3, None, "/models/a/b", "float32")
    assert host.worker.control == "moe-control:7400"
    assert [w.advertise for w in host.worker_configs()] == [f"10.0.0.1:{7500 + i}" for i in range(3)]


@needs_helm
def test_ports_probes_and_grace_fit_the_configs() -> None:
    made = render("--set", "worker.numWorkers=3")
    pod = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    host = yaml.safe_load(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    assert ports["health"] == split_address(host["http_listen"])[1]
    assert [ports[f"grpc-{i}"] for i in range(3)] == [7500, 7501, 7502]
    assert [ports[f"http-{i}"] for i in range(3)] == [7600, 7601, 7602]
    assert pod["terminationGracePeriodSeconds"] > host["stop_timeout_s"]
    assert pod["securityContext"]["runAsNonRoot"]


@needs_helm
def test_monitoring_is_rendered_on_demand() -> None:
    assert not [name for name in render() if name.startswith(("PodMonitor", "PrometheusRule"))]
    made = render("--set", "monitoring.podMonitor=true", "--set", "monitoring.rules=true")
    assert made["PrometheusRule/moe"]["spec"]["groups"][0]["rules"]
    assert len(made["PodMonitor/moe"]["spec"]["podMetricsEndpoints"]) == 6
