"""What `crossdock memory` shows: the bytes of one rank's region, array by array, and of what it has for ranks of other
hosts. Computed, not measured: no GPU.

The sizes come from the byte map that the kernels of the transport use (`base.region_map`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from crossdock.common.transports import installed, needs_gpu, of_device
from crossdock.tune import request as tune
from crossdock.tune.request import OptionError
from ep_kernels import Layout, Mode, MoEConfig
from ep_kernels.groups import PaperGroup
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.base import RegionArray, RegionMap, region_map

T = TypeVar("T")

PAYLOADS = {name: fields for name, fields in tune.PAYLOADS.items() if "scale_columns" not in fields}
"""What rows may be, by a name that people type, as fields of MoEConfig; fp8: quantised inside dispatch."""
_GIB = 1 << 30
_MIB = 1 << 20


def config_of(
    num_experts: int,
    hidden_size: int,
    topk: int,
    max_tokens: int,
    ranks: int,
    mode: str,
    layout: str,
    dtype: str,
    transport: str = "",
) -> MoEConfig:
    """The configuration of rank 0, which owns the most experts; layout "" is the mode's own, transport "" the one
    on GPUs. Raises ConfigError, and OptionError where a name is unknown."""
    named_layout = _known("--layout", {kind.value: kind for kind in Layout}, layout) if layout else None
    facts = _known("--transport", installed(), transport) if transport else of_device("cuda")
    return MoEConfig(
        group=PaperGroup(0, ranks),
        num_experts=num_experts,
        hidden_size=hidden_size,
        topk=topk,
        max_tokens_per_rank=max_tokens,
        mode=_known("--mode", {kind.value: kind for kind in Mode}, mode),
        layout=named_layout,
        transport=facts.name,
        **_known("--dtype", PAYLOADS, dtype),
    )


def map_of(config: MoEConfig) -> RegionMap:
    """Bytes of a rank's region, array by array. Raises OptionError: the transport does not compute them."""
    found = region_map(config)
    if found is None:
        raise OptionError(f"--transport: expected one with `region_map` in its inspection.py, got {config.transport}")
    return found


def num_mirrors(ranks: int, hosts: int) -> int:
    """Most mirrors that a rank's network writes, where the ranks are spread evenly: a rank of a host of n takes what
    every n-th rank of each other host sends."""
    least, more = divmod(ranks, hosts)
    sizes = [least + 1] * more + [least] * (hosts - more)
    return sum(-(-size // least) for size in sizes[:-1])


def num_boxes(ranks: int, hosts: int) -> int:
    """Most boxes of a rank, where the ranks are spread evenly: two for each rank of another host."""
    return 2 * (ranks - ranks // hosts)


def num_row_boxes(ranks: int, hosts: int) -> int:
    """Most of them that have memory for rows of a dispatch: one to each other host, and one from each source whose rows
    come to the rank, for all of its host."""
    return hosts - 1 + num_mirrors(ranks, hosts)


def over_hosts(config: MoEConfig, hosts: int) -> tuple[RegionMap, list[RegionArray]]:
    """The region of a rank of a group over `hosts` hosts, and what it has beside it for ranks of other hosts. Raises
    ConfigError, OptionError."""
    size = config.group.size
    if not 1 <= hosts <= size:
        raise OptionError(f"--hosts: expected 1 to {size}, the number of ranks, got {hosts}")
    if hosts > 1:
        config = msgspec.structs.replace(config, network=NetworkConfig())
    found = map_of(config)
    if found.box_bytes:
        small = found.box_bytes - found.box_row_bytes
        return found, [
            RegionArray("boxes", 0, num_boxes(size, hosts), small, "to and from each, in pinned host memory"),
            RegionArray(
                "rows in boxes", 0, num_row_boxes(size, hosts), found.box_row_bytes,
                "of a dispatch, in boxes of rails; with GPUDirect every box has them, all on the GPU",
            ),
        ]  # fmt: skip
    if hosts > 1 and not found.mirror_bytes:
        raise OptionError(f"--hosts: expected 1 with transport {config.transport}, got {hosts}")
    num = num_mirrors(size, hosts) if hosts > 1 else 0
    return found, [RegionArray("mirrors", 0, num, found.mirror_bytes, "what ranks of other hosts send")]


def as_dict(config: MoEConfig, hosts: int = 1) -> dict[str, object]:
    """Plain JSON types; everything in bytes."""
    found, far = over_hosts(config, hosts)
    return {
        "ranks": config.group.size,
        "hosts": hosts,
        "num_experts": config.num_experts,
        "hidden_size": config.hidden_size,
        "topk": config.topk,
        "max_tokens_per_rank": config.max_tokens_per_rank,
        "mode": config.mode.value,
        "layout": config.resolved_layout.value,
        "payload_dtype": str(config.payload_dtype).removeprefix("torch."),
        "num_bytes": found.num_bytes,
        "num_mirrors": 0 if found.box_bytes else far[0].num_slots,
        "mirror_bytes": found.mirror_bytes,
        "num_boxes": far[0].num_slots if found.box_bytes else 0,
        "box_bytes": found.box_bytes,
        "num_row_boxes": far[1].num_slots if found.box_bytes else 0,
        "box_row_bytes": found.box_row_bytes,
        "arrays": [
            {
                "name": array.name,
                "offset": array.offset,
                "num_slots": array.num_slots,
                "slot_bytes": array.slot_bytes,
                "num_bytes": array.num_bytes,
            }
            for array in found.arrays
        ],
    }


def as_table(config: MoEConfig, hosts: int = 1) -> Group:
    """A headline, one row per array that takes memory, and the total; with several hosts, the mirrors or boxes."""
    found, far = over_hosts(config, hosts)
    total = found.num_bytes
    table = Table()
    for name in ("array", "offset", "slots", "bytes per slot", "bytes", "share", "holds"):
        table.add_column(name, justify="left" if name in ("array", "holds") else "right")
    for array in (one for one in found.arrays if one.num_bytes):
        table.add_row(
            array.name, f"{array.offset:,}", str(array.num_slots), f"{array.slot_bytes:,}", f"{array.num_bytes:,}",
            f"{array.num_bytes / total:.1%}", array.holds,
        )  # fmt: skip
    table.add_section()
    memory = "GPU memory" if needs_gpu(config.transport) else "memory, if all is touched,"
    table.add_row("region", "", "", "", f"{total:,}", "", f"{total / _MIB:,.1f} MiB of {memory} on each rank")
    for array in far if hosts > 1 else ():
        table.add_row(
            array.name, "", str(array.num_slots), f"{array.slot_bytes:,}", f"{array.num_bytes:,}", "",
            f"{array.num_bytes / _MIB:,.1f} MiB more: {array.holds}",
        )  # fmt: skip
    return Group(_headline(config, found), table)


def _headline(config: MoEConfig, found: RegionMap) -> Text:
    payload, mode = str(config.payload_dtype).removeprefix("torch."), config.mode.value
    if config.mode is Mode.AUTO:
        mode += f" (LL up to {found.ll_tokens} tokens)"
    return Text(
        f"{config.transport} region: {config.group.size} ranks, {config.max_tokens_per_rank} tokens of "
        f"{config.hidden_size} x {payload} per rank, top {config.topk} of {config.num_experts} experts, {mode}, "
        f"{config.resolved_layout.value}"
    )


def _known(option: str, known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise OptionError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def experts_table(found: Mapping[str, Any]) -> Group:
    """A headline and one row per quantity of `worker.experts.memory_need.describe`."""
    format = found["dtype"] if found["format"] == "float" else found["format"]
    head = f"{found['family']}: {found['moe_layers']} layers of {found['num_experts']} experts in {format}"
    table = Table()
    for name in ("experts", "bytes", "GiB"):
        table.add_column(name, justify="left" if name == "experts" else "right")
    rows = {
        "one of one layer": "expert_bytes",
        "of the model": "model_bytes",
        f"of a rank of {found['ranks']}, {found['experts_per_rank']} per layer": "rank_bytes",
        "more while experts move: one layer": "moving_bytes",
        "free on each rank": "available_bytes",
    }
    for label, key in rows.items():
        table.add_row(label, f"{found[key]:,}", f"{found[key] / _GIB:,.2f}")
    least = found["least_ranks"]
    enough = f"least number of ranks: {least}" if least else "not even one expert of each layer fits"
    return Group(Text(head), table, Text(f"{'fits' if found['fits'] else 'does not fit'}; {enough}"))
