"""Types that others' controllers bring: the Prometheus Operator's and cert-manager's own definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from tests.deploy.bed import tools
from tests.deploy.bed.cluster import Cluster


def teach(cluster: Cluster, names: Sequence[str], *more: dict[str, Any]) -> None:
    """Let the API server know types (NAME.crd.yaml of the tools, and `more`), and wait until it serves them. Raises
    Missing."""
    made = [*(yaml.load(path.read_text(), yaml.CSafeLoader) for path in tools.need(*names).values()), *more]
    for one in made:
        cluster.api.apply(one).done()
    paths = []
    for one in made:
        group = f"/apis/{one['spec']['group']}/{one['spec']['versions'][-1]['name']}"
        paths += [group, f"{group}/{one['spec']['names']['plural']}"]  # its list of types may come later than the types
    cluster.eventually("the types are served", lambda: all(cluster.api.ask("GET", path).fine for path in paths))
