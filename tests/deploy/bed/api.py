"""The API server by plain HTTPS, as a user of the bed: what was answered, and which warnings came with it."""

from __future__ import annotations

import itertools
import json
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import yaml

TIMEOUT_S = 20.0
STRICT = {"fieldManager": "bed", "fieldValidation": "Strict", "force": "true"}


@dataclass(frozen=True)
class Answer:
    """Status, body and the texts of the Warning headers."""

    status: int
    body: Any
    warnings: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        """Whether it was done."""
        return 200 <= self.status < 300

    def done(self) -> Any:
        """The body; raises AssertionError with the server's words where it was not done."""
        assert self.fine, self.body.get("message", self.body) if isinstance(self.body, dict) else self.body
        return self.body


class Api:
    """The API of one server.

    Args:
        server: its URL, scheme, host and port.
        authority: file of the certificate that signs it.
        certificate, key: files of the user's own pair.
    """

    def __init__(self, server: str, authority: str, certificate: str, key: str) -> None:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        self.server = server
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}

    def ask(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", user: str = "", **query: str
    ) -> Answer:
        """One request, in the name of another `user` where one is given; a server that cannot be reached answers with
        status 0."""
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": kind, "Accept": "application/json", **({"Impersonate-User": user} if user else {})}
        request = Request(url, data=data, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                return _answer(response.status, response.read(), response.headers.get_all("Warning") or ())
        except HTTPError as error:
            return _answer(error.code, error.read(), error.headers.get_all("Warning") or ())
        except (URLError, OSError) as error:
            return Answer(0, str(error))

    def path(self, thing: dict[str, Any], namespace: str = "") -> str:
        """Where this object is, in its own namespace or the given one."""
        version, kind = thing["apiVersion"], thing["kind"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._resources:
            for one in self.ask("GET", base).done()["resources"]:
                if "/" not in one["name"]:
                    self._resources[version, one["kind"]] = one["name"], one["namespaced"]
        plural, namespaced = self._resources[version, kind]
        place = thing["metadata"].get("namespace") or namespace or "default"
        return f"{base}/namespaces/{place}/{plural}" if namespaced else f"{base}/{plural}"

    def apply(self, thing: dict[str, Any], namespace: str = "", **query: str) -> Answer:
        """Create or change an object; a field that its type does not have is refused."""
        path = f"{self.path(thing, namespace)}/{thing['metadata']['name']}"
        return self.ask("PATCH", path, thing, kind="application/apply-patch+yaml", **STRICT, **query)

    def may(self, user: str, verb: str, resource: str, namespace: str, name: str = "") -> bool:
        """Whether that user is allowed it, as the server's authorizer says."""
        resource, _, subresource = resource.partition("/")
        groups = {"leases": "coordination.k8s.io", "clusterroles": "rbac.authorization.k8s.io", "deployments": "apps"}
        wish = {"verb": verb, "resource": resource, "subresource": subresource, "namespace": namespace, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user,
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
                "resourceAttributes": {**wish, "group": groups.get(resource, "")},
            },
        }
        return bool(
            self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review).done()["status"]["allowed"]
        )

    def rules(self, user: str, namespace: str) -> set[tuple[str, ...]]:
        """(group, resource, name, verb) of everything that a user is allowed there, as the server tells the user."""
        spec = {"namespace": namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": spec}
        told = self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review, user=user).done()
        found = set()
        for rule in told["status"]["resourceRules"]:
            names = rule.get("resourceNames") or [""]
            found |= set(itertools.product(rule.get("apiGroups", ()), rule.get("resources", ()), names, rule["verbs"]))
        return found


def _answer(status: int, body: bytes, warnings: Iterable[str]) -> Answer:
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return Answer(status, found, tuple(warnings))


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a rendered chart, without its hooks."""
    found = [one for one in yaml.safe_load_all(text) if one]
    return [one for one in found if "helm.sh/hook" not in one["metadata"].get("annotations", {})]
