"""A Lease of Kubernetes as the shared place: what others put into it stays; what is not allowed is said in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the client comes with the extra [control]")

from crossdock.common import rpc
from crossdock.common.config import ControlConfig, ElectionConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control import process
from crossdock.control.leader.election import Lease
from crossdock.control.leader.kube import ADDRESS, KubernetesLeaseStore
from tests.services.lease_api import LeaseApi

TIMEOUT_S = 60.0
MINE = Lease("a", "10.0.0.1:7400", 41, 6.0)
RELEASE = {"app.kubernetes.io/instance": "moe", "app.kubernetes.io/managed-by": "Helm"}
NOTE = {"meta.helm.sh/release-name": "moe"}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "n", "uid": "u"}


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with LeaseApi() as server:
        yield server


def of_the_chart() -> dict[str, Any]:
    """As helm makes it: nobody has written to it."""
    metadata = {"name": "moe", "namespace": "default", "labels": RELEASE, "annotations": NOTE, "resourceVersion": "7"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


def leases(api: LeaseApi, folder: Path) -> KubernetesLeaseStore:
    return KubernetesLeaseStore(
        ElectionConfig(lease_name="moe", namespace="default", kubeconfig=str(api.kubeconfig(folder)))
    )


def test_what_the_chart_put_into_the_lease_stays_while_it_changes_hands(api: LeaseApi, tmp_path: Path) -> None:
    api.lease = of_the_chart()
    api.lease["metadata"]["ownerReferences"] = [OWNER]
    place = leases(api, tmp_path)
    seen = place.read(TIMEOUT_S)
    assert seen == Lease("", "", 0, 0.0, "7")
    first = place.write(MINE, seen, TIMEOUT_S)
    assert first == replace(MINE, version="101")
    second = place.write(replace(MINE, holder="", address=""), first, TIMEOUT_S)
    assert second is not None
    metadata = api.lease["metadata"]
    assert (metadata["labels"], metadata["annotations"]) == (RELEASE, {**NOTE, ADDRESS: ""})
    assert metadata["ownerReferences"] == [OWNER]
    assert api.writes == [("a", 41), ("", 41)]


def test_what_is_kept_is_what_was_read_last(api: LeaseApi, tmp_path: Path) -> None:
    """An upgrade has changed a label in between: the write that has not seen it does not count."""
    api.lease = of_the_chart()
    place = leases(api, tmp_path)
    seen = place.read(TIMEOUT_S)
    newer = {**RELEASE, "helm.sh/chart": "crossdock-9"}
    api.lease["metadata"] = {**api.lease["metadata"], "labels": newer, "resourceVersion": "8"}
    assert place.write(MINE, seen, TIMEOUT_S) is None
    assert place.write(MINE, place.read(TIMEOUT_S), TIMEOUT_S) is not None
    assert api.lease["metadata"]["labels"] == newer


def test_a_missing_lease_is_made_by_who_may_and_named_by_who_may_not(api: LeaseApi, tmp_path: Path) -> None:
    place = leases(api, tmp_path)
    assert place.read(TIMEOUT_S) is None
    api.may_create = False
    with pytest.raises(PermissionError, match=r"no Lease moe in .* default.*may not create it.*helm upgrade"):
        place.write(MINE, None, TIMEOUT_S)
    assert api.lease is None
    api.may_create = True
    assert place.write(MINE, None, TIMEOUT_S) == replace(MINE, version="101")
    assert place.write(MINE, None, TIMEOUT_S) is None, "somebody was faster"


@pytest.mark.parametrize(("listens", "leads_at"), [("0.0.0.0:7400", "node-a:7400"), ("10.0.0.3:7400", "10.0.0.3:7400")])
async def test_others_are_sent_to_an_address_that_they_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: str, leads_at: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-a")
    monkeypatch.delenv("NODE_NAME", raising=False)
    leadership = process.Leadership(ControlConfig(election=ElectionConfig()), ControlMetrics(), rpc.Health([]), None)
    leadership.service(listens)
    assert leadership.elector is not None
    assert leadership.elector._state.address == leads_at


def test_without_the_extra_a_control_plane_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    monkeypatch.setattr(process.logs, "setup", lambda config, role: None)
    assert process.run_control(ControlConfig(election=ElectionConfig())) == process.EXIT_BAD_CONFIG
    assert "pip install 'crossdock[control]'" in caplog.text
