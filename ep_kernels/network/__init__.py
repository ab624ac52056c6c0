"""How rows reach ranks of other hosts. A network belongs to a peer, it is no transport (docs/network-protocol.md)."""

from ep_kernels.network.network_config import NetworkConfig

__all__ = ["NetworkConfig"]
