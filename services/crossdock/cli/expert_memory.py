"""What `crossdock memory --model` shows: the bytes of a model's experts on each rank, from the files' headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

_GIB = 1 << 30


def as_table(found: Mapping[str, Any]) -> Group:
    """A headline and one row per quantity of `worker.room.describe`."""
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
