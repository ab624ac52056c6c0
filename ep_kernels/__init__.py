"""Crossdock's data plane: move each token to its experts (dispatch) and return the weighted results (combine).

Knows torch; knows nothing of gRPC, Kubernetes or Prometheus, reads no environment, and runs under plain torchrun.
Importing it does nothing but define names.
"""

from ep_kernels.communicator import MoECommunicator
from ep_kernels.config import Group, MoEConfig
from ep_kernels.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    ClosedError,
    ConfigError,
    EpError,
    HandleError,
    PeerTimeout,
    TransportError,
)
from ep_kernels.groups import StoreGroup, TorchGroup
from ep_kernels.network import NetworkConfig
from ep_kernels.requests import CombineRequest, DispatchRequest
from ep_kernels.routing import ExpertMap
from ep_kernels.types import (
    Capabilities,
    CombineOrder,
    DispatchHandle,
    DispatchOutput,
    LatencySample,
    Layout,
    Mode,
    Overflow,
    PeerTraffic,
    ScaleFormat,
)

__all__ = [
    "AbortedError",
    "ArgumentError",
    "Capabilities",
    "CapacityError",
    "ClosedError",
    "CombineOrder",
    "CombineRequest",
    "ConfigError",
    "DispatchHandle",
    "DispatchOutput",
    "DispatchRequest",
    "EpError",
    "ExpertMap",
    "Group",
    "HandleError",
    "LatencySample",
    "Layout",
    "MoECommunicator",
    "MoEConfig",
    "Mode",
    "NetworkConfig",
    "Overflow",
    "PeerTimeout",
    "PeerTraffic",
    "ScaleFormat",
    "StoreGroup",
    "TorchGroup",
    "TransportError",
]
