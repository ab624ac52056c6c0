"""GPU nodes that are only objects of the API server: the real scheduler places pods on them, nothing runs there."""

from __future__ import annotations

from typing import Any

from tests.deploy.bed.cluster import Cluster

CLUSTER_UUID = "3d2a9c5e-1111-4222-8333-0123456789ab"
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def h200(index: int) -> dict[str, Any]:
    """A node of 8 GPUs, with InfiniBand and EFA; two of them share a leaf switch."""
    labels = {
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "topology.kubernetes.io/zone": "z2",
        "fabric.topograph.run/tier-1": f"leaf{index // 2}",
        "fabric.topograph.run/tier-2": "spine1",
    }
    more = {"rdma/ib": "8", "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"}
    return _node(f"h200-{index}", 8, labels, more)


def gb200(index: int, clique: int = 0) -> dict[str, Any]:
    """A node of 4 GPUs in an NVLink domain of several nodes."""
    labels = {
        "kubernetes.io/arch": "arm64",
        "nvidia.com/gpu.product": "NVIDIA-GB200",
        "nvidia.com/gpu.clique": f"{CLUSTER_UUID}.{clique}",
        "topology.kubernetes.io/zone": "z1",
    }
    return _node(f"gb200-{clique}-{index}", 4, labels)


def plain(index: int = 0) -> dict[str, Any]:
    """A node without GPUs or taints."""
    return _node(f"plain-{index}", 0, {})


def _node(name: str, num_gpus: int, labels: dict[str, str], more: dict[str, str] | None = None) -> dict[str, Any]:
    capacity = {"cpu": "192", "memory": "2Ti", "pods": "110", "ephemeral-storage": "1Ti", **(more or {})}
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


def devices(node: str, driver: str, names: list[str]) -> dict[str, Any]:
    """What a DRA driver tells of a node."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{driver}"},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [{"name": name} for name in names]},
    }


def device_class(name: str, driver: str) -> dict[str, Any]:
    """A class of all devices of a driver."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


def claim_template(name: str, device_class_name: str, count: int) -> dict[str, Any]:
    """A template of claims for so many devices of a class."""
    exactly = {"deviceClassName": device_class_name, "allocationMode": "ExactCount", "count": count}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}},
    }


def compute_domain_type() -> dict[str, Any]:
    """The type ComputeDomain with the fields that NVIDIA documents of its version v1beta1; their driver is no Go module
    from which it could be taken."""
    text, template = (
        {"type": "string"},
        {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    )
    channel = {
        "type": "object",
        "required": ["resourceClaimTemplate"],
        "properties": {
            "allocationMode": {**text, "enum": ["All", "Single"], "default": "Single"},
            "resourceClaimTemplate": template,
        },
    }
    spec = {
        "type": "object",
        "required": ["channel", "numNodes"],
        "properties": {"numNodes": {"type": "integer"}, "channel": channel},
        "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "immutable"}],
    }
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "computedomains.resource.nvidia.com"},
        "spec": {
            "group": "resource.nvidia.com",
            "scope": "Namespaced",
            "names": {
                "kind": "ComputeDomain",
                "listKind": "ComputeDomainList",
                "plural": "computedomains",
                "singular": "computedomain",
            },
            "versions": [version],
        },
    }
