"""A topology as plain JSON types and as tables. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from google.protobuf import json_format
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.common.plural import counted, span
from crossdock.control.topology.discovery import CPU, Reach, gpu_trouble, path_kinds
from crossdock.topo.sources import Picture

MATRIX_RANKS = 16
"""Larger topologies are listed by kinds of pairs instead of as a matrix."""
TABLE_DEVICES = 32
"""Larger ones by a line for each host instead of each device."""
_SHOWN_PAIRS = 3
_GIB = 1 << 30


def as_dict(picture: Picture) -> dict[str, Any]:
    """Everything: hosts as they state themselves, devices, domains, and the pairs by the way they reach each other."""
    topology = picture.topology
    return {
        "title": picture.title,
        "hosts": [json_format.MessageToDict(host, preserving_proto_field_name=True) for host in topology.hosts],
        "devices": [_device(picture, number) for number in picture.in_order],
        "domains": {name: [topology.name(number) for number in members] for name, members in topology.domains.items()},
        "paths": [
            {
                "transport": reach.transport,
                "hops": reach.hops,
                "gbps": round(reach.gbps, 1),
                "served": reach.served,
                "off": [{"transport": transport, "why": why} for transport, why in reach.off],
                "pairs": pairs,
            }
            for reach, pairs in paths(picture).items()
        ],
    }


def paths(picture: Picture) -> dict[Reach, list[tuple[int, int]]]:
    """Pairs of ranks (lower first; devices without a rank are left out), by the path between them."""
    found: dict[Reach, list[tuple[int, int]]] = {}
    ranked = [number for number in picture.in_order if number in picture.ranks]
    for place, one in enumerate(ranked):
        for other in ranked[place + 1 :]:
            pair = picture.ranks[one], picture.ranks[other]
            found.setdefault(picture.topology.reach(one, other), []).append(pair)
    return found


def as_tables(picture: Picture) -> RenderableType:
    """Headline, devices, matrix or kinds of pairs, and why transports are off."""
    topology = picture.topology
    num_gpus = sum(device.gpu != CPU for device in topology.devices)
    parts = [
        counted(len(topology.hosts), "host"),
        counted(num_gpus, "GPU"),
        counted(len(topology.domains), "NVLink domain"),
    ]
    headline = Text.assemble((", ".join(parts), "bold"), (f"  {picture.title}", "dim"))
    found = paths(picture)
    table = _devices(picture) if len(topology.devices) <= TABLE_DEVICES else _hosts(picture)
    shown: list[RenderableType] = [headline, Text(), table, Text()]
    if found and len(picture.ranks) <= MATRIX_RANKS:
        shown += [_matrix(picture), Text(_legend(), style="dim"), Text()]
    if found:
        shown += [_kinds(found), Text()]
    shown += list(_why_off(found))
    shown += list(_troubles(picture))
    return Group(*shown)


def _device(picture: Picture, number: int) -> dict[str, Any]:
    device = picture.topology.devices[number]
    return {
        "rank": picture.ranks.get(number),
        "name": picture.topology.name(number),
        "domain": device.domain,
        "no_domain": device.no_domain,
        "nic": device.nic,
        "no_nic": device.no_nic,
        "nic_distance": device.nic_distance,
        "rail": device.rail,
        "network": None if device.network is None else asdict(device.network),
    }


def _plain_table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, justify in columns:
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _devices(picture: Picture) -> Table:
    topology = picture.topology
    names = {name: f"D{number}" for number, name in enumerate(topology.domains)}
    table = _plain_table(
        ("rank", "right"), ("device", "left"), ("model", "left"), ("memory", "right"), ("NUMA", "right"),
        ("domain", "left"), ("NVLinks", "right"), ("GB/s", "right"), ("NIC", "left"), ("Gb/s", "right"),
        ("path", "left"), ("rail", "right"),
    )  # fmt: skip
    for number in picture.in_order:
        device, gpu, nic = topology.devices[number], topology.gpu(number), topology.nic(number)
        host = topology.hosts[device.host]
        model = gpu.name.removeprefix("NVIDIA ") if gpu else f"{host.num_cpus} CPUs"
        memory = gpu.memory_bytes if gpu else host.memory_bytes
        table.add_row(
            str(picture.ranks.get(number, "")),
            topology.name(number),
            model,
            f"{memory / _GIB:.0f} GiB",
            str(gpu.numa_node) if gpu and gpu.numa_node >= 0 else "",
            names.get(device.domain, "-"),
            f"{gpu.num_nvlinks}/{gpu.max_nvlinks}" if gpu else "",
            f"{gpu.nvlink_gbps:.0f}" if gpu and gpu.nvlink_gbps else "",
            device.nic or "-",
            f"{nic.rate_bits_per_s / 1e9:.0f}" if nic else "",
            device.nic_distance,
            str(device.rail) if device.rail >= 0 else "",
        )
    return table


def _hosts(picture: Picture) -> Table:
    """A line for each host: equal parts of its devices are listed once."""
    topology = picture.topology
    table = _plain_table(
        ("ranks", "right"), ("host", "left"), ("devices", "left"), ("domains", "left"), ("NICs", "left"),
        ("path", "left"), ("rails", "left"),
    )  # fmt: skip
    names = {name: f"D{number}" for number, name in enumerate(topology.domains)}
    rows: dict[int, list[int]] = {}
    for number in picture.in_order:
        rows.setdefault(topology.devices[number].host, []).append(number)
    for host, numbers in rows.items():
        devices = [topology.devices[number] for number in numbers]
        gpus = [gpu for number in numbers if (gpu := topology.gpu(number)) is not None]
        model = gpus[0].name.removeprefix("NVIDIA ") if gpus else "CPU"
        table.add_row(
            span([picture.ranks[number] for number in numbers if number in picture.ranks]),
            topology.hosts[host].hostname,
            f"{len(numbers)} x {model}",
            ", ".join(dict.fromkeys(names.get(device.domain, "-") for device in devices)),
            ", ".join(dict.fromkeys(device.nic or "-" for device in devices)),
            ", ".join(dict.fromkeys(device.nic_distance for device in devices if device.nic)),
            span([device.rail for device in devices if device.rail >= 0]),
        )
    return table


def _letter(transport: str) -> str:
    return "-" if transport == "none" else transport[0].upper()


def _legend() -> str:
    named = [(kind.name, f" ({kind.about})" if kind.about else "") for kind in path_kinds()]
    words = ", ".join(f"{_letter(name)} {name}{about}" for name, about in [*named, ("none", "")])
    return f"{words}; GB/s in one direction; * = not in this release"


def _cell(reach: Reach) -> str:
    rate = f"{reach.gbps:.0f}" if reach.gbps else ""
    return f"{_letter(reach.transport)}{rate}{'*' if rate and not reach.served else ''}"


def _matrix(picture: Picture) -> Table:
    order = [number for number in picture.in_order if number in picture.ranks]
    table = _plain_table(("rank", "right"), *((str(picture.ranks[number]), "left") for number in order))
    for one in order:
        cells = ["." if one == other else _cell(picture.topology.reach(one, other)) for other in order]
        table.add_row(str(picture.ranks[one]), *cells)
    return table


def _kinds(found: dict[Reach, list[tuple[int, int]]]) -> Table:
    merged: dict[tuple[str, int, float, bool], list[tuple[int, int]]] = {}
    for reach, pairs in found.items():
        merged.setdefault((reach.transport, reach.hops, reach.gbps, reach.served), []).extend(pairs)
    table = _plain_table(
        ("pairs", "right"), ("by", "left"), ("hops", "right"), ("GB/s", "right"), ("this release", "left"), ("", "left")
    )
    for (transport, hops, gbps, served), pairs in merged.items():
        rate = f"{gbps:.0f}" if gbps else ""
        word = "yes" if served else "no"
        table.add_row(str(len(pairs)), transport, str(hops or ""), rate, word, _examples(pairs))
    return table


def _examples(pairs: list[tuple[int, int]]) -> str:
    words = ", ".join(f"{one}-{other}" for one, other in sorted(pairs)[:_SHOWN_PAIRS])
    return words + (", ..." if len(pairs) > _SHOWN_PAIRS else "")


def _why_off(found: dict[Reach, list[tuple[int, int]]]) -> Iterator[RenderableType]:
    reasons: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for reach, pairs in found.items():
        for reason in reach.off:
            reasons.setdefault(reason, []).extend(pairs)
    if reasons:
        yield Text("off, and why", style="bold")
        table = _plain_table(("transport", "left"), ("pairs", "right"), ("why", "left"), ("", "left"))
        for (transport, why), pairs in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]), item[0])):
            table.add_row(transport, str(len(pairs)), why, _examples(pairs))
        yield table


def _troubles(picture: Picture) -> Iterator[Text]:
    topology = picture.topology
    for name, number in zip(topology.domains, range(len(topology.domains)), strict=True):
        yield Text(f"D{number} = {name}", style="dim")
    for number in picture.in_order:
        gpu = topology.gpu(number)
        if gpu is not None and gpu_trouble(gpu):
            yield Text(f"{topology.name(number)}: {gpu_trouble(gpu)}", style="yellow")
        if (network := topology.devices[number].network) is not None:
            where = f"rank {picture.ranks[number]} on " if number in picture.ranks else ""
            words = f"network {network.provider} at {network.address}, domain {network.domain or 'unknown'}"
            words += f", {network.device}: {network.device_why}" if network.device else ""
            words += f", {network.boxes}" if network.boxes else ""
            yield Text(f"{where}{topology.name(number)}: {words}", style="dim")
    for host in topology.hosts:
        if not host.gpus:
            yield Text(f"{host.hostname}: {host.no_gpus_reason}", style="yellow")
