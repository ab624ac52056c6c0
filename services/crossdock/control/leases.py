"""The lease of an election as a Kubernetes `Lease`: coordination.k8s.io/v1, compared and swapped by resourceVersion.

The term is `leaseTransitions`, the holder's address an annotation. The times in it are for people and other tools; the
election itself never reads them. Whoever else made it keeps what is theirs: labels, annotations, owners. Needs get and
update of this lease, and create of `leases` in its namespace where nobody else makes it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

from crossdock.common.settings import ElectionConfig
from crossdock.control.election import Lease

ADDRESS = "crossdock-leader-address"
"""Annotation: host:port of the holder."""

_KEPT = ("labels", "annotations", "ownerReferences", "finalizers")
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesLeases:
    """See the module's head; `Leases` of leader.py.

    Args:
        config: which API server, namespace and name.
        api: a `kubernetes.client.CoordinationV1Api`; by default made from `config` at the first call.
    """

    def __init__(self, config: ElectionConfig, api: Any = None) -> None:
        self._config, self._api = config, api
        self._namespace = config.namespace or _own_namespace()
        self._metadata: dict[str, Any] = {}

    def read(self, timeout_s: float) -> Lease | None:
        """See `Leases`."""
        with _status(_NOT_FOUND) as missing:
            answer = self._connected().read_namespaced_lease(
                self._config.lease_name, self._namespace, _preload_content=False, _request_timeout=timeout_s
            )
            return self._taken_in(answer)
        return missing

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """See `Leases`. Raises PermissionError where there is none and this account may not make it."""
        api, body = self._connected(), self._body(lease, seen)
        options = {"_preload_content": False, "_request_timeout": timeout_s}
        with _status(_CONFLICT, _NOT_FOUND) as faster:
            if seen is None:
                return self._create(api, body, options)
            answer = api.replace_namespaced_lease(self._config.lease_name, self._namespace, body, **options)
            return self._taken_in(answer)
        return faster

    def _create(self, api: Any, body: Any, options: dict[str, Any]) -> Lease:
        with _status(_FORBIDDEN):
            return self._taken_in(api.create_namespaced_lease(self._namespace, body, **options))
        raise PermissionError(
            f"there is no Lease {self._config.lease_name} in the namespace {self._namespace}, and this account may not "
            "create it: whoever installed it must (`helm upgrade` does)"
        )

    def _taken_in(self, answer: Any) -> Lease:
        data = json.loads(answer.data)
        self._metadata = data["metadata"]
        return _lease_of(data)

    def _body(self, lease: Lease, seen: Lease | None) -> dict[str, Any]:
        """As JSON: each client's models are others."""
        metadata: dict[str, Any] = {"name": self._config.lease_name, "namespace": self._namespace}
        if seen is not None:  # of another version the server takes nothing, so what is kept is what is there
            metadata |= {key: self._metadata[key] for key in _KEPT if key in self._metadata}
            metadata["resourceVersion"] = seen.version
        metadata["annotations"] = {**metadata.get("annotations", {}), ADDRESS: lease.address}
        now = datetime.datetime.now(datetime.UTC)
        now = now.replace(microsecond=max(1, now.microsecond))  # the API takes no time without a fraction
        spec = {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": max(1, round(lease.lease_s)),
            "leaseTransitions": lease.term,
            "renewTime": now.isoformat(),
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _connected(self) -> Any:
        if self._api is None:
            from kubernetes import client

            from crossdock.control.nodes import api_client

            self._api = client.CoordinationV1Api(api_client(self._config.kubeconfig))
        return self._api


class _status:  # noqa: N801  (used as a function)
    """Swallows answers of the API server with these HTTP statuses."""

    def __init__(self, *expected: int) -> None:
        self._expected = expected

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        return getattr(error, "status", None) in self._expected


def _lease_of(data: dict[str, Any]) -> Lease:
    metadata, spec = data["metadata"], data.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        address=(metadata.get("annotations") or {}).get(ADDRESS, ""),
        term=int(spec.get("leaseTransitions") or 0),
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
        version=str(metadata["resourceVersion"]),
    )


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    return "default"
