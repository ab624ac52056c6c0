"""Where `crossdock topo` takes its facts from: this host, files written before, or the members of a live group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from google.protobuf import json_format

from crossdock.common.config import ConfigFileError
from crossdock.common.control_channel import ask_leader
from crossdock.common.security import Security
from crossdock.control.group.ranks import NetworkPlace, Place, assign_ranks
from crossdock.control.topology.discovery import CPU, Device, Labels, Topology, join
from crossdock.protocol.v1 import control_pb2, topology_pb2

FACTS = "crossdock-host-facts"
"""Key that identifies a file of facts among other JSON."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A topology and its ranks.

    Attributes:
        topology: hosts, joined.
        ranks: device -> rank, those that have one; by what a fresh group would get, or as the live group has them.
        title: where the facts come from.
    """

    topology: Topology
    ranks: Mapping[int, int]
    title: str

    @property
    def in_order(self) -> list[int]:
        """Devices by rank; those without one last."""
        count = len(self.topology.devices)
        return sorted(range(count), key=lambda device: (self.ranks.get(device, count), device))


def of_hosts(hosts: Sequence[topology_pb2.HostFacts], labels: Mapping[str, Labels] | None, title: str) -> Picture:
    """The ranks that a fresh group with one worker on each GPU would get; a host without GPUs has one worker."""
    topology = join(hosts, labels)
    local: dict[int, int] = {}
    places = []
    for number, device in enumerate(topology.devices):
        rank_here = local.setdefault(device.host, 0)
        local[device.host] += 1
        host = hosts[device.host]
        area = topology.labels[device.host].area
        places.append(Place(str(number), host.hostname, rank_here, device.domain, device.rail, area))
    ranks = assign_ranks(places)
    return Picture(topology, {int(uid): rank for uid, rank in ranks.items()}, title)


def of_group(target: str, timeout_s: float, security: Security | None = None) -> Picture:
    """The members of the group at `target` with the ranks that they have. Raises CallError."""
    answer = ask_leader(target, security, "Topology", control_pb2.TopologyRequest(), timeout_s)
    return of_response(answer, target)


def of_response(answer: control_pb2.TopologyResponse, target: str) -> Picture:
    """A live group's topology. Several workers of one CPU host are one device, named by the lowest rank there; those of
    several domains (`worker.network.domain`) are one for each."""
    labels = {
        label.hostname: Labels(label.clique, label.product, label.zone, label.block, label.rack)
        for label in answer.labels
    }
    topology = join(answer.hosts, labels)
    numbers = {(device.host, device.gpu): number for number, device in enumerate(topology.devices)}
    seated: dict[tuple[int, str], tuple[int, Device]] = {}
    for seat in answer.seats:
        number = numbers.get((seat.host, seat.gpu if seat.on_gpu else CPU))
        if number is not None:
            device = replace(topology.devices[number], network=_network(seat))
            seated.setdefault((number, seat.network.domain), (seat.rank, device))
    kept = [seated[key] for key in sorted(seated)]
    shown = replace(topology, devices=tuple(device for _, device in kept))
    title = f"group at {target}, epoch {answer.epoch}, {len(answer.seats)}/{answer.world_size} ranks"
    return Picture(shown, {number: rank for number, (rank, _) in enumerate(kept)}, title)


def _network(seat: control_pb2.Seat) -> NetworkPlace | None:
    if not seat.HasField("network"):
        return None
    return NetworkPlace(*(getattr(seat.network, field.name) for field in fields(NetworkPlace)))


def write_facts(host: topology_pb2.HostFacts) -> str:
    """The JSON text of one host's facts, for `read_facts` on another host."""
    return json.dumps({FACTS: 1, "host": json_format.MessageToDict(host, preserving_proto_field_name=True)}, indent=1)


def read_facts(paths: Sequence[Path]) -> list[topology_pb2.HostFacts]:
    """Facts of hosts from files that `write_facts` made. Raises ConfigFileError naming the file."""
    hosts = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get(FACTS) != 1 or "host" not in data:
                raise ValueError("expected a file of `crossdock topo --facts`, got other JSON")
            hosts.append(json_format.ParseDict(data["host"], topology_pb2.HostFacts(), ignore_unknown_fields=True))
        except OSError as error:
            raise ConfigFileError(f"{path}: {error.strerror or error}") from error
        except (ValueError, json_format.ParseError) as error:
            raise ConfigFileError(f"{path}: {error}") from error
    return hosts
