"""Against a real kubelet and containerd: upgrade, rollback, loss of the leader, a node that is drained.

One release lives through the file, so the tests stand in the order in which an operator would meet them.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.deploy.bed.release import CHART, NAMESPACE, Release, is_ready, right

ROWS = 96


def uids(release: Release) -> set[str]:
    return {pod["metadata"]["uid"] for name in ("control", "worker") for pod in release.pods(name)}


def settings(release: Release) -> tuple[set[Any], int | None]:
    """What the running control planes and the worker were told: the log's level, and M."""
    control = [release.config(pod) for pod in release.pods("control")]
    (worker,) = [release.config(pod) for pod in release.pods("worker")]
    return {one.get("log", {}).get("level") for one in control}, worker["worker"].get("max_tokens_per_step")


def test_an_upgrade_replaces_control_planes_and_workers_and_a_rollback_brings_the_old_values_back(
    release: Release,
) -> None:
    seen = [uids(release)]
    assert settings(release) == ({None}, None)
    release.asked("before")
    changed = {"kubernetes": {}, "log": {"level": "debug"}}
    release.upgrade(control={"config": changed}, worker={"config": {"max_tokens_per_step": ROWS}})
    release.wait_ready()
    seen.append(uids(release))
    assert settings(release) == ({"debug"}, ROWS)
    release.asked("upgraded")
    release.helm("rollback", "moe")
    release.wait_ready()
    seen.append(uids(release))
    assert settings(release) == ({None}, None)
    release.asked("rolled-back")
    assert len(set.union(*seen)) == 3 * 3, "every pod is another one each time"


def test_the_other_control_plane_takes_over_and_no_request_is_lost(release: Release) -> None:
    """The kubelet stands still meanwhile, so that it cannot start the killed one again before the other leads."""
    release.cluster.eventually("one leads", release.leader)
    release.start_client("throughout", 900)
    release.cluster.eventually("the client is answered", lambda: "asking" in release.log("throughout"))
    killed = release.leader()
    (other,) = [pod["metadata"]["name"] for pod in release.pods("control") if pod["metadata"]["name"] != killed]
    (pod,) = [pod for pod in release.pods("control") if pod["metadata"]["name"] == killed]
    release.cluster.processes.send("kubelet", signal.SIGSTOP)
    try:
        os.kill(release.process(pod), signal.SIGKILL)
        release.cluster.eventually(f"{other} leads", lambda: release.leader() == other)
    finally:
        release.cluster.processes.send("kubelet", signal.SIGCONT)

    def back() -> bool:
        status = release.get(f"pods/{killed}")["status"]["containerStatuses"][0]
        return bool(status["restartCount"] == 1 and status["ready"])

    release.cluster.eventually("the kubelet has started the killed one again", back)
    release.wait_ready()
    release.stop_client("throughout")
    right(release.answers("throughout"))


def gone_and_waiting(release: Release, component: str, uid: str) -> None:
    """Until the evicted pod is away and the one in its place finds no node."""

    def waits() -> bool:
        found = {pod["metadata"]["uid"]: pod for pod in release.pods(component)}
        waiting = [pod for pod in found.values() if not pod["spec"].get("nodeName")]
        said = [one.get("message", "") for pod in waiting for one in pod["status"].get("conditions", ())]
        return uid not in found and any("unschedulable" in message for message in said)

    release.cluster.eventually(f"the evicted pod of {component} is away and its successor waits", waits)


def test_a_drained_node_loses_one_control_plane_at_a_time(release: Release) -> None:
    release.cluster.eventually("the budget lets one go", lambda: release.budget("control") == 1)
    first, second = release.pods("control")
    release.cordon(on=True)
    try:
        release.evict(first["metadata"]["name"]).done()
        refused = release.evict(second["metadata"]["name"])
        assert (refused.status, "disruption budget" in refused.body["message"]) == (429, True)
        gone_and_waiting(release, "control", first["metadata"]["uid"])
        again = release.evict(second["metadata"]["name"])
        assert again.status == 429, "while the other one has no node"
    finally:
        release.cordon(on=False)
    release.wait_ready()
    release.cluster.eventually("the budget lets one go again", lambda: release.budget("control") == 1)
    release.asked("after-control")


def test_the_worker_pod_leaves_a_drained_node_when_its_budget_lets_it(release: Release) -> None:
    (worker,) = release.pods("worker")
    release.upgrade(worker={"blockEvictions": True})
    release.cluster.eventually("the budget is judged", lambda: release.budget("worker") == 0)
    release.cordon(on=True)
    try:
        refused = release.evict(worker["metadata"]["name"])
        assert (refused.status, "disruption budget" in refused.body["message"]) == (429, True)
        (there,) = release.pods("worker")
        assert (there["metadata"]["uid"], is_ready(there)) == (worker["metadata"]["uid"], True)
        release.asked("while-refused")
        release.upgrade(worker={"blockEvictions": False})
        assert release.budget("worker") is None
        release.evict(worker["metadata"]["name"]).done()
        gone_and_waiting(release, "worker", worker["metadata"]["uid"])
    finally:
        release.cordon(on=False)
    release.wait_ready()
    release.asked("after-worker")


def test_uninstall_leaves_nothing(release: Release) -> None:
    """Neither in the namespace nor outside of any, with the release's label or without."""
    release.uninstall()


BROKEN = {
    "a wrong tag": ({"image": {"tag": "wrong"}}, "ErrImageNeverPull"),
    "too many GPUs": ({"worker": {"gpus": 2}}, "Insufficient nvidia.com/gpu"),
    "a missing Secret": ({"tls": {"enabled": True}}, 'secret "moe-worker-tls" not found'),
}
"""What is wrong with the first install, and the word by which Kubernetes tells it."""


@pytest.mark.parametrize("fault", BROKEN)
def test_an_upgrade_repairs_a_first_install_that_never_was_ready(release: Release, fault: str) -> None:
    wrong, word = BROKEN[fault]
    given = {**release.given, "image": {**release.given["image"], "pullPolicy": "Never"}}
    broken = {**given, **{part: {**given.get(part, {}), **changed} for part, changed in wrong.items()}}
    release.cluster.helm("install", "moe", str(CHART), "--namespace", NAMESPACE, values=broken)
    release.cluster.eventually("the worker pod is stuck", lambda: word in release.explain(), instead=release.explain)
    (stuck,) = release.pods("worker")
    assert not is_ready(stuck)
    release.helm("upgrade", "moe", str(CHART), values=given)
    release.wait_ready()
    (pod,) = release.pods("worker")
    assert pod["metadata"]["uid"] != stuck["metadata"]["uid"]
    release.asked("repaired")
    release.uninstall()
