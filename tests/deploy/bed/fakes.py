"""GPU nodes that are only objects of the API server: the real scheduler places pods on them, nothing runs there."""

from __future__ import annotations

from typing import Any

from tests.deploy.bed.cluster import Cluster

CLUSTER_UUID = "3d2a9c5e-1111-4222-8333-0123456789ab"
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def h200(index: int) -> dict[str, Any]:
    """A node of 8 GPUs; two of them share a leaf switch."""
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "topology.kubernetes.io/zone": "z2",
        "fabric.topograph.run/tier-1": f"leaf{index // 2}",
        "fabric.topograph.run/tier-2": "spine1",
    }
    return _node(f"h200-{index}", 8, labels)


def gb200(index: int, clique: int = 0) -> dict[str, Any]:
    """A node of 4 GPUs in an NVLink domain of several nodes."""
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-GB200",
        "nvidia.com/gpu.clique": f"{CLUSTER_UUID}.{clique}",
        "topology.kubernetes.io/zone": "z1",
    }
    return _node(f"gb200-{clique}-{index}", 4, labels)


def plain() -> dict[str, Any]:
    """A node without GPUs or taints."""
    return _node("plain-0", 0, {})


def _node(name: str, num_gpus: int, labels: dict[str, str]) -> dict[str, Any]:
    capacity = {"cpu": "192", "memory": "2Ti", "pods": "110", "ephemeral-storage": "1Ti"}
    if num_gpus:
        capacity["nvidia.com/gpu"] = str(num_gpus)
    always = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**always, **labels}},
        "spec": {"taints": [TAINT]} if num_gpus else {},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated", "message": ""}],
        },
    }


def add(cluster: Cluster, *nodes: dict[str, Any]) -> None:
    """Make them, Ready."""
    for node in nodes:
        status = {"status": node["status"]}
        cluster.api.apply({key: value for key, value in node.items() if key != "status"}).done()
        path = f"/api/v1/nodes/{node['metadata']['name']}/status"
        cluster.api.ask("PATCH", path, status, kind="application/merge-patch+json").done()
