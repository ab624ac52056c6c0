"""The chart: its values keep to the schema; rendered (where helm is installed), its config files load."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import crossdock
from crossdock.common.addresses import split_address
from crossdock.common.config import ControlConfig, HostConfig, load
from crossdock.common.security import load_security
from tests import tools
from tests.house.chart import leaves
from tests.house.tree import ROOT

CHART = ROOT / "helm" / "crossdock"
HELM = tools.path("helm")
needs_helm = tools.needs("helm")


def values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def faults_of(given: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the extra [dev]")
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [fault.message for fault in jsonschema.Draft7Validator(schema).iter_errors(given)]


def test_the_default_values_keep_to_the_schema() -> None:
    assert faults_of(values()) == []


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("control", {"config": {"leas_s": 1}}),
    ("control", {"config": {"world_size": 3}}),
    ("worker", {"config": {"dtype": "int3"}}),
    ("worker", {"config": {"listen": "a:1"}}),
    ("worker", {"config": {"request_port": 9000}}),  # it is 7800
    ("worker", {"numWorkers": 0}),
    ("worker", {"modle": {}}),
    ("worker", {"gpus": -1}),
    ("worker", {"hosts": 0}),
    ("worker", {"workload": "Deployment"}),
    ("worker", {"spread": "yes"}),
    ("worker", {"config": {"network": {"provider": "udp"}}}),
    ("worker", {"config": {"network": {"domain": "a"}}}),
    ("worker", {"config": {"network": {"advertise": "10.0.0.1"}}}),
    ("worker", {"config": {"network": {"listen": "0.0.0.0:1"}}}),
    ("worker", {"gpuResource": "gpu"}),
    ("worker", {"resourceClaims": [{"resourceClaimTemplateName": "a"}]}),
    ("worker", {"extraVolumes": {"name": "a"}}),
    ("control", {"podLabels": {"a": 1}}),
    ("worker", {"extraEnv": [{"name": "A", "value": 1}]}),
    ("worker", {"extraVolumeMounts": [{"mountPath": "/a"}]}),
    ("worker", {"startupProbe": {"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1, "httpGet": {}}}),
    ("worker", {"tmp": {"sizeLimt": "1Gi"}}),
    ("worker", {"stopTimeoutSeconds": 86401}),
    ("worker", {"nodeSelector": {"gpu": True}}),
    ("serviceAccount", {"crate": True}),
    ("networkPolicy", {"clients": {"podSelector": {}}}),
    ("networkPolicy", {"clients": [{}]}),
    ("monitoring", {"podMonitor": "auto"}),
    ("monitoring", {"interval": "15"}),
    ("image", {"pullPolicy": "Sometimes"}),
    ("tls", {"duration": "a day"}),
    ("tls", {"issuer": {"nmae": "a"}}),
    ("tls", {"http": True}),
]


@pytest.mark.parametrize(("part", "wrong"), WRONG)
def test_wrong_values_are_refused(part: str, wrong: dict[str, Any]) -> None:
    given = values()
    given[part] = {**given[part], **wrong}
    assert len(faults_of(given)) == 1


def test_a_value_that_is_taken_away_is_refused() -> None:
    """An empty `key:` of YAML, or `--reuse-values` of a chart that had no such value yet."""
    for path, default in leaves(values()):
        given = values()
        *parents, leaf = path.split(".")
        part = functools.reduce(dict.__getitem__, parents, given)
        del part[leaf]
        assert faults_of(given) == ([] if default is None else [f"'{leaf}' is a required property"]), path


def test_a_network_policy_is_on_by_default_and_no_example_turns_it_off() -> None:
    for given in (values(), *(yaml.safe_load(path.read_text()) for path in (CHART / "examples").glob("*.yaml"))):
        assert given.get("networkPolicy", {}).get("enabled", True)
    assert values()["networkPolicy"] == {"enabled": True, "clients": [], "scrapers": []}


def test_the_chart_carries_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == crossdock.__version__


def render(*flags: str, name: str = "moe") -> dict[str, Any]:
    command = [str(HELM), "template", name, str(CHART), "--kube-version", "1.31.0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


@pytest.mark.parametrize("ip", ["10.0.0.1", "fd00::7"])
def test_pods_of_either_family_say_where_they_are(ip: str) -> None:
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").glob("*.*")))
    told = re.findall(r"(?:advertise|listen)=(\S*\$\(POD_IP\)[^\s\"]*)", templates)
    assert {split_address(one.replace("$(POD_IP)", ip)) for one in told} == {(ip, 7400), (ip, 7500), (ip, 7700)}


@needs_helm
def test_helm_finds_nothing_to_complain_about() -> None:
    done = subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=240, check=False
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
    sixth = load(HostConfig, tmp_path / "h.yaml", [advertise.replace("$(POD_IP)", "fd00::7")])
    assert (control.world_size, control.lease_s, control.log.level) == (3, 2.0, "debug")
    assert (host.num_workers, host.control, host.worker.model, host.worker.dtype) == (3, None, "/models/a/b", "float32")
    assert host.worker.control == "moe-control:7400"
    assert [w.request_port for w in host.worker_configs()] == [7800, 7801, 7802]
    assert [w.advertise for w in host.worker_configs()] == [f"10.0.0.1:{7500 + i}" for i in range(3)]
    assert [w.advertise for w in sixth.worker_configs()] == [f"[fd00::7]:{7500 + i}" for i in range(3)]


@needs_helm
def test_ports_probes_and_grace_fit_the_configs() -> None:
    made = render("--set", "worker.numWorkers=3")
    pod = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    host = yaml.safe_load(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    assert ports["health"] == split_address(host["http_listen"])[1]
    assert [ports[f"grpc-{i}"] for i in range(3)] == [7500, 7501, 7502]
    assert [ports[f"requests-{i}"] for i in range(3)] == [7800, 7801, 7802]
    assert pod["terminationGracePeriodSeconds"] > host["stop_timeout_s"]
    assert pod["securityContext"]["runAsNonRoot"]


@needs_helm
def test_monitoring_is_rendered_where_the_cluster_knows_it_or_on_demand() -> None:
    def monitors(*flags: str) -> set[str]:
        return {name for name in render(*flags) if name.startswith(("PodMonitor", "PrometheusRule"))}

    both = {"PodMonitor/moe", "PrometheusRule/moe"}
    known = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "PrometheusRule")]
    assert monitors() == set()
    assert monitors(*known) == both
    assert monitors(*known, "--set", "monitoring.rules=false") == {"PodMonitor/moe"}
    assert monitors("--set", "monitoring.podMonitor=true", "--set", "monitoring.rules=true") == both
    made = render(*known, "--set", "monitoring.labels.release=prometheus")
    assert made["PrometheusRule/moe"]["spec"]["groups"][0]["rules"]
    assert len(made["PodMonitor/moe"]["spec"]["podMetricsEndpoints"]) == 2
    assert all(made[name]["metadata"]["labels"]["release"] == "prometheus" for name in both)


@needs_helm
@pytest.mark.parametrize("example", sorted((CHART / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_keep_to_the_schema_and_pass_pod_security(example: Path) -> None:
    """But for the one capability that locks memory, which RDMA needs and root alone is given."""
    made = render("--values", str(example), "--set", "worker.workload=StatefulSet")
    locks = "resource" in yaml.safe_load(example.read_text())["worker"].get("rdma", {})
    for name in ("Deployment/moe-control", "StatefulSet/moe-worker"):
        pod = made[name]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            added = {"add": ["IPC_LOCK"]} if locks and "worker" in name else {}
            assert security["capabilities"] == {"drop": ["ALL"], **added}
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]


@needs_helm
def test_gpus_are_asked_for_and_choose_the_transport() -> None:
    made = render("--values", str(CHART / "examples" / "eight-gpus.yaml"), "--set", "worker.gpuResource=a.b/gpu")
    container = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["a.b/gpu"] == 8
    host = yaml.safe_load(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    assert (host["num_workers"], host["worker"]["transport"]) == (8, "nvlink")


@needs_helm
def test_only_this_release_and_who_is_named_reaches_the_ports() -> None:
    client, scraper = {"podSelector": {"matchLabels": {"app": "c"}}}, {"namespaceSelector": {}}
    named = ("--set-json", f"networkPolicy.clients={json.dumps([client])}")
    named += ("--set-json", f"networkPolicy.scrapers={json.dumps([scraper])}")
    (alone,) = render()["NetworkPolicy/moe"]["spec"]["ingress"]
    ask, scrape = render(*named)["NetworkPolicy/moe"]["spec"]["ingress"]
    assert ask["from"] == [*alone["from"], client]
    assert alone["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "moe"
    assert [port["port"] for port in alone["ports"]] == [port["port"] for port in ask["ports"]] == [7400, 7500, 7800]
    assert scrape["from"] == [scraper]
    assert [port["port"] for port in scrape["ports"]] == [7401, 7402]
    assert "NetworkPolicy/moe" not in render("--set", "networkPolicy.enabled=false")


@needs_helm
def test_claims_are_made_for_the_pod_and_its_container() -> None:
    made = render("--set-json", 'worker.resourceClaims=[{"name":"gpus","resourceClaimTemplateName":"four"}]')
    pod = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "four"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]


@needs_helm
def test_several_control_planes_stand_for_election_and_may_hold_one_lease(tmp_path: Path) -> None:
    alone, made = render(), render("--set", "control.replicas=3", "--set", "control.config.election.lease_s=9")
    assert alone["Deployment/moe-control"]["spec"]["strategy"]["type"] == "Recreate"
    spec = made["Deployment/moe-control"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (3, "RollingUpdate")
    assert spec["template"]["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert made["PodDisruptionBudget/moe-control"]["spec"]["maxUnavailable"] == 1
    assert "PodDisruptionBudget/moe-control" not in alone, "it would hold up every drain"
    pod = spec["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    given = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in pod["containers"][0]["env"]}
    assert given == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    advertise = pod["containers"][0]["args"][-1].replace("$(POD_IP)", "10.0.0.1")
    control = load(ControlConfig, tmp_path / "c.yaml", [advertise])
    assert control.advertise == "10.0.0.1:7400"
    assert control.election is not None
    assert (control.election.lease_name, control.election.lease_s) == ("moe", 9)
    (rule,) = made["Role/moe-lease"]["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (["leases"], ["moe"], ["get", "update"])
    assert set(made["Lease/moe"]) == {"apiVersion", "kind", "metadata"}, "spec belongs to the control planes"
    assert "Lease/moe" not in alone
    assert made["RoleBinding/moe-lease"]["subjects"][0]["name"] == "moe-control"
    assert "election" not in alone["ConfigMap/moe-control"]["data"]["control.yaml"]


@needs_helm
def test_tls_is_told_to_every_part_and_certificates_are_made_where_there_is_an_issuer(tmp_path: Path) -> None:
    on = ("--set", "tls.enabled=true", "--set", "control.config.security.access.client_names={crossdock-client}")
    made, issued = render(*on), render(*on, "--set", "tls.issuer.name=mine")
    ports = made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert 7800 in {port["containerPort"] for port in ports}
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    (tmp_path / "h.yaml").write_text(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    control = load(ControlConfig, tmp_path / "c.yaml").security
    assert control.access.client_names == ("crossdock-client",)
    for security in (control, load(HostConfig, tmp_path / "h.yaml").worker.security):
        assert security.requires_certs
        assert (security.control_name, security.worker_name) == ("crossdock-control", "crossdock-worker")
    pods = {
        part: made[name]["spec"]["template"]["spec"]
        for part, name in (("control", "Deployment/moe-control"), ("worker", "StatefulSet/moe-worker"))
    }
    for part, pod in {**pods, "client": made["Pod/moe-serving"]["spec"]}.items():
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == f"moe-{part}-tls"
        assert "/etc/crossdock-tls" in [one["mountPath"] for one in pod["containers"][0]["volumeMounts"]]
    assert made["Pod/moe-serving"]["spec"]["containers"][0]["args"][-2:] == [
        "--security",
        "/etc/crossdock/security.yaml",
    ]
    certificates = {name for name in issued if name.startswith("Certificate/")}
    assert certificates == {f"Certificate/moe-{part}-tls" for part in ("control", "worker", "client")}
    assert {issued[name]["spec"]["issuerRef"]["name"] for name in certificates} == {"mine"}
    assert "server auth" not in issued["Certificate/moe-client-tls"]["spec"]["usages"], (
        "a client must not pose as a server"
    )
    assert not [name for name in made if name.startswith("Certificate/")]


def schemes(made: dict[str, Any]) -> set[str]:
    """How the kubelet is to ask."""
    containers = [
        made[name]["spec"]["template"]["spec"]["containers"][0]
        for name in ("Deployment/moe-control", "StatefulSet/moe-worker")
    ]
    probes = ("readinessProbe", "livenessProbe", "startupProbe")
    return {container[probe]["httpGet"]["scheme"] for container in containers for probe in probes}


@needs_helm
@pytest.mark.parametrize("http", ["plain", "tls", "mtls"])
def test_pages_probes_and_scrapes_agree_on_tls(http: str, tmp_path: Path) -> None:
    flags = ("tls.enabled=true", f"tls.http={http}", "monitoring.podMonitor=true", "monitoring.scrapeAnnotations=true")
    made = render(*(word for flag in flags for word in ("--set", flag)))
    (tmp_path / "c.yaml").write_text(made["ConfigMap/moe-control"]["data"]["control.yaml"])
    (tmp_path / "h.yaml").write_text(made["ConfigMap/moe-worker"]["data"]["host.yaml"])
    (tmp_path / "s.yaml").write_text(made["ConfigMap/moe-control"]["data"]["security.yaml"])
    assert load(ControlConfig, tmp_path / "c.yaml").security.http == http
    assert load(HostConfig, tmp_path / "h.yaml").worker.security.http == http
    assert load_security(tmp_path / "s.yaml").requires_certs
    assert schemes(made) == {"HTTP" if http == "plain" else "HTTPS"}
    annotations = made["StatefulSet/moe-worker"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scheme"] == ("http" if http == "plain" else "https")
    endpoints = {one["port"]: one for one in made["PodMonitor/moe"]["spec"]["podMetricsEndpoints"]}
    assert set(endpoints) == {"http", "health"}
    assert schemes(render()) == {"HTTP"}
    for port, endpoint in endpoints.items():
        assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s")
        assert endpoint.get("scheme") == (None if http == "plain" else "https")
        given = endpoint.get("tlsConfig", {})
        assert {"cert", "keySecret"} & set(given) == ({"cert", "keySecret"} if http == "mtls" else set())
        if given:
            assert given["serverName"] == ("crossdock-control" if port == "http" else "crossdock-worker")
            assert given["ca"] == {"secret": {"name": "moe-client-tls", "key": "ca.crt"}}


@needs_helm
def test_only_a_control_plane_that_reads_nodes_is_given_rights() -> None:
    plain, reading = render(), render("--set-json", "control.config.kubernetes={}")
    assert not [name for name in plain if name.startswith(("ClusterRole", "Role"))]
    assert reading["ClusterRole/moe-default-nodes"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}
    ]
    for made, reads in ((plain, False), (reading, True)):
        control = made["Deployment/moe-control"]["spec"]["template"]["spec"]
        assert control["automountServiceAccountToken"] is reads
        assert not made["StatefulSet/moe-worker"]["spec"]["template"]["spec"]["automountServiceAccountToken"]


@needs_helm
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("worker.stopTimeoutSeconds=30", "expected more than worker.config.drain_timeout_s, which is 30, got 30"),
        ("worker.gpus=2", "worker.gpus: expected 0 or worker.numWorkers, which is 4, got 2"),
        (
            "worker.gpus=4,worker.gpuResource=nvidia.com/mig-3g.40gb",
            "worker.gpuResource: expected whole GPUs, since MIG",
        ),
        ("worker.gpus=4,worker.gpuResource=nvidia.com/gpu.shared", "(time-slicing), got nvidia.com/gpu.shared"),
        ("worker.config.transport=nvlink", "expected worker.gpus or worker.resourceClaims beside it"),
        ("tls.issuer.name=mine", "tls.issuer: expected tls.enabled beside it, got false"),
        ("tls.http=mtls", "tls.http: expected tls.enabled beside it, got false"),
        ("control.config.security.http=tls", "control.config.security.http: expected none"),
        (
            "tls.enabled=true,worker.config.security.cert_file=mine",
            "worker.config.security.cert_file: expected none beside tls.enabled, got mine",
        ),
        ("worker.numWorkers=0", "numWorkers"),
        ("worker.nmuWorkers=3", "nmuWorkers"),
        ("control.config.lease_s=none", "lease_s"),
        ("tls=null", "missing property 'tls'"),
        ("worker.stopTimeoutSeconds=86401", "stopTimeoutSeconds': maximum: got 86,401, want 86,400"),
        ("worker.model.path=/a", "worker.model.path: expected a directory inside the volume, without /"),
        ("worker.model.path=a/../../b", "and without .., got a/../../b"),
        (
            r"worker.podLabels.app\.kubernetes\.io/component=x",
            "worker.podLabels: expected none of the labels that the chart sets, got app.kubernetes.io/component",
        ),
        ("worker.extraEnv[0].name=POD_IP", "worker.extraEnv: expected none of the names that the chart uses (POD_IP"),
        ("worker.extraVolumes[0].name=tmp", "worker.extraVolumes: expected none of the names that the chart uses"),
        ("control.extraVolumes[0].name=tls", "control.extraVolumes: expected none of the names that the chart uses"),
        ("worker.hostNetwork=true", "worker.hostNetwork: expected the nodes' addresses in networkPolicy.clients"),
        (r"commonLabels.helm\.sh/chart=x", "commonLabels: expected none of the labels that the chart sets"),
        ("fullnameOverride=Moe", "expected a letter, then letters, digits and -"),
    ],
)
def test_contradictions_are_told_in_words(flags: str, words: str) -> None:
    assert words in refused("moe", "--set", flags)


def refused(name: str, *flags: str) -> str:
    command = [str(HELM), "template", name, str(CHART), "--kube-version", "1.31.0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    return done.stderr


@needs_helm
@pytest.mark.parametrize("name", ["123", "my.release"])
def test_a_release_after_which_no_service_can_be_named_is_refused(name: str) -> None:
    assert "release name: expected a letter, then letters, digits and -, " in refused(name)


@needs_helm
def test_null_is_the_default_or_refused_by_its_name() -> None:
    """Of the others one in each part, as test_a_value_that_is_taken_away_is_refused has all: helm takes it away."""
    made, found = render(), list(leaves(values()))
    wanted = {path.partition(".")[0]: (path, default) for path, default in found if default is not None}
    for path, default in [*wanted.values(), *((path, default) for path, default in found if default is None)]:
        if default is None:
            assert render("--set", f"{path}=null") == made, path
        else:
            assert f"missing property '{path.rpartition('.')[2]}'" in refused("moe", "--set", f"{path}=null"), path


@needs_helm
def test_a_release_whose_name_looks_like_no_text_is_rendered() -> None:
    made = render("--set", "worker.resources.requests=null", name="true")
    assert made["Deployment/true-control"]["metadata"]["labels"]["app.kubernetes.io/instance"] == "true"
    assert made["StatefulSet/true-worker"]["spec"]["template"]["spec"]["containers"][0]["resources"] == {}


@needs_helm
def test_a_wrong_value_is_refused_with_its_place() -> None:
    """Messages of helm's own reader of the schema, which loses the place under some of its keywords."""
    for part, wrong in WRONG:
        (name,) = wrong
        if name != "podLabels":
            given = refused("moe", "--set-json", f"{part}={json.dumps(wrong)}")
            assert f"at '/{part}/{name}" in given or f"additional properties '{name}' not allowed" in given, given


@needs_helm
def test_a_volume_of_the_users_takes_the_place_of_the_default() -> None:
    def volume(*flags: str) -> Any:
        pod = render(*flags)["StatefulSet/moe-worker"]["spec"]["template"]["spec"]
        return next(one for one in pod["volumes"] if one["name"] == "model")

    assert volume() == {"name": "model", "persistentVolumeClaim": {"claimName": "models"}}
    given = volume("--set", "worker.model.volume.hostPath.path=/tmp/models")
    assert given == {"name": "model", "hostPath": {"path": "/tmp/models"}}
