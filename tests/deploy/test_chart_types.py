"""Every object of the chart is of its type, with the values of each example and with everything on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.object_types import definition, faults_of
from tests.deploy.test_chart import needs_helm, render
from tests.deploy.test_chart_sync import EVERYTHING, EXAMPLES

WITHOUT_DEFINITION = {"Certificate", "ComputeDomain", "PodMonitor", "PrometheusRule"}
"""Kinds of other projects that the test control plane checks (`make test-deploy`), and one that nothing does."""


def known(made: dict[str, Any]) -> dict[str, Any]:
    """The objects whose types are at hand."""
    paths = {name: definition(thing) for name, thing in made.items() if thing["kind"] not in WITHOUT_DEFINITION}
    return {name: made[name] for name, path in paths.items() if path is None or path.exists()}


@needs_helm
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "everything")
def test_every_object_is_of_the_type_that_it_names(example: Path | None) -> None:
    flags = ("--set", EVERYTHING) if example is None else ("--values", str(example))
    made = known(render(*flags))
    assert len(made) > 8
    assert {name: faults for name, thing in made.items() if (faults := faults_of(thing))} == {}


@needs_helm
def test_a_field_that_no_pod_has_is_seen() -> None:
    made = render("--set-json", 'worker.extraVolumes=[{"name":"a","emptyDirr":{}}]')
    (fault,) = faults_of(made["StatefulSet/moe-worker"])
    assert "emptyDirr" in fault
    service = copy.deepcopy(made["Service/moe-control"])
    service["spec"]["ports"][0]["port"] = "7400"
    assert faults_of(service)
