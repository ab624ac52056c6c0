"""Everything that there is: what somebody has left behind is the difference of two inventories."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.bed.api import Api

UNCOUNTED = {"events", "componentstatuses", "nodes", "csinodes", "namespaces"}
"""What comes and goes without anybody's release."""


def inventory(api: Api, namespace: str) -> set[str]:
    """Paths of all objects of a namespace and of all that belong to none, of every kind that the server knows."""
    found = set()
    for path in _lists(api, namespace):
        for one in api.ask("GET", path).done()["items"] or ():
            found.add(f"{path}/{one['metadata']['name']}")
    return found


def _lists(api: Api, namespace: str) -> Iterator[str]:
    groups = api.ask("GET", "/apis").done()["groups"]
    for base in ("/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)):
        for kind in api.ask("GET", base).done()["resources"]:
            if "list" in kind["verbs"] and "/" not in kind["name"] and kind["name"] not in UNCOUNTED:
                place = f"namespaces/{namespace}/" if kind["namespaced"] else ""
                yield f"{base}/{place}{kind['name']}"
