"""What `crossdock memory` shows: the bytes of one rank's region, array by array. Computed, not measured: no GPU.

The sizes come from the byte map that the kernels of the nvlink transport use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_kernels import Layout, Mode, MoEConfig
from ep_kernels.transports.nvlink import plan
from ep_kernels.transports.nvlink.inspection import PAYLOADS, PaperGroup, arrays

T = TypeVar("T")

HOLDS = {
    "flags": "how far each peer has come",
    "counts": "HT: rows that each source sends, per expert",
    "arrivals": "HT, per-expert layouts: which rows have arrived",
    "origins": "HT: which dispatch each source's routing is of",
    "meta": "HT: expert, place, weight, token of each row",
    "scales": "HT: fp8 scales of the rows, by source",
    "rows": "rows in their final place: output",
    "home": "HT: partial results on their way home, with their fp8 scales",
    "home_weights": "HT: gradients of weights on their way home",
    "home_origins": "HT: which dispatch each owner's routing is of",
    "lines": "LL: rows and their scales as they travel, by source",
    "meta_lines": "LL: expert, place, weight, token of each row",
    "count_lines": "LL, per-expert layouts: rows that each source sends, per expert",
    "heads": "LL: rows that each source sends, and of which dispatch",
    "home_lines": "LL: partial results on their way home",
    "weight_lines": "LL: gradients of weights on their way home",
    "home_heads": "LL: which dispatch each owner's routing is of",
}
"""What each array is for. LL, HT: there only where the mode, or AUTO, may come to use it."""
_MIB = 1 << 20


class OptionError(ValueError):
    """A name that this command does not know."""


def config_of(
    num_experts: int, hidden_size: int, topk: int, max_tokens: int, ranks: int, mode: str, layout: str, dtype: str
) -> MoEConfig:
    """The configuration of rank 0, which owns the most experts; layout "" is the mode's own. Raises ConfigError;
    OptionError where a name is unknown."""
    named_layout = _known("--layout", {kind.value: kind for kind in Layout}, layout) if layout else None
    return MoEConfig(
        group=PaperGroup(0, ranks),
        num_experts=num_experts,
        hidden_size=hidden_size,
        topk=topk,
        max_tokens_per_rank=max_tokens,
        mode=_known("--mode", {kind.value: kind for kind in Mode}, mode),
        layout=named_layout,
        transport="nvlink",
        **_known("--dtype", PAYLOADS, dtype),
    )


def as_dict(config: MoEConfig) -> dict[str, object]:
    """Plain JSON types; everything in bytes."""
    found = arrays(config)
    return {
        "ranks": config.group.size,
        "num_experts": config.num_experts,
        "hidden_size": config.hidden_size,
        "topk": config.topk,
        "max_tokens_per_rank": config.max_tokens_per_rank,
        "mode": config.mode.value,
        "layout": config.resolved_layout.value,
        "payload_dtype": str(config.payload_dtype).removeprefix("torch."),
        "num_bytes": sum(array.num_bytes for array in found),
        "arrays": [
            {
                "name": array.name,
                "offset": array.offset,
                "num_slots": array.num_slots,
                "slot_bytes": array.slot_bytes,
                "num_bytes": array.num_bytes,
            }
            for array in found
        ],
    }


def as_table(config: MoEConfig) -> Group:
    """A headline, one row per array, and the total."""
    found = arrays(config)
    total = sum(array.num_bytes for array in found)
    table = Table()
    for name in ("array", "offset", "slots", "bytes per slot", "bytes", "share", "holds"):
        table.add_column(name, justify="left" if name in ("array", "holds") else "right")
    for array in found:
        table.add_row(
            array.name, f"{array.offset:,}", str(array.num_slots), f"{array.slot_bytes:,}", f"{array.num_bytes:,}",
            f"{array.num_bytes / total:.1%}", HOLDS[array.name], style="" if array.num_bytes else "dim",
        )  # fmt: skip
    table.add_section()
    table.add_row("region", "", "", "", f"{total:,}", "", f"{total / _MIB:,.1f} MiB of GPU memory on each rank")
    return Group(_headline(config), table)


def _headline(config: MoEConfig) -> Text:
    payload, mode = str(config.payload_dtype).removeprefix("torch."), config.mode.value
    if config.mode is Mode.AUTO:
        mode += f" (LL up to {plan.ll_tokens(config)} tokens)"
    return Text(
        f"nvlink region: {config.group.size} ranks, {config.max_tokens_per_rank} tokens of {config.hidden_size} x "
        f"{payload} per rank, top {config.topk} of {config.num_experts} experts, {mode}, {config.resolved_layout.value}"
    )


def _known(option: str, known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise OptionError(f"{option}: expected one of {', '.join(known)}, got {name}")
    return known[name]
