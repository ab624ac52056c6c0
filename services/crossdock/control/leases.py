"""The lease of an election as a Kubernetes `Lease`: coordination.k8s.io/v1, compared and swapped by resourceVersion.

The term is `leaseTransitions`, the holder's address an annotation. The times in it are for people and other tools; the
election itself never reads them. Whoever else made it keeps what is theirs: labels, annotations, owners. Needs get and
update of this lease, and create of `leases` in its namespace where nobody else makes it.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease as Object

from crossdock.common.settings import ElectionConfig
from crossdock.control.election import Lease
from crossdock.control.kube import ApiServer, status_of

ADDRESS = "crossdock-leader-address"
"""Annotation: host:port of the holder."""

_KEPT = ("labels", "annotations", "ownerReferences", "finalizers")
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesLeases:
    """See the module's head; `Leases` of leader.py.

    Args:
        config: which API server, namespace and name.
    """

    def __init__(self, config: ElectionConfig) -> None:
        self._config, self._server = config, ApiServer(config.kubeconfig)
        self._namespace = config.namespace or _own_namespace()
        self._metadata = ObjectMeta()

    def read(self, timeout_s: float) -> Lease | None:
        """See `Leases`."""
        name, namespace = self._config.lease_name, self._namespace
        with _status(_NOT_FOUND) as missing:
            return self._taken_in(self._server.ask(lambda api: api.get(Object, name, namespace=namespace), timeout_s))
        return missing

    def write(self, lease: Lease, seen: Lease | None, timeout_s: float) -> Lease | None:
        """See `Leases`. Raises PermissionError where there is none and this account may not make it."""
        body = self._body(lease, seen)
        with _status(_CONFLICT, _NOT_FOUND) as faster:
            if seen is None:
                return self._create(body, timeout_s)
            return self._taken_in(self._server.ask(lambda api: api.replace(body), timeout_s))
        return faster

    def close(self) -> None:
        """See `Leases`."""
        self._server.close()

    def _create(self, body: Object, timeout_s: float) -> Lease:
        with _status(_FORBIDDEN):
            return self._taken_in(self._server.ask(lambda api: api.create(body), timeout_s))
        raise PermissionError(
            f"there is no Lease {self._config.lease_name} in the namespace {self._namespace}, and this account may not "
            "create it: whoever installed it must (`helm upgrade` does)"
        )

    def _taken_in(self, answer: Object) -> Lease:
        self._metadata = answer.metadata or ObjectMeta()
        spec = answer.spec or LeaseSpec()
        return Lease(
            holder=spec.holderIdentity or "",
            address=(self._metadata.annotations or {}).get(ADDRESS, ""),
            term=spec.leaseTransitions or 0,
            lease_s=float(spec.leaseDurationSeconds or 0),
            version=self._metadata.resourceVersion or "",
        )

    def _body(self, lease: Lease, seen: Lease | None) -> Object:
        metadata = ObjectMeta(name=self._config.lease_name, namespace=self._namespace)
        if seen is not None:  # of another version the server takes nothing, so what is kept is what is there
            for key in _KEPT:
                setattr(metadata, key, getattr(self._metadata, key))
            metadata.resourceVersion = seen.version
        metadata.annotations = {**(metadata.annotations or {}), ADDRESS: lease.address}
        now = datetime.datetime.now(datetime.UTC)
        spec = LeaseSpec(
            holderIdentity=lease.holder,
            leaseDurationSeconds=max(1, round(lease.lease_s)),
            leaseTransitions=lease.term,
            renewTime=now.replace(microsecond=max(1, now.microsecond)),  # the API takes no time without a fraction
        )
        return Object(metadata=metadata, spec=spec)


class _status:  # noqa: N801  (used as a function)
    """Swallows answers of the API server with these HTTP statuses."""

    def __init__(self, *expected: int) -> None:
        self._expected = expected

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        return error is not None and status_of(error) in self._expected


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    return "default"
