"""A topology as a picture: SVG that any browser shows, DOT for Graphviz. No I/O.

The SVG has a box for each host. Inside it a square for each GPU, with its rank, filled in the colour of its NVLink
domain; below it its NIC, joined by a line that is the thicker the nearer the NIC is.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from crossdock.common.plural import counted
from crossdock.control.topology.discovery import CPU, WORDS, Device
from crossdock.topo.sources import Picture

_COLOURS = ("#7fb3d5", "#f5b041", "#82c99a", "#d98880", "#bb9fd6", "#8fd3d1", "#f1a7c3", "#c0ca75")
_NONE = "#d5d8dc"
_SQUARE, _GAP, _PAD, _TITLE, _NIC, _DROP = 56, 12, 16, 26, 22, 34
_MOST_WIDTH = 1180
_LINE, _HEAD = 18, 54


def as_svg(picture: Picture) -> str:
    """The picture; its size follows from the number of hosts and GPUs."""
    hosts = [_devices_of(picture, number) for number in range(len(picture.topology.hosts))]
    widest = max((len(devices) for devices in hosts), default=1)
    width = 2 * _PAD + widest * (_SQUARE + _GAP) - _GAP
    height = _TITLE + _SQUARE + _DROP + _NIC + 2 * _PAD
    columns = max(1, min(len(hosts), _MOST_WIDTH // (width + _GAP)))
    rows = -(-len(hosts) // columns)
    legend = list(_legend(picture))
    full_width = max(640, columns * (width + _GAP) + _GAP)
    full_height = _HEAD + rows * (height + _GAP) + len(legend) * _LINE + 2 * _PAD
    body = [
        f'<svg xmlns="{_NAMESPACE}" width="{full_width}" height="{full_height}" font-family="sans-serif">',
        f'<rect width="{full_width}" height="{full_height}" fill="white"/>',
        f'<text x="{_GAP}" y="24" font-size="16" font-weight="bold">{escape(_headline(picture))}</text>',
        f'<text x="{_GAP}" y="42" font-size="12" fill="#666">{escape(picture.title)}</text>',
    ]
    for number, devices in enumerate(hosts):
        x = _GAP + number % columns * (width + _GAP)
        y = _HEAD + number // columns * (height + _GAP)
        body += _host(picture, number, devices, (x, y, width, height))
    for line, (colour, words) in enumerate(legend):
        y = _HEAD + rows * (height + _GAP) + _PAD + line * _LINE
        body.append(f'<rect x="{_GAP}" y="{y - 10}" width="12" height="12" fill="{colour}" stroke="#555"/>')
        body.append(f'<text x="{_GAP + 20}" y="{y}" font-size="12">{escape(words)}</text>')
    return "\n".join([*body, "</svg>"]) + "\n"


def as_dot(picture: Picture) -> str:
    """A graph for Graphviz: hosts as clusters, GPUs and NICs as nodes, NVLink domains and rails as hubs."""
    topology = picture.topology
    lines = ["graph crossdock {", "  rankdir=LR; node [shape=box, style=filled, fillcolor=white];"]
    for number, host in enumerate(topology.hosts):
        lines.append(f"  subgraph cluster_{number} {{ label={_quote(host.hostname)};")
        for device, found in _devices_of(picture, number):
            label = _label(picture, device, found).replace("\n", "\\n")
            lines.append(f'    d{device} [label="{label}", fillcolor="{_colour(picture, found.domain)}"];')
            if found.nic:
                nic = _quote(f"{host.hostname} {found.nic}")
                lines.append(f"    {nic} [label={_quote(found.nic)}, shape=ellipse];")
                lines.append(f"    d{device} -- {nic} [label={_quote(found.nic_distance)}];")
        lines.append("  }")
    for name, members in topology.domains.items():
        gpu = topology.gpu(members[0])
        rate = f"\\n{gpu.nvlink_gbps:.0f} GB/s" if gpu and gpu.nvlink_gbps else ""
        hub = f"NVLink domain\\n{name}{rate}"
        colour = _colour(picture, name)
        lines.append(f'  {_quote("domain " + name)} [label="{hub}", shape=hexagon, fillcolor="{colour}"];')
        lines += [f"  d{member} -- {_quote('domain ' + name)};" for member in members]
    rails = {(topology.hosts[one.host].hostname, one.nic, one.rail): None for one in topology.devices if one.rail >= 0}
    for hostname, name, rail in rails:
        lines.append(f'  {_quote(f"{hostname} {name}")} -- "rail {rail}" [style=dashed];')
    return "\n".join([*lines, "}"]) + "\n"


_NAMESPACE = "http://www.w3.org/2000/svg"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _devices_of(picture: Picture, host: int) -> list[tuple[int, Device]]:
    return [(number, device) for number, device in enumerate(picture.topology.devices) if device.host == host]


def _colour(picture: Picture, domain: str) -> str:
    names = list(picture.topology.domains)
    return _COLOURS[names.index(domain) % len(_COLOURS)] if domain in names else _NONE


def _label(picture: Picture, number: int, device: Device) -> str:
    rank = picture.ranks.get(number)
    what = "CPU" if device.gpu == CPU else f"GPU {device.gpu}"
    return what if rank is None else f"rank {rank}\n{what}"


def _headline(picture: Picture) -> str:
    topology = picture.topology
    gpu = next((topology.gpu(number) for number in range(len(topology.devices)) if topology.gpu(number)), None)
    model = f" x {gpu.name.removeprefix('NVIDIA ')}" if gpu else ""
    gpus = sum(device.gpu != CPU for device in topology.devices)
    domains = counted(len(topology.domains), "NVLink domain")
    return f"{counted(len(topology.hosts), 'host')}, {gpus}{model or ' GPUs'}, {domains}"


def _legend(picture: Picture) -> Iterator[tuple[str, str]]:
    topology = picture.topology
    for name, members in topology.domains.items():
        gpu = topology.gpu(members[0])
        rate = f", {gpu.nvlink_gbps:.0f} GB/s out of each" if gpu and gpu.nvlink_gbps else ""
        yield _colour(picture, name), f"NVLink domain {name}: {len(members)} GPUs{rate}"
    reasons: dict[str, list[str]] = {}
    for number, device in enumerate(topology.devices):
        if not device.domain:
            reasons.setdefault(device.no_domain, []).append(topology.name(number))
    for reason, names in reasons.items():
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        yield _NONE, f"no NVLink domain: {shown}: {reason}"


def _host(
    picture: Picture, number: int, devices: list[tuple[int, Device]], box: tuple[int, int, int, int]
) -> Iterator[str]:
    x, y, width, height = box
    host = picture.topology.hosts[number]
    rack = picture.topology.labels[number].rack
    title = host.hostname + (f"  rack {rack}" if rack else "")
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f8f9f9" stroke="#999"/>'
    yield f'<text x="{x + _PAD}" y="{y + 18}" font-size="13" font-weight="bold">{escape(title)}</text>'
    nics: dict[str, int] = {}
    top = y + _TITLE + 4
    for place, (device, found) in enumerate(devices):
        left = x + _PAD + place * (_SQUARE + _GAP)
        colour = _colour(picture, found.domain)
        yield f'<rect x="{left}" y="{top}" width="{_SQUARE}" height="{_SQUARE}" rx="4" fill="{colour}" stroke="#555"/>'
        for line, text in enumerate(_label(picture, device, found).split("\n")):
            weight = ' font-weight="bold"' if line == 0 else ""
            yield _centred(left + _SQUARE // 2, top + 25 + 16 * line, text, 12, weight)
        if found.nic:
            first = found.nic not in nics
            column = nics.setdefault(found.nic, left + _SQUARE // 2)
            yield from _nic_of(found, left + _SQUARE // 2, column, top + _SQUARE, first=first)


def _nic_of(device: Device, x: int, nic_x: int, y: int, *, first: bool) -> Iterator[str]:
    near = WORDS.index(device.nic_distance) if device.nic_distance else len(WORDS)
    thick = max(1, 5 - near)
    yield f'<line x1="{x}" y1="{y}" x2="{nic_x}" y2="{y + _DROP}" stroke="#555" stroke-width="{thick}"/>'
    yield _centred(x + 15, y + 20, device.nic_distance, 9, ' fill="#666"')
    if first:
        left, top, width = nic_x - _SQUARE // 2, y + _DROP, _SQUARE
        yield f'<rect x="{left}" y="{top}" width="{width}" height="{_NIC}" rx="9" fill="white" stroke="#555"/>'
        yield _centred(nic_x, top + 14, device.nic.partition("/")[0], 10)


def _centred(x: int, y: int, text: str, size: int, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle"{extra}>{escape(text)}</text>'
