"""The recipes against a real API server that knows LeaderWorkerSet's and KServe's own types."""

from __future__ import annotations

import pytest

from tests.deploy.bed import kinds
from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.say import Missing
from tests.deploy.object_types import DEFINITIONS, OWN_READING, group_of
from tests.deploy.test_recipes import NAMES, misspelt, objects

TAKEN = [name for name in NAMES if name not in ("dynamo", "production-stack")]


@pytest.fixture(scope="module")
def taught(cluster: Cluster) -> Cluster:
    """The server with these types."""
    try:
        kinds.teach(cluster, [f"{name}.crd.yaml" for name in DEFINITIONS.values()])
    except Missing as error:
        pytest.skip(str(error))
    return cluster


@pytest.mark.parametrize("name", TAKEN)
def test_the_server_takes_every_object_of_a_recipe_and_no_misspelt_field(name: str, taught: Cluster) -> None:
    namespace = taught.namespace(f"recipe-{name}")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}  # no controller makes it
    taught.api.apply(account, namespace).done()
    for thing in objects(name):
        assert group_of(thing) not in OWN_READING
        taught.api.apply(thing, namespace, dryRun="All").done()
        if "spec" in thing:
            wrong = misspelt(thing, ("spec", next(iter(thing["spec"]))))
            assert not taught.api.apply(wrong, namespace, dryRun="All").fine
