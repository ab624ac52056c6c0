"""The chart on clusters that queue: Kueue's label, PodGroups of Volcano and coscheduling, LeaderWorkerSet's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.object_types import definition, faults_of
from tests.deploy.test_chart import CHART, needs_helm, refused, render

HOSTS = ("--values", str(CHART / "examples" / "two-cpu-hosts.yaml"))
SETS = ("StatefulSet", "LeaderWorkerSet")
NAMES = {
    "volcano": ("annotations", "scheduling.k8s.io/group-name"),
    "coscheduling": ("labels", "scheduling.x-k8s.io/pod-group"),
}
"""Where a pod names its PodGroup, and under which key."""


def queued(by: str, workload: str = "StatefulSet", **more: str) -> tuple[Any, Any, dict[str, Any]]:
    """The workers' set, its pods' template, and every object, with values of worker.queue."""
    values = {"worker.workload": workload, "worker.queue.by": by, **more}
    made = render(*HOSTS, *(word for key, value in values.items() for word in ("--set", f"{key}={value}")))
    for thing in made.values():
        path = definition(thing)
        assert (path is not None and not path.exists()) or faults_of(thing) == []
    made_set = made[f"{workload}/moe-worker"]
    spec = made_set["spec"]
    return made_set, spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"], made


def without_queue(workload: str) -> tuple[Any, Any, dict[str, Any]]:
    return queued("none", workload)


@needs_helm
@pytest.mark.parametrize("workload", SETS)
def test_kueue_finds_its_queue_on_the_set_and_nothing_else_changes(workload: str) -> None:
    made, pod, everything = queued("kueue", workload, **{"worker.queue.name": "gpus"})
    plain, plain_pod, _ = without_queue(workload)
    assert made["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "gpus"
    assert made["metadata"] == plain["metadata"]
    assert pod == plain_pod, "Kueue gates the pods by itself"
    assert not [name for name in everything if name.startswith("PodGroup/")]
    control = everything["Deployment/moe-control"]
    assert "kueue.x-k8s.io/queue-name" not in control["metadata"]["labels"], "it needs no GPU, and starts at once"


@needs_helm
@pytest.mark.parametrize("workload", SETS)
@pytest.mark.parametrize("by", ["volcano", "coscheduling"])
def test_the_pods_of_a_group_are_placed_together(by: str, workload: str) -> None:
    made, pod, everything = queued(by, workload, **{"worker.hosts": "3"})
    group = everything["PodGroup/moe-worker"]
    assert group["spec"] == {"minMember": 3}
    assert faults_of({**group, "spec": {"minMembers": 3}})
    field, key = NAMES[by]
    assert pod["metadata"][field][key] == group["metadata"]["name"]
    plain, plain_pod, _ = queued("none", workload, **{"worker.hosts": "3"})
    del pod["metadata"][field][key]
    assert pod["spec"].pop("schedulerName", None) == ("volcano" if by == "volcano" else None)
    assert (pod, made["metadata"]) == (plain_pod, plain["metadata"])
    for other in ("Deployment/moe-control", "Pod/moe-serving"):
        thing = everything[other]
        assert key not in str(thing), "only the workers' pods are of the group"


@needs_helm
def test_volcano_has_queues_priorities_and_schedulers_of_any_name() -> None:
    flags = {"worker.queue.name": "gpus", "worker.priorityClassName": "high", "worker.schedulerName": "mine"}
    made, pod, everything = queued("volcano", "LeaderWorkerSet", **flags)
    assert everything["PodGroup/moe-worker"]["spec"] == {"minMember": 2, "queue": "gpus", "priorityClassName": "high"}
    assert made["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "gpus"}
    assert pod["spec"]["schedulerName"] == "mine"


@needs_helm
def test_annotations_and_labels_of_the_user_stay() -> None:
    more = {"worker.podAnnotations.a": "b", "worker.podLabels.c": "d", "monitoring.scrapeAnnotations": "true"}
    _, pod, _ = queued("volcano", **more)
    kept = {"a": "b", "prometheus.io/port": "7402", "scheduling.k8s.io/group-name": "moe-worker"}
    assert kept.items() <= pod["metadata"]["annotations"].items()
    _, pod, _ = queued("coscheduling", **more)
    assert {"c": "d", "scheduling.x-k8s.io/pod-group": "moe-worker"}.items() <= pod["metadata"]["labels"].items()


@needs_helm
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("worker.queue.by=kueue", "worker.queue.by kueue: expected a LocalQueue of the namespace in worker.queue.name"),
        ("worker.queue.name=a", "worker.queue.name: expected kueue or volcano in worker.queue.by beside it, got none"),
        ("worker.queue.by=coscheduling,worker.queue.name=a", "beside it, got coscheduling"),
        ("worker.queue.by=slurm", "worker/queue/by"),
        ("worker.queue.name=A", "worker/queue/name"),
        (
            f"worker.queue.by=kueue,worker.queue.name=a,fullnameOverride={'a' * 33}",
            "expected a name of at most 32 characters, since Kueue puts the set's into a label",
        ),
    ],
)
def test_queues_that_cannot_be_are_refused(flags: str, words: str) -> None:
    assert words in refused("moe", "--set", flags)
