"""What `crossdock experts` shows: load, copies, balance, and what would move; as JSON and as tables. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from crossdock.protocol.v1.control_pb2 import ExpertsResponse, LayerExperts

WELL, BADLY = 1.05, 1.25
"""Imbalances up to the first are green, past the second red."""


def as_dict(found: ExpertsResponse, layer: int | None = None) -> dict[str, object]:
    """Plain JSON types; names as in the proto. `layer`: of that one only; None: of all."""
    return {
        "version": found.version,
        "num_experts": found.num_experts,
        "num_slots": found.num_slots,
        "world_size": found.world_size,
        "imbalance": round(found.imbalance, 4),
        "imbalance_if_moved": round(found.imbalance_if_moved, 4),
        "domain_imbalance": round(found.domain_imbalance, 4),
        "would_move": found.would_move,
        "layers_switched": found.layers_switched,
        "layers_moving": found.layers_moving,
        "last_change": found.last_change,
        "rank_loads": [round(share, 6) for share in found.rank_loads],
        "domains": list(found.domains),
        "layers": [_layer(one, found.world_size) for one in found.layers if layer in {None, one.layer}],
    }


def as_tables(found: ExpertsResponse, target: str, layer: int | None, most: int) -> Group:
    """A headline, the ranks, and all layers in short or the `most` loaded experts of one layer."""
    if not found.version:
        return Group(_headline(found, target), Text("it is not known yet where the experts are", style="yellow"))
    parts: list[Table | Text] = [_headline(found, target), Text(), _ranks(found), Text()]
    chosen = [one for one in found.layers if layer is None or one.layer == layer]
    parts += [_layers(chosen)] if layer is None else [_experts(one, found, most) for one in chosen]
    if found.last_change:
        parts += [Text(), Text(f"last move: {found.last_change}", style="dim")]
    return Group(*parts)


def copies(layer: LayerExperts, num_experts: int) -> list[int]:
    counts = [0] * num_experts
    for expert in layer.slots:
        counts[expert] += 1
    return counts


def ranks_of(layer: LayerExperts, expert: int, world_size: int, *, if_moved: bool = False) -> list[int]:
    """The ranks that hold a copy of an expert, now or after the move."""
    slots = layer.slots_if_moved if if_moved else layer.slots
    share, more = divmod(len(slots), world_size)
    ends = [rank * share + min(rank, more) for rank in range(1, world_size + 1)]
    found = (slot for slot, held in enumerate(slots) if held == expert)
    return [next(rank for rank, end in enumerate(ends) if slot < end) for slot in found]


def _headline(found: ExpertsResponse, target: str) -> Text:
    more = found.num_slots - found.num_experts
    moving = f"  moving: {found.layers_switched}/{found.layers_moving} layers" if found.layers_moving else ""
    return Text.assemble(
        (f"{found.num_experts} experts", "bold"),
        f" and {more} extra copies on {found.world_size} ranks  placement {found.version}",
        (moving, "yellow"),
        (f"  control plane {target}\n", "dim"),
        "imbalance ",
        _ratio(found.imbalance),
        f" (if {found.would_move} copies moved: {found.imbalance_if_moved:.3f}; domains: {found.domain_imbalance:.3f})",
    )


def _ranks(found: ExpertsResponse) -> Table:
    table = _table("rank", "domain", "share of rows", "of the mean")
    for rank, (share, domain) in enumerate(zip(found.rank_loads, found.domains, strict=True)):
        table.add_row(str(rank), str(domain), f"{share:.2%}", _ratio(share * found.world_size))
    return table


def _layers(layers: Sequence[LayerExperts]) -> Table:
    table = _table("layer", "rows/s", "hottest", "its share", "imbalance", "if moved")
    for layer in layers:
        total = sum(layer.load)
        hottest = max(range(len(layer.load)), key=layer.load.__getitem__)
        share = layer.load[hottest] / total if total else 0.0
        ratios = _ratio(layer.imbalance), f"{layer.imbalance_if_moved:.3f}"
        table.add_row(str(layer.layer), f"{total:,.0f}", str(hottest) if total else "", f"{share:.1%}", *ratios)
    return table


def _experts(layer: LayerExperts, found: ExpertsResponse, most: int) -> Table:
    table = _table("expert", "rows/s", "copies", "ranks", "ranks if moved")
    counts = copies(layer, found.num_experts)
    order = sorted(range(found.num_experts), key=lambda expert: (-layer.load[expert], expert))
    for expert in order[:most]:
        now, then = (ranks_of(layer, expert, found.world_size, if_moved=moved) for moved in (False, True))
        cells = str(expert), f"{layer.load[expert]:,.0f}", str(counts[expert]), _names(now)
        table.add_row(*cells, "" if now == then else _names(then))
    return table


def _layer(layer: LayerExperts, world_size: int) -> dict[str, object]:
    num_experts = len(layer.load)
    counts = copies(layer, num_experts)
    return {
        "layer": layer.layer,
        "imbalance": round(layer.imbalance, 4),
        "imbalance_if_moved": round(layer.imbalance_if_moved, 4),
        "experts": [
            {
                "expert": expert,
                "rows_per_s": round(layer.load[expert], 3),
                "copies": counts[expert],
                "ranks": ranks_of(layer, expert, world_size),
                "ranks_if_moved": ranks_of(layer, expert, world_size, if_moved=True),
            }
            for expert in range(num_experts)
        ],
    }


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _ratio(value: float) -> Text:
    return Text(f"{value:.3f}", style="green" if value <= WELL else "red" if value > BADLY else "yellow")


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
