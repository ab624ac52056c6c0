"""Compose, Prometheus and image files say the same as the code: ports, metric names, config fields."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from crossdock.common.config import HostConfig, load, split_address
from crossdock.common.metrics import ControlMetrics, HostMetrics, WorkerMetrics
from crossdock.v1.control_pb2 import GroupState
from tests.house.tree import ROOT

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.fixture
def host() -> HostConfig:
    return load(HostConfig, DEPLOY / "host.yaml")


def port(address: str) -> int:
    return split_address(address)[1]


def test_yaml_is_well_kept() -> None:
    pytest.importorskip("yamllint", reason="yamllint comes with the extra [dev]")
    command = [sys.executable, "-m", "yamllint", "--strict", "deploy", "helm", ".pre-commit-config.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_prometheus_scrapes_the_ports_of_the_host_config(host: HostConfig) -> None:
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in read("deploy/prometheus/prometheus.yaml")["scrape_configs"]
    }
    assert host.control is not None
    assert [port(t) for t in jobs["crossdock-control"]] == [port(host.control.http_listen)]
    assert [port(t) for t in jobs["crossdock-host"]] == [port(host.http_listen)]
    assert [port(t) for t in jobs["crossdock-worker"]] == [port(w.http_listen) for w in host.worker_configs()]


def test_compose_publishes_what_clients_need_and_on_loopback_only(host: HostConfig) -> None:
    worker = read("deploy/compose.yaml")["services"]["worker"]
    published = set()
    for mapping in worker["ports"]:
        address, ports, inside = mapping.split(":")
        assert address == "127.0.0.1"
        assert ports == inside
        first, _, last = ports.partition("-")
        published |= set(range(int(first), int(last or first) + 1))
    assert host.control is not None
    assert port(host.control.listen) in published
    assert {port(w.advertise) for w in host.worker_configs()} <= published


def test_compose_mounts_files_that_exist_where_the_command_looks_for_them() -> None:
    services = read("deploy/compose.yaml")["services"]
    worker = services["worker"]
    mounts = {mount["target"]: mount["source"] for mount in worker["volumes"]}
    config = worker["command"][worker["command"].index("--config") + 1]
    assert (DEPLOY / mounts[config]).is_file()
    assert load(HostConfig, DEPLOY / mounts[config]).worker.model in mounts
    folder, inside, _ = services["prometheus"]["volumes"][0].split(":")
    assert (DEPLOY / folder / "prometheus.yaml").is_file()
    assert read("deploy/prometheus/prometheus.yaml")["rule_files"] == [f"{inside}/rules.yaml"]


def test_a_container_is_given_longer_to_stop_than_the_supervisor_takes(host: HostConfig) -> None:
    grace = read("deploy/compose.yaml")["services"]["worker"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > host.stop_timeout_s > host.worker.drain_timeout_s


def test_alerts_name_metrics_and_states_that_exist() -> None:
    exported = set()
    for metrics in (WorkerMetrics(), ControlMetrics(), HostMetrics()):
        exported |= {metric.name for metric in metrics.declarations()}
    for rule in read("deploy/prometheus/rules.yaml")["groups"][0]["rules"]:
        named = set(re.findall(r"\bcrossdock_\w+", rule["expr"] + rule["annotations"].get("description", "")))
        assert named, rule["alert"]
        assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= exported, rule["alert"]
        assert set(re.findall(r"(?:state|to)=\"(\w+)\"", rule["expr"])) <= set(GroupState.keys()), rule["alert"]


def test_the_chart_ships_the_same_alerts() -> None:
    assert (ROOT / "helm" / "crossdock" / "rules.yaml").read_text() == RULES.read_text()


def test_images_run_without_root_and_their_targets_are_the_ones_we_build() -> None:
    text = (ROOT / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    built = set(re.findall(r"--target (\S+)", (ROOT / "Makefile").read_text()))
    assert built == {"control", "worker"} <= targets
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE)
    assert text.index("USER ") < text.index("AS control\n")


def test_the_image_gets_every_file_that_the_build_reads() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {"pyproject.toml", "build_backend.py", "README.md", "LICENSE", "ep_kernels", "services"} == allowed
