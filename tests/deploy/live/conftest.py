"""Fixtures of `make test-deploy`: an API server.

The files here are not named test_*, so that only `make test-deploy` runs them. A machine that lacks something skips
what needs it, and the reason is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.bed.cluster import Cluster
from tests.deploy.bed.say import Missing
from tests.house.tree import ROOT

CHART = ROOT / "helm" / "crossdock"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """etcd and kube-apiserver."""
    try:
        made = Cluster.up()
    except Missing as error:
        pytest.skip(str(error))
    with made:
        yield made
