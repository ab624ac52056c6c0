"""The transports as ways between two ranks, those that this release lacks included. Read from their facts, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from crossdock.common.transports import MEMORY, NETWORK, SOCKETS, WAYS, installed

UNBUILT = {NETWORK: "rdma"}
"""Ways that hardware may offer and this release has no transport for, by the name that it will have."""
TCP = "tcp"
"""Name of the way over SOCKETS."""


@dataclass(frozen=True, slots=True)
class Means:
    """A transport as far as this page needs to know it: `built` is False for one that this release does not have."""

    name: str
    over: str
    cross_host: bool
    built: bool = True
    about: str = ""


@cache
def means_of_transport() -> tuple[Means, ...]:
    """Every transport, those over the best way first; sockets come last."""
    found = [Means(one.name, one.over, one.cross_host, about=one.about) for one in installed().values()]
    used = {means.over for means in found}
    found += [Means(name, over, cross_host=True, built=False) for over, name in UNBUILT.items() if over not in used]
    found.sort(key=lambda means: WAYS.index(means.over))
    if any(means.over == MEMORY and means.cross_host for means in found):
        found.append(Means(TCP, SOCKETS, cross_host=True, about="sockets between hosts"))
    return tuple(found)
