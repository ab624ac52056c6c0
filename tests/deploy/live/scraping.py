"""Prometheus in the cluster, against a real kubelet: twice, with the config file of the docs and made by the operator.

Both run as pods and look at one release. The PodMonitor is right when the operator, which reads it, finds the targets
that the config file finds, with the same labels. The tests stand in the order in which an operator would meet them.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
import yaml

from crossdock.common.metrics import ControlMetrics, WorkerMetrics
from tests.deploy.bed import kinds, prometheus
from tests.deploy.bed.images import Images
from tests.deploy.bed.node import Node
from tests.deploy.bed.prometheus import FILES, FOUND_BY, Prometheus
from tests.deploy.bed.release import CHART, NAMESPACE, RANKS, Release, right

RULES = yaml.safe_load((CHART / "rules.yaml").read_text())["groups"]
ALERTS = {rule["alert"] for group in RULES for rule in group["rules"] if "alert" in rule}
SURE = {"CrossdockNotServing", "CrossdockControlPlaneDown", "CrossdockNoLeader"}
ABSENT = re.compile(
    "crossdock_(ep_|network_|certificate_|peer_timeouts|rpc_refusals|silent_rank|members_lost|excluded_|grpc_core_log|"
    "expert_moves|reform_duration|verdict_lost|device_memory)"
)
"""Metrics of vLLM's ranks, of GPUs, of several hosts, of TLS, and of faults and slowness that nobody causes here."""


class Bed(NamedTuple):
    """The release, and the two that look at it."""

    release: Release
    plain: Prometheus
    operated: Prometheus

    def both(self) -> tuple[Prometheus, Prometheus]:
        return self.plain, self.operated

    def eventually(self, what: str, holds: Any) -> None:
        """Until it holds of both."""
        for one in self.both():
            self.release.cluster.eventually(f"{one.name}: {what}", lambda one=one: holds(one), instead=one.explain)


@pytest.fixture(scope="module")
def programs() -> tuple[str, ...]:
    """Prometheus, its operator, and the operator's kinds."""
    return prometheus.PROGRAMS


@pytest.fixture(scope="module")
def bed(given: dict[str, Any], node: Node, images: Images) -> Bed:
    """helm finds the operator's types and makes PodMonitor and PrometheusRule by itself."""
    cluster, image = node.cluster, prometheus.build(images)
    node.load(image)
    cluster.namespace(NAMESPACE)
    kinds.teach(cluster, prometheus.KINDS)
    prometheus.give_rights(cluster, NAMESPACE)
    monitoring = {"interval": "5s", "labels": FOUND_BY}
    release = Release(cluster, node, {**given, "monitoring": monitoring}, "helm3")
    release.install()
    config = (FILES / "kubernetes.yaml").read_text()
    config = config.replace("names: [default]", f"names: [{NAMESPACE}]").replace("15s", "5s")
    files = {"prometheus.yml": config, "rules.yaml": (FILES / "rules.yaml").read_text()}
    return Bed(release, prometheus.with_config(cluster, image, files), prometheus.with_operator(cluster, image))


def expected(release: Release) -> set[tuple[str, str]]:
    """(pod, port) of everything that tells metrics: one port a pod."""
    ports = {"control": "http", "worker": "health"}
    return {(pod["metadata"]["name"], port) for part, port in ports.items() for pod in release.pods(part)}


def test_every_pod_is_scraped_once_and_nothing_else(bed: Bed) -> None:
    def up(one: Prometheus) -> bool:
        targets = one.targets()
        healths = {target["health"] for target in targets.values()}
        return (set(targets), healths) == (expected(bed.release), {"up"})

    bed.eventually("every pod of the release is scraped, and only those", up)


def test_both_give_a_process_the_same_labels(bed: Bed) -> None:
    plain, operated = ([target["labels"] for target in one.targets().values()] for one in bed.both())
    key = lambda labels: sorted(labels.items())  # noqa: E731
    assert sorted(plain, key=key) == sorted(operated, key=key)
    assert {labels["job"] for labels in plain} == {f"{NAMESPACE}/moe"}
    assert {labels["namespace"] for labels in plain} == {NAMESPACE}
    assert {(labels["container"], labels["endpoint"]) for labels in plain} == {
        ("control", "http"),
        ("worker", "health"),
    }


def test_its_account_may_find_the_pods_of_that_namespace_and_nothing_else(bed: Bed) -> None:
    api = bed.release.cluster.api
    for namespace, more in ((NAMESPACE, {("", "pods", "", verb) for verb in ("list", "watch")}), ("default", set())):
        everybody = api.rules("system:serviceaccount:default:anybody", namespace)
        account = f"system:serviceaccount:{prometheus.NAMESPACE}:{prometheus.ACCOUNT}"
        assert api.rules(account, namespace) - everybody == more


def test_every_process_tells_its_metrics(bed: Bed) -> None:
    """Those without labels: the others are there when something has happened, which their labels name."""

    def series(kind: Any) -> set[str]:
        found = [one for one in kind.declarations() if not one.labels]
        return {f"{one.name}_count" if one.kind == "histogram" else one.name for one in found}

    processes = {"http": {"": ControlMetrics()}, "health": {f"worker-{rank}": WorkerMetrics() for rank in range(RANKS)}}
    wanted = {
        (name, pod, process)
        for pod, port in expected(bed.release)
        for process, kind in processes[port].items()
        for name in series(kind)
    }
    found = bed.plain.query('group by (__name__, pod, process) ({__name__=~"crossdock_.+"})')
    assert found is not None
    there = {(one["metric"]["__name__"], one["metric"]["pod"], one["metric"].get("process", "")) for one in found}
    assert wanted - there == set()


def queries() -> list[str]:
    """What the dashboard asks of this release, but for panels about what does not happen here."""
    panels = json.loads((CHART / "dashboard.json").read_text())["panels"]
    asked = [
        target["expr"]
        for one in panels
        for panel in (one, *one.get("panels", ()))
        for target in panel.get("targets", ())
    ]
    here = {"$job": f"{NAMESPACE}/moe", "$group": f"{NAMESPACE}/moe", "$__rate_interval": "2m"}
    return [re.sub(r"\$\w+", lambda name: here[name[0]], one) for one in asked if not ABSENT.search(one)]


def test_every_panel_of_the_dashboard_has_data_while_a_client_asks(bed: Bed) -> None:
    asked = queries()
    bed.release.start_client("asks", 900)

    def without(one: Prometheus) -> list[str]:
        return [query for query in asked if not one.query(query)]

    for one in bed.both():
        bed.release.cluster.eventually(
            f"{one.name}: every panel has data", lambda one=one: not without(one), instead=lambda one=one: without(one)
        )
    bed.release.stop_client("asks")
    right(bed.release.answers("asks"))


def states(one: Prometheus) -> dict[str, str]:
    """State of those alerts that no slow machine sets off."""
    return {name: state for name, state in (one.alerts() or {}).items() if name in SURE}


def test_the_alerts_are_loaded_and_silent_while_the_group_serves(bed: Bed) -> None:
    bed.eventually("knows every alert", lambda one: set(one.alerts() or ()) == ALERTS)
    bed.eventually("is silent", lambda one: states(one) == dict.fromkeys(SURE, "inactive"))


def test_a_group_without_workers_is_told_of_after_a_minute_until_it_serves_again(bed: Bed) -> None:
    (worker,) = bed.release.pods("worker")
    told = dict.fromkeys(SURE, "inactive") | {"CrossdockNotServing": "firing"}
    bed.release.cordon(on=True)
    try:
        bed.release.delete(worker["metadata"]["name"], 0)
        bed.eventually("tells of it and of nothing else", lambda one: states(one) == told)
        left = {pair for pair in expected(bed.release) if pair[1] == "http"}
        bed.eventually("scrapes the control planes alone", lambda one: set(one.targets()) == left)
    finally:
        bed.release.cordon(on=False)
    bed.release.wait_ready()
    bed.eventually("is silent again", lambda one: states(one) == dict.fromkeys(SURE, "inactive"))
    bed.release.asked("again")


def test_uninstall_leaves_nothing(bed: Bed) -> None:
    """Of the objects for Prometheus neither."""
    bed.release.uninstall()
