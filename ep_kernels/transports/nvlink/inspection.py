"""What the transport asks of a GPU: the bytes of a region, found out without one, and what `crossdock doctor` shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.base import RegionArray, RegionMap
from ep_kernels.transports.nvlink.calls import plan

HOLDS = {
    "flags": "progress of each peer: the seq of its last operation",
    "counts": "HT: rows that each source sends, per expert",
    "arrivals": "HT, per-expert layouts: which rows have arrived",
    "routing_ids": "HT: routing_id of each source",
    "metadata": "HT: expert, row, weight, token of each row",
    "scales": "HT: fp8 scales of the rows, by source",
    "rows": "output: rows in their final place",
    "combine_rows": "HT: combine receive buffer: partials, with their fp8 scales",
    "combine_weights": "HT: gradients of weights, received by combine",
    "combine_routing_ids": "HT: routing_id of each expert rank",
    "row_lines": "LL: rows and their scales as they travel, by source",
    "metadata_lines": "LL: expert, row, weight, token of each row",
    "count_lines": "LL, per-expert layouts: rows that each source sends, per expert",
    "count_packets": "LL: rows that each source sends, and how many dispatches old its routing is",
    "combine_lines": "LL: combine receive buffer: partials, with their fp8 scales",
    "weight_lines": "LL: gradients of weights, received by combine",
    "routing_packets": "LL: routing_id of each expert rank",
}
"""What each array is for. LL, HT: there only where the mode, or AUTO, may come to use it."""


def arrays(config: MoEConfig) -> list[RegionArray]:
    """The byte map of one rank's region, in order of address; it ends where the last array does. Raises ConfigError."""
    shared = abi.region_map(plan.sizes_of(config).shape)
    names = [name for name, _ in abi.RegionMap._fields_]
    starts = {name: getattr(shared, name) for name in names if name != "num_bytes" and not name.endswith("_stride")}
    ends = [*list(starts.values())[1:], shared.num_bytes]
    found = []
    for (name, start), end in zip(starts.items(), ends, strict=True):
        stride = getattr(shared, f"{name}_stride", end - start)
        found.append(RegionArray(name, start, (end - start) // stride if stride else 0, stride, HOLDS[name]))
    return found


def region_map(config: MoEConfig) -> RegionMap:
    found = RegionMap(tuple(arrays(config)), plan.ll_tokens(config))
    if config.network is None:
        return found
    shape = plan.sizes_of(config).shape
    return replace(found, box_bytes=abi.box_bytes(shape), box_row_bytes=abi.box_row_bytes(shape))


def probe(device: int) -> dict[str, Any]:
    """See `base.probe`: how device memory is shared here, and why no better way is; how NICs would reach it."""
    from ep_kernels.transports.nvlink.memory.memory import choose_kind
    from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

    kind, refused = choose_kind(device)
    handles = {"kind": kind.value, "refused": {other.value: why for other, why in refused.items()}}
    return {"handles": handles, "gpu_direct": CudaGpu(device).probe()}


def boxes(network: NetworkConfig, device: int) -> str:
    from ep_kernels.transports.nvlink.network import gpu_direct
    from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

    torch.zeros(1, device=f"cuda:{device}", dtype=torch.float32)  # its context is current
    return str(gpu_direct.probe(network, CudaGpu(device)))
