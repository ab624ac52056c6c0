"""A release whose parts know each other by certificates, which the real cert-manager makes and renews.

One release lives through the file, so the tests stand in the order in which an operator would meet them.
"""

from __future__ import annotations

import re
import uuid
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import pytest

from tests.deploy.bed import certificates
from tests.deploy.bed.node import Node
from tests.deploy.bed.release import NAMESPACE, Release

STATUS = ("crossdock", "status", "--target", "moe-control:7400")
SECURITY = ("--security", "/etc/crossdock/security.yaml")


@pytest.fixture(scope="module")
def programs() -> tuple[str, ...]:
    """cert-manager and its kinds."""
    return certificates.PROGRAMS


@pytest.fixture(scope="module")
def release(given: dict[str, Any], node: Node) -> Release:
    """On a real node, installed by helm; its Certificates are made with it."""
    node.cluster.namespace(NAMESPACE)
    certificates.start(node.cluster, NAMESPACE)
    made = Release(node.cluster, node, {**given, **certificates.values()}, "helm3")
    made.install()
    return made


def run(release: Release, *command: str) -> str:
    """stdout of a command in the first control plane's container; raises RuntimeError where it fails."""
    (status,) = release.pods("control")[0]["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    return release.node.ctr("task", "exec", "--exec-id", uuid.uuid4().hex, container, *command)


def test_every_certificate_is_made_and_the_group_serves(release: Release) -> None:
    for part in ("control", "worker", "client"):
        assert certificates.is_ready(release.cluster, NAMESPACE, f"moe-{part}-tls")
    assert run(release, *STATUS, *SECURITY).startswith("SERVING")


def test_helm_test_passes_with_the_certificate_of_clients(release: Release) -> None:
    said = release.cluster.helm("test", "moe", "--namespace", NAMESPACE, "--timeout=240s", tool=release.tool)
    assert "Phase:          Succeeded" in said


def test_who_shows_a_certificate_gets_right_answers_and_who_shows_none_is_refused(release: Release) -> None:
    release.asked("certified")
    with pytest.raises(RuntimeError, match="task exec"):
        run(release, *STATUS, "--timeout", "5")


def fetched(release: Release, pod: dict[str, Any], path: str, *, shows: bool = True, scheme: str = "https") -> str:
    """A page of a control plane's pod, by a caller who shows the certificate of clients, or none."""
    context = certificates.context(release.cluster, NAMESPACE, "moe-client-tls", shows=shows)
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    with opener.open(f"{scheme}://{pod['status']['podIP']}:7401{path}", timeout=30) as response:
        return str(response.read().decode())


def test_probes_are_answered_to_all_and_metrics_to_who_shows_a_certificate(release: Release) -> None:
    """The kubelet, who shows none, has found the pods ready."""
    pod = release.pods("control")[0]
    assert fetched(release, pod, "/livez", shows=False)
    assert "crossdock_certificate_expiry_timestamp_seconds" in fetched(release, pod, "/metrics")
    with pytest.raises(HTTPError, match="403"):
        fetched(release, pod, "/metrics", shows=False)
    with pytest.raises((URLError, OSError)):
        fetched(release, pod, "/livez", scheme="http")


def renewals(release: Release) -> list[float]:
    """How often each control plane took up a new certificate."""
    found = []
    for pod in release.pods("control"):
        text = fetched(release, pod, "/metrics")
        told = re.search(r'^crossdock_certificate_reloads_total{group="serving/moe",result="ok"} (\S+)', text, re.M)
        found.append(float(told[1]) if told else 0.0)
    return found


def test_a_renewed_certificate_is_taken_up_without_a_restart(release: Release) -> None:
    """A Secret that is gone is made anew by cert-manager, and the kubelet brings it to the pods."""
    before = renewals(release)
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/moe-control-tls"
    uid = release.cluster.api.ask("GET", path).done()["metadata"]["uid"]
    release.cluster.api.ask("DELETE", path).done()

    def made() -> bool:
        found = release.cluster.api.ask("GET", path)
        return bool(found.fine and found.body["metadata"]["uid"] != uid)

    def taken() -> bool:
        run(release, *STATUS, *SECURITY)
        return all(now > then for now, then in zip(renewals(release), before, strict=True))

    release.cluster.eventually("cert-manager makes the Secret anew", made)
    release.cluster.eventually("every control plane has taken it up", taken, 600)
    counts = [pod["status"]["containerStatuses"][0]["restartCount"] for pod in release.pods("control")]
    assert counts == [0, 0]
    release.asked("renewed")
