"""Against a real kubelet: a group of two worker pods, which share nothing but a network.

The node has one network card, so the pods stand for two hosts: each has its own address, processes and shared memory,
and rows travel over TCP. One release lives through the file, in the order in which an operator would meet the tests.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.deploy.bed.node import Node
from tests.deploy.bed.release import Release, is_ready

HOSTS = 2


@pytest.fixture(scope="module")
def release(given: dict[str, Any], node: Node) -> Release:
    """A rank in each of two pods, installed by helm."""
    config = {**given["worker"].get("config", {}), "network": {"provider": "tcp", "lanes": 2}}
    worker = {**given["worker"], "hosts": HOSTS, "numWorkers": 1, "spread": "none", "config": config}
    made = Release(node.cluster, node, {**given, "worker": worker}, "helm3")
    made.install()
    made.wait_ready()  # helm waits for no pod whose updateStrategy is OnDelete
    return made


def worker_pods(release: Release) -> list[Any]:
    """In the order of their names."""
    return sorted(release.pods("worker"), key=lambda pod: str(pod["metadata"]["name"]))


def namespaces(release: Release, kind: str) -> set[str]:
    """Those of the worker pods' containers."""
    return {os.readlink(f"/proc/{release.process(pod)}/ns/{kind}") for pod in worker_pods(release)}


def test_both_pods_are_ready_and_share_neither_network_nor_processes(release: Release) -> None:
    pods = worker_pods(release)
    assert [pod["metadata"]["name"] for pod in pods] == ["moe-worker-0", "moe-worker-1"]
    assert all(map(is_ready, pods))
    assert len({pod["status"]["podIP"] for pod in pods}) == HOSTS
    assert [len(namespaces(release, kind)) for kind in ("net", "pid", "ipc")] == [HOSTS] * 3


def test_a_client_gets_right_answers(release: Release) -> None:
    release.asked("first")


def test_a_rank_killed_on_one_host_comes_back_and_the_group_answers_right(release: Release) -> None:
    os.kill(release.process(worker_pods(release)[1]), signal.SIGKILL)

    def restarted() -> bool:
        return bool(worker_pods(release)[1]["status"]["containerStatuses"][0]["restartCount"] == 1)

    release.cluster.eventually("the kubelet started the container again", restarted)
    release.wait_ready()
    release.asked("second")
    assert worker_pods(release)[0]["status"]["containerStatuses"][0]["restartCount"] == 0, "the other host's lived on"


def test_a_pod_deleted_comes_back_with_another_address_and_the_group_answers_right(release: Release) -> None:
    before = worker_pods(release)[1]
    release.delete(before["metadata"]["name"], 50)

    def another() -> bool:
        found = worker_pods(release)
        return len(found) == HOSTS and found[1]["metadata"]["uid"] != before["metadata"]["uid"]

    release.cluster.eventually("the StatefulSet has made another pod", another)
    release.wait_ready()
    assert worker_pods(release)[1]["status"]["podIP"] != before["status"]["podIP"]
    release.asked("third")


def test_uninstall_leaves_nothing(release: Release) -> None:
    """Neither in the namespace nor outside of any."""
    release.uninstall()
