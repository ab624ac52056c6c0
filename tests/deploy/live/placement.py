"""Where the real scheduler puts the pods of the chart, on GPU nodes that are only objects, and why one has to wait.

The ranks of a pod are on one node and in one clique whatever is asked for; values choose which. Pods of a group over
several nodes are on different ones, together in a clique where values say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.bed import fakes, kinds
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.release import CHART
from tests.deploy.bed.say import Missing


def example(name: str, **changes: Any) -> dict[str, Any]:
    """Of the worker, in an example of the chart; no controller of LeaderWorkerSets is here."""
    worker = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())["worker"]
    return {**worker, "workload": "StatefulSet", "model": {"volume": {"emptyDir": {}}}, **changes}


EIGHT_GPUS = yaml.safe_load((CHART / "examples" / "eight-gpus.yaml").read_text())["worker"]
TOLERATE = {"tolerations": EIGHT_GPUS["tolerations"]}
FOUR_GPUS = {"numWorkers": 4, "gpus": 4, **TOLERATE}
CLIQUE, ZONE, LEAF = "nvidia.com/gpu.clique", "topology.kubernetes.io/zone", "fabric.topograph.run/tier-1"
NODES = (
    *(fakes.h200(index) for index in range(4)),
    *(fakes.gb200(index, clique) for clique in range(2) for index in range(2)),
    *(fakes.plain(index) for index in range(2)),
)
CLASSES = {"gpu.nvidia.com": "gpu.nvidia.com", "compute-domain-default-channel.nvidia.com": "compute-domain.nvidia.com"}


class Releases:
    """Releases of the chart, each in a namespace of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self._numbers = cluster, itertools.count()
        self.all: list[str] = []

    def install(self, worker: dict[str, Any], **parts: object) -> str:
        """Install one; its namespace."""
        name = self.cluster.namespace(f"group-{next(self._numbers)}")
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.cluster.eventually("the namespace is furnished", lambda: self.cluster.api.ask("GET", account).fine)
        self.all.append(name)
        worker = {"model": {"volume": {"emptyDir": {}}}, **worker}
        self.cluster.helm("install", "moe", str(CHART), "--namespace", name, values={"worker": worker, **parts})
        return name

    def pods(self, name: str, component: str = "worker") -> list[Any]:
        chosen = f"app.kubernetes.io/component={component}"
        path = f"/api/v1/namespaces/{name}/pods"
        return list(self.cluster.api.ask("GET", path, labelSelector=chosen).done()["items"])

    def nodes(self, name: str, component: str = "worker", count: int = 1) -> list[str]:
        """Where its pods are, when all of them are somewhere."""

        def found() -> list[str]:
            return [node for pod in self.pods(name, component) if (node := pod["spec"].get("nodeName"))]

        self.cluster.eventually(f"{component} is placed", lambda: len(found()) == count, instead=lambda: self.why(name))
        return found()

    def why(self, name: str) -> str:
        """What the scheduler says of its worker pod; "" = nothing, or it is placed."""
        found = [one for pod in self.pods(name) for one in pod["status"].get("conditions", ())]
        return next((one["message"] for one in found if one.get("reason") == "Unschedulable"), "")

    def waits(self, name: str) -> str:
        """The reason why its worker pod waits, as soon as there is one."""
        self.cluster.eventually("the worker pod waits", lambda: self.why(name))
        assert not self.pods(name)[0]["spec"].get("nodeName")
        return self.why(name)

    def remove(self, name: str) -> None:
        """Uninstall it. Nobody ends pods of a node that is only an object, so they are taken away."""
        self.cluster.helm("uninstall", "moe", "--namespace", name)
        path = f"/api/v1/namespaces/{name}/pods"

        def gone() -> bool:
            found = self.cluster.api.ask("GET", path).done()["items"]
            for pod in found:
                self.cluster.api.ask("DELETE", f"{path}/{pod['metadata']['name']}", gracePeriodSeconds="0")
            return not found

        self.cluster.eventually("its pods are away", gone)
        self.all.remove(name)


@pytest.fixture(scope="module")
def simulated() -> Iterator[Cluster]:
    """A cluster with scheduler and controllers, and GPU nodes."""
    try:
        made = Cluster.up(simulated=True)
    except Missing as error:
        pytest.skip(str(error))
    with made:
        kinds.teach(made, [], fakes.compute_domain_type())
        fakes.add(made, *NODES)
        unready = "node.kubernetes.io/not-ready"

        def ready() -> bool:
            nodes = made.api.ask("GET", "/api/v1/nodes").done()["items"]
            return not [one for node in nodes for one in node["spec"].get("taints", ()) if one["key"] == unready]

        made.eventually("the controllers call every node ready", ready)
        yield made


@pytest.fixture
def releases(simulated: Cluster) -> Iterator[Releases]:
    made = Releases(simulated)
    yield made
    for name in list(made.all):
        made.remove(name)


def required(key: str, value: str) -> dict[str, Any]:
    """Affinity to nodes of that label."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def preferred(key: str, value: str) -> dict[str, Any]:
    """The same as a wish."""
    term = {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}}


@pytest.mark.parametrize(
    ("worker", "nodes"),
    [
        ({}, {"plain-0", "plain-1"}),
        (EIGHT_GPUS, {f"h200-{index}" for index in range(4)}),
        ({**FOUR_GPUS, "nodeSelector": {CLIQUE: f"{fakes.CLUSTER_UUID}.1"}}, {"gb200-1-0", "gb200-1-1"}),
        ({**FOUR_GPUS, "affinity": required(ZONE, "z2")}, {f"h200-{index}" for index in range(4)}),
        ({**EIGHT_GPUS, "affinity": preferred(LEAF, "leaf1")}, {"h200-2", "h200-3"}),
        ({**FOUR_GPUS, "resources": {"limits": {"rdma/ib": "4"}}}, {f"h200-{index}" for index in range(4)}),
    ],
    ids=["cpu", "eight-gpus", "clique", "zone", "rack", "rdma"],
)
def test_the_worker_pod_lands_where_its_values_say(releases: Releases, worker: dict[str, Any], nodes: set[str]) -> None:
    name = releases.install(worker)
    assert set(releases.nodes(name)) <= nodes
    assert set(releases.nodes(name, "control")) <= {"plain-0", "plain-1"}, "GPU nodes are tainted"


def test_a_second_group_joins_the_clique_of_the_first(releases: Releases) -> None:
    first = releases.install({**FOUR_GPUS, "nodeSelector": {CLIQUE: f"{fakes.CLUSTER_UUID}.0"}})
    (there,) = releases.nodes(first)
    beside = {
        "topologyKey": CLIQUE,
        "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
        "namespaces": [first],
    }
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}}
    (here,) = releases.nodes(releases.install({**FOUR_GPUS, "affinity": affinity}))
    assert {there, here} == {"gb200-0-0", "gb200-0-1"}
    third = releases.install({**FOUR_GPUS, "affinity": affinity})
    assert "didn't match pod affinity rules" in releases.waits(third)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"numWorkers": 16, "gpus": 16, **TOLERATE}, "Insufficient nvidia.com/gpu"),
        ({"numWorkers": 8, "gpus": 8}, "untolerated taint"),
        ({**FOUR_GPUS, "nodeSelector": {CLIQUE: "another.7"}}, "didn't match Pod's node affinity/selector"),
        ({**FOUR_GPUS, "resources": {"limits": {"rdma/ib": "9"}}}, "Insufficient rdma/ib"),
        ({**FOUR_GPUS, "gpuResource": "amd.com/gpu"}, "Insufficient amd.com/gpu"),
    ],
    ids=["sixteen-gpus", "no-toleration", "no-such-clique", "too-much-rdma", "another-gpu"],
)
def test_a_worker_pod_that_fits_nowhere_waits_and_says_why(
    releases: Releases, worker: dict[str, Any], reason: str
) -> None:
    assert reason in releases.waits(releases.install(worker))


def test_one_that_waits_for_gpus_gets_those_that_another_lets_go(releases: Releases) -> None:
    eight = {**EIGHT_GPUS, "nodeSelector": {LEAF: "leaf0"}}
    first, second = releases.install(eight), releases.install(eight)
    let_go = releases.nodes(first)
    assert {*let_go, *releases.nodes(second)} == {"h200-0", "h200-1"}
    third = releases.install(eight)
    assert "Insufficient nvidia.com/gpu" in releases.waits(third)
    releases.remove(first)
    assert releases.nodes(third) == let_go


def test_two_control_planes_are_on_two_nodes(releases: Releases) -> None:
    name = releases.install({}, control={"replicas": 2})
    assert set(releases.nodes(name, "control", 2)) == {"plain-0", "plain-1"}


def test_gpus_and_a_channel_of_the_compute_domain_are_claimed_from_dra(releases: Releases) -> None:
    """Claims as NVIDIA's drivers serve them, of devices that are only objects; both are on one node only."""
    api = releases.cluster.api
    for name, driver in CLASSES.items():
        api.apply(fakes.device_class(name, driver)).done()
    api.apply(fakes.devices("plain-0", "gpu.nvidia.com", [f"gpu-{index}" for index in range(4)])).done()
    api.apply(fakes.devices("plain-0", "compute-domain.nvidia.com", ["channel-0"])).done()
    claims = [{"name": kind, "resourceClaimTemplateName": kind} for kind in ("gpus", "channel")]
    worker = {"numWorkers": 4, "config": {"transport": "nvlink"}, "resourceClaims": claims}

    def install() -> str:
        name = releases.install(worker)
        for kind, class_name, count in zip(("gpus", "channel"), CLASSES, (4, 1), strict=True):
            api.apply(fakes.claim_template(kind, class_name, count), name).done()
        return name

    name = install()
    assert releases.nodes(name) == ["plain-0"]
    found = api.ask("GET", f"/apis/resource.k8s.io/v1/namespaces/{name}/resourceclaims").done()["items"]
    given = [one["device"] for claim in found for one in claim["status"]["allocation"]["devices"]["results"]]
    assert sorted(given) == ["channel-0", "gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    (owner,) = {one["metadata"]["ownerReferences"][0]["name"] for one in found}
    assert owner == "moe-worker-0"
    assert "cannot allocate all claims" in releases.waits(install())


@pytest.mark.parametrize("name", ["four-hosts-rdma", "four-hosts-efa"])
def test_a_group_over_four_nodes_has_all_gpus_and_rdma_devices_of_each(releases: Releases, name: str) -> None:
    group = releases.install(example(name))
    assert sorted(releases.nodes(group, count=4)) == [f"h200-{index}" for index in range(4)]
    (container,) = releases.pods(group)[0]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert not container["securityContext"].get("privileged")
    assert "Insufficient nvidia.com/gpu" in releases.waits(releases.install(example(name)))


def test_trays_of_a_group_are_in_one_clique_with_a_channel_each(releases: Releases) -> None:
    """The claim template is made by this test, as NVIDIA's driver makes it for the ComputeDomain of the chart."""
    api = releases.cluster.api
    channels = "compute-domain-default-channel.nvidia.com"
    api.apply(fakes.device_class(channels, CLASSES[channels])).done()
    for node in [f"gb200-{clique}-{index}" for clique in range(2) for index in range(2)]:
        api.apply(fakes.devices(node, CLASSES[channels], ["channel-0"])).done()

    def install() -> str:
        group = releases.install(example("nvl72", hosts=2))
        path = f"/apis/resource.nvidia.com/v1beta1/namespaces/{group}/computedomains/moe-worker"
        domain = api.ask("GET", path).done()["spec"]
        assert domain["numNodes"] == 0
        api.apply(fakes.claim_template(domain["channel"]["resourceClaimTemplate"]["name"], channels, 1), group).done()
        return group

    groups = [sorted(releases.nodes(install(), count=2)) for _ in range(2)]
    assert sorted(groups) == [["gb200-0-0", "gb200-0-1"], ["gb200-1-0", "gb200-1-1"]]
    assert releases.waits(install())
