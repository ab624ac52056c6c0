"""How rows reach ranks of other hosts. A network is a property of a peer, not a transport: see docs/network.md."""

from ep_kernels.network.network_config import NetworkConfig

__all__ = ["NetworkConfig"]
