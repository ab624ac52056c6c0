"""cert-manager in the cluster: its controllers as a process, and the issuer of deploy/cert-manager.yaml."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.bed import kinds, tools
from tests.deploy.bed.cluster import Cluster
from tests.house.tree import ROOT

ISSUERS = ROOT / "deploy" / "cert-manager.yaml"
KINDS = tuple(f"{name}.crd.yaml" for name in tools.CERTIFYING)
PROGRAMS = ("cert-manager", *KINDS)


def values() -> dict[str, Any]:
    """Values of the chart that take that issuer."""
    return {"tls": {"enabled": True, "issuer": {"name": "crossdock", "kind": "Issuer"}, "http": "mtls"}}


def start(cluster: Cluster, namespace: str) -> None:
    """Start it, and make the issuer in a namespace; wait until its authority is there."""
    kinds.teach(cluster, KINDS)
    command = [str(tools.need("cert-manager")["cert-manager"]), f"--kubeconfig={cluster.kubeconfig}"]
    cluster.processes.start("cert-manager", command, {**os.environ, "NO_PROXY": cluster.address})
    for one in yaml.safe_load_all(ISSUERS.read_text()):
        cluster.api.apply(one, namespace).done()
    cluster.eventually(
        "the authority is made", lambda: is_ready(cluster, namespace, "crossdock-ca"), instead=_log(cluster)
    )


def context(cluster: Cluster, namespace: str, name: str, *, shows: bool) -> ssl.SSLContext:
    """Of a caller by HTTPS who trusts the authority of a Secret, and who `shows` its certificate or none."""
    path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
    found = {key: base64.b64decode(text) for key, text in cluster.api.ask("GET", path).done()["data"].items()}
    made = ssl.create_default_context(cadata=found["ca.crt"].decode())
    made.check_hostname = False  # pods are asked by their addresses
    if shows:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, key) for key in ("tls.crt", "tls.key")]
            for file in files:
                file.write_bytes(found[file.name])
            made.load_cert_chain(*files)
    return made


def is_ready(cluster: Cluster, namespace: str, name: str) -> bool:
    """Whether a Certificate is."""
    found = cluster.api.ask("GET", f"/apis/cert-manager.io/v1/namespaces/{namespace}/certificates/{name}")
    conditions = found.body.get("status", {}).get("conditions", ()) if found.fine else ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _log(cluster: Cluster) -> Any:
    return lambda: cluster.processes.tail("cert-manager")
