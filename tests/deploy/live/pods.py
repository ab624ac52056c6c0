"""Against a real kubelet and containerd: `helm install --wait`, our images as pods, a checkpoint served and checked.

One release lives through the file, so the tests stand in the order in which an operator would meet them.
"""

from __future__ import annotations

import os
import signal

from tests.deploy.bed import node as real
from tests.deploy.bed.release import NAMESPACE, Release, is_ready


def test_helm_returns_when_every_pod_is_ready_at_the_first_try(release: Release) -> None:
    pods = release.pods("control") + release.pods("worker")
    assert [is_ready(pod) for pod in pods] == [True, True, True]
    assert {pod["spec"]["nodeName"] for pod in pods} == {real.NAME}
    assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods} == {0}


def test_a_client_in_another_pod_gets_right_answers(release: Release) -> None:
    release.asked("first")


def test_helm_test_passes(release: Release) -> None:
    said = release.cluster.helm("test", "moe", "--namespace", NAMESPACE, "--timeout=90s", tool=release.tool)
    assert "Phase:          Succeeded" in said


def test_a_worker_killed_is_started_again_by_the_kubelet_and_serves(release: Release) -> None:
    os.kill(release.process(release.pods("worker")[0]), signal.SIGKILL)

    def restarted() -> bool:
        return bool(release.pods("worker")[0]["status"]["containerStatuses"][0]["restartCount"] == 1)

    release.cluster.eventually("the kubelet started the container again", restarted)
    release.wait_ready()
    release.asked("second")


def test_a_worker_pod_deleted_drains_and_comes_back_as_another(release: Release) -> None:
    before = release.pods("worker")[0]["metadata"]
    release.delete(before["name"], 50)

    def another() -> bool:
        return any(pod["metadata"]["uid"] != before["uid"] for pod in release.pods("worker"))

    release.cluster.eventually("the StatefulSet has made another pod", another)
    release.wait_ready()
    release.asked("third")


def test_uninstall_leaves_nothing(release: Release) -> None:
    """Neither in the namespace nor outside of any, with the release's label or without."""
    release.uninstall()
