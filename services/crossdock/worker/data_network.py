"""The network of this worker: its config for the data plane, and what others are told of it at registration."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from crossdock.common.addresses import EVERY_INTERFACE, split_address
from crossdock.common.config import WorkerConfig
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.common.transports import cross_host_names, installed
from crossdock.protocol.v1 import topology_pb2
from ep_kernels import ConfigError
from ep_kernels.network import NetworkConfig


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
    fields = msgspec.structs.asdict(config.network)
    return NetworkConfig(**{**fields, "advertise": _bracketed(config.network.advertise)})


def announced(network: WorkerNetworkConfig | None, address: str, boot_id: str) -> topology_pb2.Network | None:
    """What the control plane is told; None: this worker has no network.

    Args:
        network: of this worker.
        address: host:port at which clients reach this worker; its host stands in for a data port that listens on every
            interface and is not advertised.
        boot_id: of this host.
    """
    if network is None:
        return None
    host, port = split_address(network.listen)
    host = network.advertise or (host if host not in EVERY_INTERFACE else split_address(address)[0])
    domain = network.domain or f"{boot_id}/{_pid_namespace()}/{os.geteuid()}"
    return topology_pb2.Network(provider=network.provider, address=f"{_bracketed(host)}:{port or '*'}", domain=domain)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _bracketed(host: str) -> str:
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]" if ":" in bare else bare
