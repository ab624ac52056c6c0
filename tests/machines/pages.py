"""Writes docs/topology: what `crossdock topo` shows of the hosts on paper, and of real ones whose facts were kept.
`python -m tests.machines.pages`; a test compares."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from rich.console import Console

from crossdock.topo import listing, picture, sources
from crossdock.topo.facts import host_facts
from ep_kernels.topology import probe
from tests.machines.kinds import KINDS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "topology"
RECORDED = {"h200x2": "a virtual machine, as it was"}
"""Facts of real hosts, by `crossdock topo --facts`, in <name>.json; title."""
_WIDTH = 160


def recorded(name: str) -> sources.Picture:
    """The topology of a real host."""
    return sources.of_hosts(sources.read_facts([Path(__file__).with_name(f"{name}.json")]), None, RECORDED[name])


def shown(kind: str, folder: Path) -> sources.Picture:
    """The topology of one kind of hosts."""
    make, count = KINDS[kind]
    hosts = [host_facts(facts=probe(*make(number).write(folder / kind))) for number in range(count)]
    for host in hosts:
        host.num_cpus, host.machine = 224, "x86_64"  # the one thing that is of the host that runs this
    return sources.of_hosts(hosts, None, f"{count} of kind {kind}, on paper")


def pages(folder: Path) -> dict[str, str]:
    """File name -> text."""
    found = {}
    for kind in [*KINDS, *RECORDED]:
        topology = recorded(kind) if kind in RECORDED else shown(kind, folder)
        out = io.StringIO()
        Console(file=out, width=_WIDTH).print(listing.as_tables(topology))
        found[f"{kind}.txt"] = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
        found[f"{kind}.svg"] = picture.as_svg(topology)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in pages(Path(scratch)).items():
            (PAGES / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/topology/{name}")
