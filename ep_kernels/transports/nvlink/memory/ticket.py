"""The ticket of a rank's region: what the peers need to map it. One JSON object, so a field is as long as its value."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ep_kernels.errors import TransportError
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.topology import sysfs


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host of a rank.

    Attributes:
        name: ranks of equal names reach each other's processes and hand descriptors over; `own_host`.
        network: how ranks of other hosts reach it; None = they do not.
        boxes: the same for what its kernels send; None = ranks of other hosts map its region.
        shares: ranks of this host read what the network brings there, as its descriptor server lets them.
    """

    name: str
    network: NetworkTicket | None = None
    boxes: NetworkTicket | None = None
    shares: bool = False


class RegionTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer maps a region.

    Attributes:
        abi: what all ranks must have in common.
        kind: value of a `memory.HandleKind`.
        num_bytes: of the region.
        place: of its GPU; `links.pci_number`.
        server: address of the rank's descriptor server.
        host: where the rank runs.
    """

    abi: str
    kind: str
    num_bytes: int
    place: int
    server: bytes
    token: bytes
    host: Host

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def read(rank: int, raw: bytes) -> RegionTicket:
    """The ticket that a rank has published. Raises TransportError."""
    try:
        return msgspec.json.decode(raw, type=RegionTicket)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransportError(
            f"nvlink: rank {rank} has a ticket that cannot be read ({error}); use one version on all ranks"
        ) from error


def own_host() -> str:
    """With whom this process can exchange descriptors: one kernel, one network namespace, one user."""
    return f"{sysfs.boot_id()}/{Path('/proc/self/ns/net').stat().st_ino}/{os.geteuid()}"
