from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Gpu(_message.Message):
    __slots__ = ("index", "uuid", "name", "memory_bytes", "pci_bus_id", "numa_node", "nvlink_domain")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    NVLINK_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci_bus_id: str
    numa_node: int
    nvlink_domain: str
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., pci_bus_id: _Optional[str] = ..., numa_node: _Optional[int] = ..., nvlink_domain: _Optional[str] = ...) -> None: ...

class Nic(_message.Message):
    __slots__ = ("name", "link_layer", "state", "rate_bits_per_s", "numa_node")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RATE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    link_layer: str
    state: str
    rate_bits_per_s: int
    numa_node: int
    def __init__(self, name: _Optional[str] = ..., link_layer: _Optional[str] = ..., state: _Optional[str] = ..., rate_bits_per_s: _Optional[int] = ..., numa_node: _Optional[int] = ...) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("hostname", "boot_id", "num_cpus", "memory_bytes", "numa_nodes", "gpus", "nics")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    boot_id: str
    num_cpus: int
    memory_bytes: int
    numa_nodes: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    nics: _containers.RepeatedCompositeFieldContainer[Nic]
    def __init__(self, hostname: _Optional[str] = ..., boot_id: _Optional[str] = ..., num_cpus: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., numa_nodes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., nics: _Optional[_Iterable[_Union[Nic, _Mapping]]] = ...) -> None: ...
