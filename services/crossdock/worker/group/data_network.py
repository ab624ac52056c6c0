"""The network of this worker: its config for the data plane, and what it registers of it."""

from __future__ import annotations

import os
from pathlib import Path

from crossdock.common import log
from crossdock.common.addresses import EVERY_INTERFACE, split_address
from crossdock.common.config import WorkerConfig
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.common.transports import cross_host_names, installed
from crossdock.protocol.v1 import topology_pb2
from ep_kernels import ConfigError
from ep_kernels.network import NetworkConfig, nics
from ep_kernels.network.nics import NicChoice
from ep_kernels.topology import HostFacts

_MOST_CHARS = 256
"""Most characters of a reason; the control plane takes no longer texts."""
_log = log.get(__name__)


def network_of(config: WorkerConfig) -> NetworkConfig | None:
    """The network as the data plane takes it; None: the group is one host.

    Raises:
        ConfigError: the transport cannot use a network, or a field that the data plane refuses.
    """
    if config.network is None:
        return None
    facts = installed().get(config.transport)
    if facts is None or not facts.cross_host:
        wanted = f"null, or transport {' or '.join(cross_host_names())}"
        got = f"provider {config.network.provider} with transport {config.transport}"
        raise ConfigError("worker.network", wanted, got)
    return NetworkConfig(**config.network.data_plane_fields())


def with_device(
    network: NetworkConfig | None, gpu: str, local_rank: int, facts: HostFacts | None = None
) -> tuple[NetworkConfig | None, NicChoice | None]:
    """`nics.resolved`, logged. (None, None): there is no network."""
    if network is None:
        return None, None
    made, choice = nics.resolved(network, gpu, local_rank, facts)
    if choice is not None:
        gid = choice.gid.gid if choice.gid else ""
        _log.info("network device", device=choice.nic.name, why=choice.why, gid=gid, gid_why=choice.gid_why)
    return made, choice


def announced(
    network: WorkerNetworkConfig | None,
    address: str,
    boot_id: str,
    choice: NicChoice | None = None,
    boxes: str = "",
) -> topology_pb2.Network | None:
    """What is registered at the control plane; None: this worker has no network.

    Args:
        address: host:port at which clients reach this worker; its host stands in for a data port that listens on every
            interface and is not advertised.
        choice: its RDMA port.
        boxes: of its GPU, in words.
    """
    if network is None:
        return None
    host, port = split_address(network.listen)
    host = network.advertise or (host if host not in EVERY_INTERFACE else split_address(address)[0])
    domain = network.domain or f"{boot_id}/{_pid_namespace()}/{os.geteuid()}"
    place = f"{_bracketed(host)}:{port or '*'}"
    device, why = (choice.nic.name, choice.why[:_MOST_CHARS]) if choice else ("", "")
    return topology_pb2.Network(
        provider=network.provider, address=place, domain=domain, device=device, device_why=why,
        boxes=boxes[:_MOST_CHARS],
    )  # fmt: skip


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _bracketed(host: str) -> str:
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]" if ":" in bare else bare
