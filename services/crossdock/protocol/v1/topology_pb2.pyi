from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Gpu(_message.Message):
    __slots__ = ("index", "uuid", "name", "memory_bytes", "pci_bus_id", "numa_node", "nvlink_domain", "pcie_path", "pcie_gbps", "capability", "num_nvlinks", "max_nvlinks", "nvlink_gbps", "nvlink_switch", "fabric_state", "fabric_error", "fabric_cluster", "fabric_clique", "mig", "peers", "ecc_uncorrected", "held_back_by", "sm_mhz", "max_sm_mhz")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    NVLINK_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PCIE_PATH_FIELD_NUMBER: _ClassVar[int]
    PCIE_GBPS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NUM_NVLINKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NVLINKS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_GBPS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_SWITCH_FIELD_NUMBER: _ClassVar[int]
    FABRIC_STATE_FIELD_NUMBER: _ClassVar[int]
    FABRIC_ERROR_FIELD_NUMBER: _ClassVar[int]
    FABRIC_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    FABRIC_CLIQUE_FIELD_NUMBER: _ClassVar[int]
    MIG_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_BY_FIELD_NUMBER: _ClassVar[int]
    SM_MHZ_FIELD_NUMBER: _ClassVar[int]
    MAX_SM_MHZ_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci_bus_id: str
    numa_node: int
    nvlink_domain: str
    pcie_path: _containers.RepeatedScalarFieldContainer[str]
    pcie_gbps: float
    capability: str
    num_nvlinks: int
    max_nvlinks: int
    nvlink_gbps: float
    nvlink_switch: bool
    fabric_state: str
    fabric_error: str
    fabric_cluster: str
    fabric_clique: int
    mig: bool
    peers: _containers.RepeatedCompositeFieldContainer[GpuPeer]
    ecc_uncorrected: int
    held_back_by: _containers.RepeatedScalarFieldContainer[str]
    sm_mhz: int
    max_sm_mhz: int
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., pci_bus_id: _Optional[str] = ..., numa_node: _Optional[int] = ..., nvlink_domain: _Optional[str] = ..., pcie_path: _Optional[_Iterable[str]] = ..., pcie_gbps: _Optional[float] = ..., capability: _Optional[str] = ..., num_nvlinks: _Optional[int] = ..., max_nvlinks: _Optional[int] = ..., nvlink_gbps: _Optional[float] = ..., nvlink_switch: bool = ..., fabric_state: _Optional[str] = ..., fabric_error: _Optional[str] = ..., fabric_cluster: _Optional[str] = ..., fabric_clique: _Optional[int] = ..., mig: bool = ..., peers: _Optional[_Iterable[_Union[GpuPeer, _Mapping]]] = ..., ecc_uncorrected: _Optional[int] = ..., held_back_by: _Optional[_Iterable[str]] = ..., sm_mhz: _Optional[int] = ..., max_sm_mhz: _Optional[int] = ...) -> None: ...

class GpuPeer(_message.Message):
    __slots__ = ("index", "nvlink", "access", "num_links")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NVLINK_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    NUM_LINKS_FIELD_NUMBER: _ClassVar[int]
    index: int
    nvlink: str
    access: str
    num_links: int
    def __init__(self, index: _Optional[int] = ..., nvlink: _Optional[str] = ..., access: _Optional[str] = ..., num_links: _Optional[int] = ...) -> None: ...

class Nic(_message.Message):
    __slots__ = ("name", "link_layer", "state", "rate_bits_per_s", "numa_node", "pcie_path", "physical_state", "gids", "roce", "mtu_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RATE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    PCIE_PATH_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_STATE_FIELD_NUMBER: _ClassVar[int]
    GIDS_FIELD_NUMBER: _ClassVar[int]
    ROCE_FIELD_NUMBER: _ClassVar[int]
    MTU_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    link_layer: str
    state: str
    rate_bits_per_s: int
    numa_node: int
    pcie_path: _containers.RepeatedScalarFieldContainer[str]
    physical_state: str
    gids: _containers.RepeatedScalarFieldContainer[str]
    roce: str
    mtu_bytes: int
    def __init__(self, name: _Optional[str] = ..., link_layer: _Optional[str] = ..., state: _Optional[str] = ..., rate_bits_per_s: _Optional[int] = ..., numa_node: _Optional[int] = ..., pcie_path: _Optional[_Iterable[str]] = ..., physical_state: _Optional[str] = ..., gids: _Optional[_Iterable[str]] = ..., roce: _Optional[str] = ..., mtu_bytes: _Optional[int] = ...) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("hostname", "boot_id", "num_cpus", "memory_bytes", "numa_nodes", "gpus", "nics", "no_gpus_reason", "driver_version", "cuda_version", "machine")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    NO_GPUS_REASON_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUDA_VERSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    boot_id: str
    num_cpus: int
    memory_bytes: int
    numa_nodes: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    nics: _containers.RepeatedCompositeFieldContainer[Nic]
    no_gpus_reason: str
    driver_version: str
    cuda_version: str
    machine: str
    def __init__(self, hostname: _Optional[str] = ..., boot_id: _Optional[str] = ..., num_cpus: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., numa_nodes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., nics: _Optional[_Iterable[_Union[Nic, _Mapping]]] = ..., no_gpus_reason: _Optional[str] = ..., driver_version: _Optional[str] = ..., cuda_version: _Optional[str] = ..., machine: _Optional[str] = ...) -> None: ...

class Network(_message.Message):
    __slots__ = ("provider", "address", "domain", "device", "device_why", "boxes")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WHY_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    provider: str
    address: str
    domain: str
    device: str
    device_why: str
    boxes: str
    def __init__(self, provider: _Optional[str] = ..., address: _Optional[str] = ..., domain: _Optional[str] = ..., device: _Optional[str] = ..., device_why: _Optional[str] = ..., boxes: _Optional[str] = ...) -> None: ...
