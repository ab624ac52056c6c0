"""The chart's names, users and images, and what is added to its pods: alone, twice in an umbrella, on OpenShift."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdock.common.config import ControlConfig, HostConfig, load
from tests.deploy.test_chart import CHART, HELM, needs_helm, render

EXAMPLES = CHART / "examples"
MAX_NAME = 42
RANGE = range(1000680000, 1000690000)
"""The users that OpenShift has assigned to a namespace."""
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""Those that the SCC restricted-v2 admits."""

pytestmark = needs_helm


def pods(made: dict[str, Any]) -> Iterator[Any]:
    """Every spec of a pod."""
    for one in made.values():
        if one["kind"] == "Pod":
            yield one["spec"]
        elif one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]["spec"]


def refusals(pod: Any) -> Iterator[str]:
    """Why the SCC restricted-v2 refuses a pod, as its admission says it."""
    security = {key: value for key, value in pod["securityContext"].items() if value is not None}
    for field in ("runAsUser", "fsGroup"):
        if security.get(field, RANGE[0]) not in RANGE:
            yield f"{field}: {security[field]} is not in the range of the namespace"
    if security.get("seccompProfile", {}).get("type", "RuntimeDefault") != "RuntimeDefault":
        yield "seccomp"
    for container in pod["containers"]:
        own = container["securityContext"]
        if own.get("runAsUser", RANGE[0]) not in RANGE:
            yield f"runAsUser of the container: {own['runAsUser']}"
        if own.get("allowPrivilegeEscalation", True) or own["capabilities"] != {"drop": ["ALL"]}:
            yield "rights of the container"
    for volume in pod.get("volumes", ()):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f"volume {kinds}"


def test_openshift_admits_every_pod_and_not_those_of_the_defaults() -> None:
    given = ("--values", str(EXAMPLES / "openshift.yaml"), "--set", "tls.enabled=true", "--set", "control.replicas=2")
    for pod in pods(render(*given)):
        assert list(refusals(pod)) == []
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert all(len(list(refusals(pod))) == 2 for pod in pods(render()))
    locks = ("--set", "worker.rdma.resource=rdma/ib", "--set", "worker.hosts=2,worker.rdma.ipcLock=true")
    (worker,) = [pod for pod in pods(render(*given, *locks)) if pod["containers"][0]["name"] == "worker"]
    assert list(refusals(worker)) == ["runAsUser of the container: 0", "rights of the container"]


def umbrella(
    folder: Path, dependencies: list[dict[str, str]], values: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """`helm template platform` of a chart that depends on ours."""
    shutil.copytree(CHART, folder / "charts" / "crossdock")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    needs = [{"name": "crossdock", "version": version, **one} for one in dependencies]
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": needs}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    command = [str(HELM), "template", "platform", str(folder), "--kube-version", "1.31.0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_an_umbrella_has_the_chart_twice(tmp_path: Path) -> None:
    parts = [{"alias": name, "condition": f"{name}.enabled"} for name in ("small", "large", "unused")]
    assigned = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    values = {"small": {"enabled": True, **assigned}, "large": {"enabled": True}, "unused": {"enabled": False}}
    done = umbrella(tmp_path, parts, values)
    assert done.returncode == 0, done.stderr
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    names = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert len(set(names)) == len(names)
    sets = {one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "StatefulSet"}
    assert sets.keys() == {"platform-small-worker", "platform-large-worker"}
    small, large = (json.dumps(one["selector"]) for one in sets.values())
    assert small != large, "else each would take the other's pods for its own"
    contexts = [one["template"]["spec"]["securityContext"].get("runAsUser") for one in sets.values()]
    assert sorted(contexts, key=str) == [10001, None]
    groups = {
        yaml.safe_load(one["data"]["control.yaml"])["group"] for one in made if "control.yaml" in one.get("data", "")
    }
    assert groups == {"default/platform-small", "default/platform-large"}


def test_a_chart_as_a_dependency_has_its_name_behind_the_releases(tmp_path: Path) -> None:
    done = umbrella(tmp_path, [{}], {"crossdock": {}})
    assert done.returncode == 0, done.stderr
    assert "name: platform-crossdock-control" in done.stdout


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((), "moe"),
        (("--set", "nameOverride=b"), "moe-b"),
        (("--set", "fullnameOverride=mine"), "mine"),
        (("--set", "fullnameOverride=mine,nameOverride=b"), "mine"),
    ],
)
def test_names_are_the_releases_or_as_given(flags: tuple[str, ...], name: str) -> None:
    made = render(*flags)
    assert {f"Deployment/{name}-control", f"StatefulSet/{name}-worker", f"Service/{name}-control"} <= set(made)
    assert made[f"Deployment/{name}-control"]["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == name


def test_long_names_that_begin_alike_stay_different() -> None:
    begin = "a" * 45
    found = [{key.partition("/")[2] for key in render(name=begin + end)} for end in ("one", "two")]
    assert not found[0] & found[1]
    (worker,) = [name for name in found[0] if name.endswith("-worker") and name.count("-") == 2]
    assert len(worker.removesuffix("-worker")) == MAX_NAME
    assert f"StatefulSet/{'b' * MAX_NAME}-worker" in render(name="b" * MAX_NAME)


def test_the_group_of_metrics_is_the_releases_or_as_given(tmp_path: Path) -> None:
    for flags, group in (((), "prod/moe"), (("--set", "group=east/moe"), "east/moe")):
        made = render("--namespace", "prod", *flags)
        (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
        (tmp_path / "h.yaml").write_text(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
        assert load(ControlConfig, tmp_path / "c.yaml").group == group
        assert load(HostConfig, tmp_path / "h.yaml").worker.group == group


def test_alerts_name_the_pages_of_the_users_docs() -> None:
    made = render("--set", "monitoring.rules=true", "--set", "monitoring.docsUrl=https://localhost/c")
    pages = {
        rule["annotations"]["runbook_url"].partition("#")[0]
        for group in made["PrometheusRule/moe"]["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert pages == {"https://localhost/c/operations/", "https://localhost/c/vllm/"}


def test_an_image_by_its_digest_has_no_tag() -> None:
    made = render("--set", "image.worker=a.b/w@sha256:abcd", "--set", "image.tag=v7")
    images = {pod["containers"][0]["image"] for pod in pods(made)}
    assert images == {"a.b/w@sha256:abcd", "crossdock-control:v7"}


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_pod_that_was_never_ready_is_replaced(hosts: int) -> None:
    """In order the controller would wait for it for ever, whatever an upgrade corrects."""
    assert (
        render("--set", f"worker.hosts={hosts}")["StatefulSet/moe-worker"]["spec"]["podManagementPolicy"] == "Parallel"
    )


def test_what_is_added_to_pods_is_there(tmp_path: Path) -> None:
    fetch = {"name": "fetch", "image": "a", "volumeMounts": [{"name": "model", "mountPath": "/models"}]}
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    both = {"topologySpreadConstraints": spread, "extraEnv": [{"name": "A", "value": "1"}]}
    given = {
        "control": {"replicas": 2, "startupProbe": {"failureThreshold": 7}, **both},
        "worker": {
            "model": {"volume": {"emptyDir": {}}}, "initContainers": [fetch], "tmp": {"sizeLimit": "1Gi"},
            "startupProbe": {"failureThreshold": 9}, **both,
        },
        "test": {"resources": {"limits": {"cpu": "2"}}},
        "extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-own"}}],
    }  # fmt: skip
    (tmp_path / "v.yaml").write_text(yaml.safe_dump(given))
    made = render("--values", str(tmp_path / "v.yaml"))
    control, worker = (
        made[name]["spec"]["template"]["spec"] for name in ("Deployment/moe-control", "StatefulSet/moe-worker")
    )
    for pod, threshold in ((control, 7), (worker, 9)):
        assert pod["topologySpreadConstraints"] == spread
        assert {"name": "A", "value": "1"} in pod["containers"][0]["env"]
        probe = pod["containers"][0]["startupProbe"]
        assert (probe["failureThreshold"], probe["timeoutSeconds"], probe["httpGet"]["path"]) == (
            threshold,
            5,
            "/livez",
        )
    assert worker["initContainers"] == [fetch]
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in worker["volumes"]
    assert made["Pod/moe-serving"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "256Mi"}
    assert "Secret/moe-own" in made


def test_labels_are_on_every_object_and_pod() -> None:
    made = render("--set", "commonLabels.team=a", "--set", "monitoring.podMonitor=true", "--set", "tls.enabled=true")
    assert [name for name, one in made.items() if one["metadata"]["labels"].get("team") != "a"] == []
    templates = [one["spec"]["template"] for one in made.values() if "template" in one.get("spec", {})]
    assert [one["metadata"]["labels"]["team"] for one in templates] == ["a", "a"]


def test_workers_may_be_in_the_network_of_their_node() -> None:
    def worker(*flags: str) -> Any:
        return render(*flags)["StatefulSet/moe-worker"]["spec"]["template"]["spec"]

    nodes = ("--set-json", 'networkPolicy.clients=[{"ipBlock": {"cidr": "10.0.0.0/16"}}]')
    pod = worker("--set", "worker.hostNetwork=true", *nodes)
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert not {"hostNetwork", "dnsPolicy"} & worker().keys()


def test_targets_are_relabelled_on_both_ports() -> None:
    rule = {"targetLabel": "cluster", "replacement": "a"}
    given = ("--set", "monitoring.podMonitor=true", "--set-json", f"monitoring.relabelings={json.dumps([rule])}")
    endpoints = render(*given)["PodMonitor/moe"]["spec"]["podMetricsEndpoints"]
    assert [one["relabelings"] for one in endpoints] == [[rule], [rule]]
