"""Compose, Prometheus and image files say the same as the code: ports, metric names, config fields."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from crossdock.common.addresses import split_address
from crossdock.common.config import HostConfig, load
from crossdock.common.metrics import ControlMetrics, FrameworkMetrics, HostMetrics, WorkerMetrics
from crossdock.protocol.v1.control_pb2 import GroupState
from tests import tools
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout


def workers() -> list[Any]:
    services = read("deploy/compose.yaml")["services"]
    return [services["worker-cpu"], services["worker-gpu"]]


def test_prometheus_scrapes_the_ports_of_the_host_config(host: HostConfig) -> None:
    (job,) = read("deploy/prometheus/prometheus.yaml")["scrape_configs"]
    image = (ROOT / "Dockerfile").read_text()
    control, worker = job["static_configs"][0]["targets"]
    assert control == "control:7401"
    assert '"http_listen=0.0.0.0:7401"' in image
    assert worker == f"worker:{port(host.http_listen)}"
    assert all(worker["networks"]["default"]["aliases"] == ["worker"] for worker in workers())


def test_prometheus_in_a_cluster_scrapes_the_ports_that_the_chart_names_and_no_other() -> None:
    (job,) = read("deploy/prometheus/kubernetes.yaml")["scrape_configs"]
    (ports,) = (
        rule["regex"]
        for rule in job["relabel_configs"]
        if rule.get("action") == "keep" and rule["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    )
    chart = ROOT / "helm" / "crossdock" / "templates"
    pods = "".join((chart / name).read_text() for name in ("deployment-control.yaml", "_worker.tpl"))
    named = {re.sub(r"{{.*?}}", "11", name) for name in re.findall(r"{name: (\S+?(?: \$i }})?), containerPort", pods)}
    assert named == {"grpc", "http", "health", "grpc-11", "requests-11", "data-11"}
    assert {name for name in named if re.fullmatch(ports, name)} == {"http", "health"}


def test_compose_publishes_what_clients_need_and_on_loopback_only(host: HostConfig) -> None:
    services = read("deploy/compose.yaml")["services"]
    published = set()
    for name in ("control", "worker-cpu", "prometheus", "grafana"):
        for mapping in services[name]["ports"]:
            address, ports, inside = mapping.split(":")
            assert address == "127.0.0.1"
            assert ports == inside
            first, _, last = ports.partition("-")
            published |= set(range(int(first), int(last or first) + 1))
    assert services["worker-gpu"]["ports"] == services["worker-cpu"]["ports"]
    assert host.control is None
    workers = host.worker_configs()
    assert {7400, *(port(w.advertise) for w in workers), *(w.request_port for w in workers)} <= published


def test_workers_join_the_control_plane_of_the_compose_file(host: HostConfig) -> None:
    service, _ = split_address(host.worker.control)
    assert service in read("deploy/compose.yaml")["services"]
    assert host.worker.uid, "a container's hostname is another one after each restart"


def test_one_profile_is_the_default_and_each_has_its_workers() -> None:
    assert (DEPLOY / ".env").read_text().strip() == "COMPOSE_PROFILES=cpu"
    assert [worker["profiles"] for worker in workers()] == [["cpu"], ["gpu"]]


def test_compose_mounts_files_that_exist_where_the_command_looks_for_them() -> None:
    services = read("deploy/compose.yaml")["services"]
    for worker in workers():
        mounts = {mount["target"]: mount["source"] for mount in worker["volumes"]}
        config = worker["command"][worker["command"].index("--config") + 1]
        assert (DEPLOY / mounts[config]).is_file()
        assert load(HostConfig, DEPLOY / mounts[config]).worker.model in mounts
    folder, inside, _ = services["prometheus"]["volumes"][0].split(":")
    assert (DEPLOY / folder / "prometheus.yaml").is_file()
    assert read("deploy/prometheus/prometheus.yaml")["rule_files"] == [f"{inside}/rules.yaml"]


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where `kept` lacks what `given` has."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from lost(value, kept[key], f"{path}/{key}") if key in kept else [f"{path}/{key}"]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, pair in enumerate(zip(given, kept, strict=True)):
            yield from lost(*pair, f"{path}/{number}")
    elif given != kept:
        yield path


def test_grafanas_own_model_reads_the_whole_dashboard() -> None:
    """Generated from Grafana's schema by its makers. A variable's `definition` is for the editor only."""
    model = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="it comes with the extra [dev]")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    ours = json.loads((ROOT / "helm" / "crossdock" / "dashboard.json").read_text())
    kept = json.loads(encoder.JSONEncoder().encode(model.Dashboard.from_json(ours)))
    assert [path for path in lost(ours, kept) if not path.endswith("/definition")] == []
    assert len(kept["panels"]) > 50


def test_grafana_is_given_the_source_and_the_dashboard() -> None:
    services = read("deploy/compose.yaml")["services"]
    mounts = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    provider = read("deploy/grafana/provisioning/dashboards/crossdock.yaml")["providers"][0]
    folder = mounts[provider["options"]["path"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / folder / home.rpartition("/")[2]).is_file()
    url = read("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["url"]
    assert url == "http://prometheus:9090"


def test_a_container_is_given_longer_to_stop_than_the_supervisor_takes(host: HostConfig) -> None:
    for worker in workers():
        assert int(worker["stop_grace_period"].removesuffix("s")) > host.stop_timeout_s > host.worker.drain_timeout_s


def rules() -> list[dict[str, Any]]:
    """Alerts, and what is recorded."""
    return [rule for group in read("deploy/prometheus/rules.yaml")["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Of all groups."""
    return [rule for rule in rules() if "alert" in rule]


def test_alerts_name_metrics_and_states_that_exist() -> None:
    exported = set()
    for metrics in (WorkerMetrics(), ControlMetrics(), HostMetrics(), FrameworkMetrics()):
        exported |= {metric.name for metric in metrics.declarations()}
    for rule in rules():
        name, words = rule.get("alert") or rule["record"], rule.get("annotations", {}).get("description", "")
        named = set(re.findall(r"\bcrossdock_\w+", rule["expr"] + words))
        assert named, name
        assert {re.sub(r"_(bucket|count|sum)$", "", one) for one in named} <= exported, name
        assert set(re.findall(r"(?:state|to)=\"(\w+)\"", rule["expr"])) <= set(GroupState.keys()), name


def test_each_alert_has_a_runbook_that_is_there_and_knows_its_group() -> None:
    for rule in alerts():
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        base, _, path = address.partition("/docs/")
        assert base == "https://crossdock.example"
        titles = re.findall(r"^#+ (.+)$", (ROOT / "docs" / f"{path.rstrip('/')}.md").read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, rule["alert"]


def test_what_is_added_up_is_added_up_by_group() -> None:
    """The scrape job is the scraper's: with annotations one job has the pods of all groups."""
    for rule in rules():
        by = re.findall(r"\b(?:sum|max|min|avg|group)\b(?! by \(namespace, job, group\b)(?=[ (]+\w)", rule["expr"])
        assert not by, f"{rule}: aggregates over groups"


def test_each_alert_is_tried_with_two_groups_of_one_scrape_job() -> None:
    tried: dict[str, set[str]] = {}
    for test in read("deploy/prometheus/rules_test.yaml")["tests"]:
        series = [one["series"] for one in test["input_series"]]
        assert all('job="pods", namespace="n", group="' in one for one in series), test["name"]
        for one in test.get("alert_rule_test", ()):
            groups = {re.findall(r'group="(\w+)"', name)[0] for name in series}
            told = {alert["exp_labels"].get("group") for alert in one.get("exp_alerts", ())}
            if told and None not in told and told < groups:
                tried.setdefault(one["alertname"], set()).update(told)
    assert tried.keys() == {rule["alert"] for rule in alerts()}


@tools.needs("promtool")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    command = [str(tools.path("promtool")), "test", "rules", "rules_test.yaml"]
    done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", (RULES.parent / "rules_test.yaml").read_text()))
    assert tested == {rule["alert"] for rule in alerts()}


@tools.needs("hadolint")
def test_hadolint_finds_nothing_to_complain_about() -> None:
    command = [str(tools.path("hadolint")), "Dockerfile", "deploy/recipes/Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout


def test_the_chart_ships_the_same_alerts() -> None:
    assert (ROOT / "helm" / "crossdock" / "rules.yaml").read_text() == RULES.read_text()


def test_images_run_without_root_and_their_targets_are_the_ones_we_build() -> None:
    text = (ROOT / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    built = set(re.findall(r"docker build --target (\S+)", (ROOT / "Makefile").read_text()))
    assert built == {"control", "worker"} <= targets
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE)
    assert text.index("USER ") < text.index("AS control\n")


def test_the_image_gets_every_file_that_the_build_reads() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {"pyproject.toml", "build_backend.py", "README.md", "LICENSE", "ep_kernels", "services",
            "deploy/constraints"} == allowed  # fmt: skip


def test_the_live_tests_can_be_collected() -> None:
    """They run where there are tools and root; that their imports hold is seen everywhere."""
    files = [path for path in (ROOT / "tests/deploy/live").glob("*.py") if path.stem not in ("__init__", "conftest")]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
