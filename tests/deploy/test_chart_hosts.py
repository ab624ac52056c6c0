"""The chart with pods of several hosts: one group, its data ports, where its pods may be, and a LeaderWorkerSet."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdock.common.addresses import split_address
from crossdock.common.config import ControlConfig, HostConfig, load
from crossdock.host.run import check_network
from ep_kernels.transports.cpu import native
from tests.deploy.object_types import faults_of
from tests.deploy.test_chart import CHART, HELM, needs_helm, render

HOSTS = ("--values", str(CHART / "examples" / "two-cpu-hosts.yaml"))


def host_of(made: dict[str, Any], folder: Path, pod: Any, ip: str = "10.0.0.2") -> HostConfig:
    """What `crossdock up` of a pod loads."""
    (folder / "h.yaml").write_text(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    told = " ".join(pod["containers"][0]["args"]).replace("$(POD_IP)", ip).replace("$(POD_NAME)", "moe-worker-1")
    return load(HostConfig, folder / "h.yaml", re.findall(r"--set[= ](\S+)", told))


@needs_helm
@pytest.mark.parametrize("ip", ["10.0.0.2", "fd00::7"])
def test_pods_of_several_hosts_are_one_group(ip: str, tmp_path: Path) -> None:
    made = render(*HOSTS)
    spec = made["StatefulSet/moe-worker"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"], spec["updateStrategy"]) == (
        2,
        "Parallel",
        {"type": "OnDelete"},
    )
    assert made["Service/moe-worker"]["spec"]["clusterIP"] == "None"
    assert spec["serviceName"] == "moe-worker"
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    assert load(ControlConfig, tmp_path / "c.yaml").num_ranks == 4
    host = host_of(made, tmp_path, spec["template"]["spec"], ip)
    check_network(host)
    assert host.control is None
    assert host.worker.network is not None
    assert (host.worker.network.provider, host.worker.network.lanes) == ("tcp", 2)
    assert [worker.uid for worker in host.worker_configs()] == ["moe-worker-1/0", "moe-worker-1/1"]
    listens = [split_address(worker.network.listen) for worker in host.worker_configs() if worker.network]
    assert listens == [(ip, 7700), (ip, 7701)]
    ports = {one["name"]: one["containerPort"] for one in spec["template"]["spec"]["containers"][0]["ports"]}
    assert (ports["data-0"], ports["data-1"], "data-2" in ports) == (7700, 7701, False)


@needs_helm
def test_only_workers_of_the_group_reach_the_data_ports() -> None:
    ask, data = render(*HOSTS)["NetworkPolicy/moe"]["spec"]["ingress"]
    assert {port["port"] for port in ask["ports"]} == {7400, 7500, 7800}
    assert data["ports"] == [{"port": 7700, "endPort": 7701}]
    (who,) = data["from"]
    labels = who["podSelector"]["matchLabels"]
    assert (labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/component"]) == ("moe", "worker")
    assert [*who] == ["podSelector"], "of this namespace only"


@needs_helm
def test_pods_of_a_group_are_evicted_one_at_a_time() -> None:
    def most(*flags: str) -> int | None:
        budget = render(*flags).get("PodDisruptionBudget/moe-worker")
        return None if budget is None else int(budget["spec"]["maxUnavailable"])

    assert most(*HOSTS) == 1
    assert most(*HOSTS, "--set", "worker.blockEvictions=true") == 0
    assert most() is None


@needs_helm
def test_labels_of_the_longest_release_are_short_enough() -> None:
    """Pods have a label of their set's name, `-` and a hash of ten characters, the pods of a LeaderWorkerSet `-0`
    before it; the API server takes at most 63 characters, and would make no pod."""
    name = "a" * 53
    done = subprocess.run(
        [str(HELM), "template", name, str(CHART)], capture_output=True, text=True, timeout=240, check=True
    )
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert "StatefulSet" in {one["kind"] for one in made}
    assert max(len(one["metadata"]["name"]) for one in made if one["kind"] == "StatefulSet") <= 63 - 11 - 2


@needs_helm
def test_one_host_is_as_it_was(tmp_path: Path) -> None:
    made = render()
    spec = made["StatefulSet/moe-worker"]["spec"]
    assert spec["replicas"] == 1
    assert "updateStrategy" not in spec
    pod = spec["template"]["spec"]
    assert "affinity" not in pod
    assert not [one for one in pod["containers"][0]["ports"] if one["name"].startswith("data")]
    host = host_of(made, tmp_path, pod)
    assert (host.worker.network, host.worker.uid) == (None, "moe")
    (alone,) = made["NetworkPolicy/moe"]["spec"]["ingress"]
    assert 7700 not in {port["port"] for port in alone["ports"]}
    one_pod = render("--set", "worker.config.network.provider=tcp")["StatefulSet/moe-worker"]["spec"]["template"][
        "spec"
    ]
    assert [one for one in one_pod["containers"][0]["ports"] if one["name"].startswith("data")]


@needs_helm
def test_pods_of_a_group_are_kept_apart_as_it_is_said() -> None:
    def away(*flags: str) -> Any:
        pod = render(*HOSTS, *flags)["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
        return pod.get("affinity", {}).get("podAntiAffinity")

    (rule,) = away()["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    (weighed,) = away("--set", "worker.spread=preferred")["preferredDuringSchedulingIgnoredDuringExecution"]
    assert weighed["podAffinityTerm"] == rule
    assert away("--set", "worker.spread=none") is None
    own = ("--set-json", 'worker.affinity={"nodeAffinity":{},"podAntiAffinity":{"a":1}}')
    assert away(*own) == {"a": 1}


@needs_helm
def test_a_leader_worker_set_has_the_same_pods() -> None:
    made, plain = render(*HOSTS, "--set", "worker.workload=LeaderWorkerSet"), render(*HOSTS)
    assert "StatefulSet/moe-worker" not in made
    spec = made["LeaderWorkerSet/moe-worker"]["spec"]
    template = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"], template["restartPolicy"]) == (1, 2, "None")
    assert template["workerTemplate"] == plain["StatefulSet/moe-worker"]["spec"]["template"]
    assert "LeaderWorkerSet/moe-worker" not in plain


GPU_HOSTS = ("four-hosts-rdma", "four-hosts-efa", "nvl72")


def of_example(name: str, *flags: str) -> dict[str, Any]:
    return render("--values", str(CHART / "examples" / f"{name}.yaml"), "--set", "worker.workload=StatefulSet", *flags)


@needs_helm
@pytest.mark.parametrize("name", GPU_HOSTS)
def test_gpus_of_several_hosts_are_one_group(name: str, tmp_path: Path) -> None:
    made = of_example(name)
    spec = made["StatefulSet/moe-worker"]["spec"]
    pod = spec["template"]["spec"]
    host = host_of(made, tmp_path, pod)
    check_network(host)
    assert host.worker.transport == "nvlink"
    assert host.worker.network is not None
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    control = load(ControlConfig, tmp_path / "c.yaml")
    assert control.num_ranks == spec["replicas"] * host.num_workers
    assert control.num_ranks <= 64
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == host.num_workers
    assert not container["securityContext"].get("privileged")
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@needs_helm
def test_rdma_brings_devices_and_the_one_capability_that_locks_memory() -> None:
    def security(*flags: str) -> tuple[Any, Any]:
        pod = of_example("four-hosts-rdma", *flags)["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        return container["securityContext"], container["resources"]["limits"]

    locking, limits = security()
    assert locking["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (locking["runAsUser"], locking["runAsNonRoot"], locking["readOnlyRootFilesystem"]) == (0, False, True)
    assert (limits["rdma/ib"], limits["memory"]) == (1, "512Gi")
    plain, _ = security("--set", "worker.rdma.ipcLock=false")
    assert plain == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    _, efa = security("--set", "worker.rdma.resource=vpc.amazonaws.com/efa", "--set", "worker.rdma.count=32")
    assert efa["vpc.amazonaws.com/efa"] == 32
    without = render()["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["containers"][0]
    assert without["securityContext"] == plain
    assert "limits" not in without["resources"]


@needs_helm
def test_trays_of_a_rack_share_a_compute_domain_and_a_clique() -> None:
    made = of_example("nvl72")
    domain = made["ComputeDomain/moe-worker"]
    assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    pod = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "channel", "resourceClaimTemplateName": template}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "channel"}]
    assert "add" not in pod["containers"][0]["securityContext"]["capabilities"], "NVLink locks no memory"
    (beside,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (beside["topologyKey"], apart["topologyKey"]) == ("nvidia.com/gpu.clique", "kubernetes.io/hostname")
    assert beside["labelSelector"] == apart["labelSelector"]
    assert "ComputeDomain/moe-worker" not in render()
    own = of_example("nvl72", "--set-json", 'worker.affinity={"podAffinity":{"a":1}}')
    kept = own["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["affinity"]
    assert kept["podAffinity"] == {"a": 1}


@needs_helm
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["worker.computeDomain=true"], "worker.computeDomain: expected worker.hosts of 2 or more and worker.gpus"),
        (
            ["worker.hosts=2", "worker.computeDomain=true"],
            "expected worker.hosts of 2 or more and worker.gpus or worker.resourceClaims beside it, got 2 hosts",
        ),
        (
            ["worker.hosts=2", "worker.config.network.provider=verbs"],
            "worker.config.network.provider verbs: expected worker.rdma.resource beside it",
        ),
        (
            ["worker.hosts=2", "worker.config.network.provider=libfabric(tcp;ofi_rxm)"],
            "expected networkPolicy.enabled=false beside it, since libfabric listens on ports of its own choice",
        ),
        (
            ["worker.hosts=9", "worker.numWorkers=8"],
            f"expected a product of at most {native.MAX_RANKS}, the most ranks of a group, got 72",
        ),
    ],
)
def test_values_of_several_hosts_that_contradict_each_other(flags: list[str], words: str) -> None:
    given = [word for flag in flags for word in ("--set", flag)]
    done = subprocess.run(
        [str(HELM), "template", "moe", str(CHART), *given], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert words in done.stderr


SCALED = ("--values", str(CHART / "examples" / "autoscaling.yaml"))


@needs_helm
def test_a_group_follows_the_pods_that_an_autoscaler_wants(tmp_path: Path) -> None:
    made = render(*SCALED)
    assert "replicas" not in made["StatefulSet/moe-worker"]["spec"], (
        "a release that sets it undoes the autoscaler's work"
    )
    scaler = made["HorizontalPodAutoscaler/moe-worker"]["spec"]
    target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "moe-worker"}
    assert (scaler["scaleTargetRef"], scaler["minReplicas"], scaler["maxReplicas"]) == (target, 2, 4)
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    control = load(ControlConfig, tmp_path / "c.yaml")
    assert control.follow_workers
    assert (control.world_size, control.min_workers, control.max_workers) == (4, 4, 8)


@needs_helm
def test_keda_scales_the_same_set() -> None:
    trigger = '{"type":"prometheus","metadata":{"query":"q","threshold":"1","serverAddress":"http://prometheus:9090"}}'
    made = render(
        *SCALED, "--set-json", "worker.scaling.metrics=[]", "--set-json", f"worker.scaling.triggers=[{trigger}]"
    )
    assert "HorizontalPodAutoscaler/moe-worker" not in made
    scaler = made["ScaledObject/moe-worker"]
    assert faults_of(scaler) == []
    spec = scaler["spec"]
    assert (spec["scaleTargetRef"]["name"], spec["minReplicaCount"], spec["maxReplicaCount"]) == ("moe-worker", 2, 4)
    assert "replicas" not in made["StatefulSet/moe-worker"]["spec"]


@needs_helm
def test_one_pod_that_may_become_several_is_ready_for_them(tmp_path: Path) -> None:
    """Without an autoscaler `hosts` is the number of pods, and of the group's ranks."""
    made = render("--set", "worker.scaling.maxHosts=3,worker.config.network.provider=tcp,worker.numWorkers=2")
    spec = made["StatefulSet/moe-worker"]["spec"]
    assert (spec["replicas"], spec["updateStrategy"]) == (1, {"type": "OnDelete"})
    assert host_of(made, tmp_path, spec["template"]["spec"]).worker.network is not None
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    control = load(ControlConfig, tmp_path / "c.yaml")
    assert (control.world_size, control.min_workers, control.max_workers, control.follow_workers) == (2, 2, 6, True)
    assert not load(ControlConfig, None, []).follow_workers


@needs_helm
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("worker.scaling.maxHosts=3,worker.workload=LeaderWorkerSet", "expected worker.workload StatefulSet"),
        ("worker.scaling.maxHosts=3,worker.scaling.minHosts=2", "worker.hosts: expected minHosts to maxHosts"),
        ("worker.scaling.maxHosts=33,worker.numWorkers=2", "expected a product of at most 64"),
        ("worker.scaling.metrics[0].type=Pods", "expected maxHosts beside metrics or triggers"),
        (
            "worker.scaling.maxHosts=2,worker.scaling.metrics[0].type=Pods,worker.scaling.triggers[0].type=cpu",
            "two autoscalers would undo each other's work",
        ),
    ],
)
def test_scaling_that_cannot_work_is_refused(flags: str, words: str) -> None:
    command = [str(HELM), "template", "moe", str(CHART), "--set", flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert words in done.stderr
