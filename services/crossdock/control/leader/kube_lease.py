"""The lease of an election as a Kubernetes `Lease`: coordination.k8s.io/v1, with compare-and-swap by resourceVersion.

The term is `leaseTransitions`, the holder's address an annotation. The times in it are for people and other tools; the
election itself never reads them. Labels, annotations and owners set by others are kept. Needs get and update of this
lease, and create of `leases` in its namespace if nothing else creates it.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

from kubernetes.client import CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta

from crossdock.common.settings import ElectionConfig
from crossdock.control.leader.election import Lease
from crossdock.control.leader.kube import ApiError, ApiServer

ADDRESS = "crossdock-leader-address"
"""Annotation: host:port of the holder."""

_KEPT = ("labels", "annotations", "owner_references", "finalizers")
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesLeaseStore:
    """`LeaseStore` of leader.py in a Kubernetes `Lease`.

    Args:
        config: which API server, namespace and name.
    """

    def __init__(self, config: ElectionConfig) -> None:
        self._config, self._server = config, ApiServer(config.kubeconfig)
        self._namespace = config.namespace or _own_namespace()
        self._metadata = V1ObjectMeta()

    def read(self, timeout_s: float) -> Lease | None:
        try:
            return self._ask("read_namespaced_lease", timeout_s, self._config.lease_name, self._namespace)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """See `LeaseStore`. Raises PermissionError if there is none and this account may not create it."""
        body, name, namespace = self._body(lease, seen), self._config.lease_name, self._namespace
        try:
            if seen is None:
                return self._ask("create_namespaced_lease", timeout_s, namespace, body)
            return self._ask("replace_namespaced_lease", timeout_s, name, namespace, body)
        except ApiError as error:
            if seen is None and error.status == _FORBIDDEN:
                raise PermissionError(
                    f"there is no Lease {name} in the namespace {namespace}, and this account may not "
                    "create it: create it at installation (`helm upgrade` does)"
                ) from None
            if error.status in {_CONFLICT, _NOT_FOUND}:  # another replica was faster
                return None
            raise

    def close(self) -> None:
        self._server.close()

    def _ask(self, method: str, timeout_s: float, *args: Any) -> Lease:
        """The answer to a call of `CoordinationV1Api`. Raises as `ApiServer.ask`."""
        return self._parse(
            self._server.ask(
                lambda api, timeouts: getattr(CoordinationV1Api(api), method)(*args, _request_timeout=timeouts),
                timeout_s,
            )
        )

    def _parse(self, answer: V1Lease) -> Lease:
        self._metadata = answer.metadata or V1ObjectMeta()
        spec = answer.spec or V1LeaseSpec()
        return Lease(
            holder=spec.holder_identity or "",
            address=(self._metadata.annotations or {}).get(ADDRESS, ""),
            term=spec.lease_transitions or 0,
            lease_s=float(spec.lease_duration_seconds or 0),
            version=self._metadata.resource_version or "",
        )

    def _body(self, lease: Lease, seen: Lease | None) -> V1Lease:
        metadata = V1ObjectMeta(name=self._config.lease_name, namespace=self._namespace)
        if seen is not None:  # the server refuses other versions, so these are the current values
            for key in _KEPT:
                setattr(metadata, key, getattr(self._metadata, key))
            metadata.resource_version = seen.version
        metadata.annotations = {**(metadata.annotations or {}), ADDRESS: lease.address}
        now = datetime.datetime.now(datetime.UTC)
        spec = V1LeaseSpec(
            holder_identity=lease.holder,
            lease_duration_seconds=max(1, round(lease.lease_s)),
            lease_transitions=lease.term,
            renew_time=now.replace(microsecond=max(1, now.microsecond)),  # the API requires a fraction
        )
        return V1Lease(api_version="coordination.k8s.io/v1", kind="Lease", metadata=metadata, spec=spec)


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    return "default"
