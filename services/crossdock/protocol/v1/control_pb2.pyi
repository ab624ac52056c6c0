from crossdock.protocol.v1 import topology_pb2 as _topology_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    FORMING: _ClassVar[GroupState]
    EXCHANGING: _ClassVar[GroupState]
    SERVING: _ClassVar[GroupState]

class VerdictKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_KIND_UNSPECIFIED: _ClassVar[VerdictKind]
    NOTHING: _ClassVar[VerdictKind]
    SLOW_RANK: _ClassVar[VerdictKind]
    SLOW_HOST: _ClassVar[VerdictKind]
    SLOW_LINK: _ClassVar[VerdictKind]
    HOT_EXPERT: _ClassVar[VerdictKind]
    SKEWED_ROUTING: _ClassVar[VerdictKind]
    UNIFORM_SLOWNESS: _ClassVar[VerdictKind]
GROUP_STATE_UNSPECIFIED: GroupState
FORMING: GroupState
EXCHANGING: GroupState
SERVING: GroupState
VERDICT_KIND_UNSPECIFIED: VerdictKind
NOTHING: VerdictKind
SLOW_RANK: VerdictKind
SLOW_HOST: VerdictKind
SLOW_LINK: VerdictKind
HOT_EXPERT: VerdictKind
SKEWED_ROUTING: VerdictKind
UNIFORM_SLOWNESS: VerdictKind

class WorkerId(_message.Message):
    __slots__ = ("uid", "incarnation")
    UID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    uid: str
    incarnation: int
    def __init__(self, uid: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PriorMembership(_message.Message):
    __slots__ = ("epoch", "rank", "region", "ready", "active_ranks", "world_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    region: bytes
    ready: bool
    active_ranks: _containers.RepeatedScalarFieldContainer[int]
    world_size: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., region: _Optional[bytes] = ..., ready: bool = ..., active_ranks: _Optional[_Iterable[int]] = ..., world_size: _Optional[int] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("workers", "version")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    workers: int
    version: int
    def __init__(self, workers: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "host", "local_rank", "address", "http_address", "transport", "abi", "model", "prior", "gpu_uuid", "num_experts", "moe_layers", "https", "network", "barred", "communicator", "checkpoints", "wanted", "holder")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ABI_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HTTPS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    host: _topology_pb2.HostFacts
    local_rank: int
    address: str
    http_address: str
    transport: str
    abi: str
    model: str
    prior: PriorMembership
    gpu_uuid: str
    num_experts: int
    moe_layers: _containers.RepeatedScalarFieldContainer[int]
    https: bool
    network: _topology_pb2.Network
    barred: Barred
    communicator: _containers.RepeatedCompositeFieldContainer[CommunicatorSetting]
    checkpoints: Checkpoints
    wanted: Wanted
    holder: Holder
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., host: _Optional[_Union[_topology_pb2.HostFacts, _Mapping]] = ..., local_rank: _Optional[int] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., transport: _Optional[str] = ..., abi: _Optional[str] = ..., model: _Optional[str] = ..., prior: _Optional[_Union[PriorMembership, _Mapping]] = ..., gpu_uuid: _Optional[str] = ..., num_experts: _Optional[int] = ..., moe_layers: _Optional[_Iterable[int]] = ..., https: bool = ..., network: _Optional[_Union[_topology_pb2.Network, _Mapping]] = ..., barred: _Optional[_Union[Barred, _Mapping]] = ..., communicator: _Optional[_Iterable[_Union[CommunicatorSetting, _Mapping]]] = ..., checkpoints: _Optional[_Union[Checkpoints, _Mapping]] = ..., wanted: _Optional[_Union[Wanted, _Mapping]] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("port", "socket", "host", "address")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    port: int
    socket: str
    host: str
    address: str
    def __init__(self, port: _Optional[int] = ..., socket: _Optional[str] = ..., host: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class CheckpointRef(_message.Message):
    __slots__ = ("number", "path", "fingerprint")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: str
    fingerprint: str
    def __init__(self, number: _Optional[int] = ..., path: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Checkpoints(_message.Message):
    __slots__ = ("version", "settled", "wanted", "refs")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    version: int
    settled: int
    wanted: int
    refs: _containers.RepeatedCompositeFieldContainer[CheckpointRef]
    def __init__(self, version: _Optional[int] = ..., settled: _Optional[int] = ..., wanted: _Optional[int] = ..., refs: _Optional[_Iterable[_Union[CheckpointRef, _Mapping]]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("path", "fingerprint")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    path: str
    fingerprint: str
    def __init__(self, path: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("version", "number", "layers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    number: int
    layers: int
    def __init__(self, version: _Optional[int] = ..., number: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class CommunicatorSetting(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Barred(_message.Message):
    __slots__ = ("uid", "hostname", "cause", "reason", "left_s", "drain", "told_by")
    UID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TOLD_BY_FIELD_NUMBER: _ClassVar[int]
    uid: str
    hostname: str
    cause: str
    reason: str
    left_s: float
    drain: bool
    told_by: int
    def __init__(self, uid: _Optional[str] = ..., hostname: _Optional[str] = ..., cause: _Optional[str] = ..., reason: _Optional[str] = ..., left_s: _Optional[float] = ..., drain: bool = ..., told_by: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch", "lease_s", "barred")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_s: float
    barred: Barred
    def __init__(self, epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., barred: _Optional[_Union[Barred, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("worker", "brief", "table_once", "latency")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    TABLE_ONCE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    brief: bool
    table_once: bool
    latency: bool
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., brief: bool = ..., table_once: bool = ..., latency: bool = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "worker", "hostname", "address", "http_address", "region", "ready", "heartbeat_age_s", "stats", "https", "network", "sick")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HTTPS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    SICK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    worker: WorkerId
    hostname: str
    address: str
    http_address: str
    region: bytes
    ready: bool
    heartbeat_age_s: float
    stats: WorkerStats
    https: bool
    network: _topology_pb2.Network
    sick: str
    def __init__(self, rank: _Optional[int] = ..., worker: _Optional[_Union[WorkerId, _Mapping]] = ..., hostname: _Optional[str] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., region: _Optional[bytes] = ..., ready: bool = ..., heartbeat_age_s: _Optional[float] = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ..., https: bool = ..., network: _Optional[_Union[_topology_pb2.Network, _Mapping]] = ..., sick: _Optional[str] = ...) -> None: ...

class GroupView(_message.Message):
    __slots__ = ("epoch", "state", "world_size", "members", "reason", "lost_ranks", "version", "model", "broken_ranks", "num_members", "term", "placement", "active_ranks", "barred", "verdict", "wanted", "next_placement", "follows_workers", "scaling")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_RANKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BROKEN_RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    state: GroupState
    world_size: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    reason: str
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    version: int
    model: str
    broken_ranks: _containers.RepeatedScalarFieldContainer[int]
    num_members: int
    term: int
    placement: int
    active_ranks: _containers.RepeatedScalarFieldContainer[int]
    barred: _containers.RepeatedCompositeFieldContainer[Barred]
    verdict: Verdict
    wanted: Wanted
    next_placement: int
    follows_workers: bool
    scaling: str
    def __init__(self, epoch: _Optional[int] = ..., state: _Optional[_Union[GroupState, str]] = ..., world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., reason: _Optional[str] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., model: _Optional[str] = ..., broken_ranks: _Optional[_Iterable[int]] = ..., num_members: _Optional[int] = ..., term: _Optional[int] = ..., placement: _Optional[int] = ..., active_ranks: _Optional[_Iterable[int]] = ..., barred: _Optional[_Iterable[_Union[Barred, _Mapping]]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., wanted: _Optional[_Union[Wanted, _Mapping]] = ..., next_placement: _Optional[int] = ..., follows_workers: bool = ..., scaling: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("workers", "world_size")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    workers: int
    world_size: int
    def __init__(self, workers: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class PublishRegionRequest(_message.Message):
    __slots__ = ("worker", "epoch", "region")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    epoch: int
    region: bytes
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., epoch: _Optional[int] = ..., region: _Optional[bytes] = ...) -> None: ...

class PublishRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("worker", "epoch", "placement")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    epoch: int
    placement: int
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., epoch: _Optional[int] = ..., placement: _Optional[int] = ...) -> None: ...

class ReadyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("tokens_total", "requests_total", "steps_total", "tokens_per_s", "queued_requests", "first_expert", "num_experts", "expert_bytes", "streams", "request_connections", "models", "weights", "scattered", "latency")
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_EXPERT_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCATTERED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    tokens_total: int
    requests_total: int
    steps_total: int
    tokens_per_s: float
    queued_requests: int
    first_expert: int
    num_experts: int
    expert_bytes: int
    streams: int
    request_connections: int
    models: _containers.RepeatedCompositeFieldContainer[HeldModel]
    weights: str
    scattered: bool
    latency: LatencyReport
    def __init__(self, tokens_total: _Optional[int] = ..., requests_total: _Optional[int] = ..., steps_total: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., queued_requests: _Optional[int] = ..., first_expert: _Optional[int] = ..., num_experts: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., streams: _Optional[int] = ..., request_connections: _Optional[int] = ..., models: _Optional[_Iterable[_Union[HeldModel, _Mapping]]] = ..., weights: _Optional[str] = ..., scattered: bool = ..., latency: _Optional[_Union[LatencyReport, _Mapping]] = ...) -> None: ...

class HeldModel(_message.Message):
    __slots__ = ("fingerprint", "layers")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    layers: int
    def __init__(self, fingerprint: _Optional[str] = ..., layers: _Optional[int] = ...) -> None: ...

class LatencyReport(_message.Message):
    __slots__ = ("interval_s", "steps", "step_s", "experts_s", "tokens", "rows", "hot_expert", "hot_rows", "operations")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    HOT_EXPERT_FIELD_NUMBER: _ClassVar[int]
    HOT_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    steps: int
    step_s: float
    experts_s: float
    tokens: int
    rows: int
    hot_expert: int
    hot_rows: int
    operations: _containers.RepeatedCompositeFieldContainer[OperationLatency]
    def __init__(self, interval_s: _Optional[float] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., experts_s: _Optional[float] = ..., tokens: _Optional[int] = ..., rows: _Optional[int] = ..., hot_expert: _Optional[int] = ..., hot_rows: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[OperationLatency, _Mapping]]] = ...) -> None: ...

class OperationLatency(_message.Message):
    __slots__ = ("op", "count", "p50_s", "p99_s", "late_s", "wait_s")
    OP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    op: str
    count: int
    p50_s: float
    p99_s: float
    late_s: _containers.RepeatedScalarFieldContainer[float]
    wait_s: float
    def __init__(self, op: _Optional[str] = ..., count: _Optional[int] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ..., late_s: _Optional[_Iterable[float]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("kind", "ranks", "hosts", "expert", "confidence", "lost_share", "text", "age_s", "interval_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    kind: VerdictKind
    ranks: _containers.RepeatedScalarFieldContainer[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    expert: int
    confidence: float
    lost_share: float
    text: str
    age_s: float
    interval_s: float
    def __init__(self, kind: _Optional[_Union[VerdictKind, str]] = ..., ranks: _Optional[_Iterable[int]] = ..., hosts: _Optional[_Iterable[str]] = ..., expert: _Optional[int] = ..., confidence: _Optional[float] = ..., lost_share: _Optional[float] = ..., text: _Optional[str] = ..., age_s: _Optional[float] = ..., interval_s: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "epoch", "silent_ranks", "fault", "stats", "experts", "loaded", "prepared", "leaving", "unprepared", "postmortem")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SILENT_RANKS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    UNPREPARED_FIELD_NUMBER: _ClassVar[int]
    POSTMORTEM_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    epoch: int
    silent_ranks: _containers.RepeatedScalarFieldContainer[int]
    fault: str
    stats: WorkerStats
    experts: ExpertReport
    loaded: bool
    prepared: int
    leaving: bool
    unprepared: str
    postmortem: str
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., epoch: _Optional[int] = ..., silent_ranks: _Optional[_Iterable[int]] = ..., fault: _Optional[str] = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ..., experts: _Optional[_Union[ExpertReport, _Mapping]] = ..., loaded: bool = ..., prepared: _Optional[int] = ..., leaving: bool = ..., unprepared: _Optional[str] = ..., postmortem: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("epoch", "barred")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    barred: Barred
    def __init__(self, epoch: _Optional[int] = ..., barred: _Optional[_Union[Barred, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    reason: str
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Seat(_message.Message):
    __slots__ = ("rank", "uid", "host", "gpu", "on_gpu", "network")
    RANK_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    uid: str
    host: int
    gpu: int
    on_gpu: bool
    network: _topology_pb2.Network
    def __init__(self, rank: _Optional[int] = ..., uid: _Optional[str] = ..., host: _Optional[int] = ..., gpu: _Optional[int] = ..., on_gpu: bool = ..., network: _Optional[_Union[_topology_pb2.Network, _Mapping]] = ...) -> None: ...

class NodeLabels(_message.Message):
    __slots__ = ("hostname", "clique", "product", "zone", "block", "rack")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    CLIQUE_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    clique: str
    product: str
    zone: str
    block: str
    rack: str
    def __init__(self, hostname: _Optional[str] = ..., clique: _Optional[str] = ..., product: _Optional[str] = ..., zone: _Optional[str] = ..., block: _Optional[str] = ..., rack: _Optional[str] = ...) -> None: ...

class TopologyResponse(_message.Message):
    __slots__ = ("hosts", "seats", "labels", "epoch", "world_size")
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[_topology_pb2.HostFacts]
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    labels: _containers.RepeatedCompositeFieldContainer[NodeLabels]
    epoch: int
    world_size: int
    def __init__(self, hosts: _Optional[_Iterable[_Union[_topology_pb2.HostFacts, _Mapping]]] = ..., seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., labels: _Optional[_Iterable[_Union[NodeLabels, _Mapping]]] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class ExpertReport(_message.Message):
    __slots__ = ("version", "switched", "to_switch", "error", "layers", "checkpoints")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    TO_SWITCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    switched: int
    to_switch: int
    error: str
    layers: _containers.RepeatedCompositeFieldContainer[HeldExperts]
    checkpoints: Checkpoints
    def __init__(self, version: _Optional[int] = ..., switched: _Optional[int] = ..., to_switch: _Optional[int] = ..., error: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[HeldExperts, _Mapping]]] = ..., checkpoints: _Optional[_Union[Checkpoints, _Mapping]] = ...) -> None: ...

class HeldExperts(_message.Message):
    __slots__ = ("experts", "rows", "checkpoint")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    checkpoint: int
    def __init__(self, experts: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., checkpoint: _Optional[int] = ...) -> None: ...

class PlacementRequest(_message.Message):
    __slots__ = ("epoch", "next_of")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_OF_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_of: WorkerId
    def __init__(self, epoch: _Optional[int] = ..., next_of: _Optional[_Union[WorkerId, _Mapping]] = ...) -> None: ...

class PlacementResponse(_message.Message):
    __slots__ = ("version", "layers", "num_slots", "checkpoints", "world_size", "rank", "holders")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    num_slots: int
    checkpoints: Checkpoints
    world_size: int
    rank: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, version: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ..., num_slots: _Optional[int] = ..., checkpoints: _Optional[_Union[Checkpoints, _Mapping]] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("experts", "checkpoint")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    checkpoint: int
    def __init__(self, experts: _Optional[_Iterable[int]] = ..., checkpoint: _Optional[int] = ...) -> None: ...

class ExpertsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpertsResponse(_message.Message):
    __slots__ = ("version", "num_experts", "num_slots", "world_size", "layers", "last_change", "layers_moving", "layers_switched", "imbalance", "imbalance_if_moved", "would_move", "rank_loads", "domains", "checkpoints", "domain_imbalance")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_MOVING_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SWITCHED_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_IF_MOVED_FIELD_NUMBER: _ClassVar[int]
    WOULD_MOVE_FIELD_NUMBER: _ClassVar[int]
    RANK_LOADS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_experts: int
    num_slots: int
    world_size: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    last_change: str
    layers_moving: int
    layers_switched: int
    imbalance: float
    imbalance_if_moved: float
    would_move: int
    rank_loads: _containers.RepeatedScalarFieldContainer[float]
    domains: _containers.RepeatedScalarFieldContainer[int]
    checkpoints: Checkpoints
    domain_imbalance: float
    def __init__(self, version: _Optional[int] = ..., num_experts: _Optional[int] = ..., num_slots: _Optional[int] = ..., world_size: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., last_change: _Optional[str] = ..., layers_moving: _Optional[int] = ..., layers_switched: _Optional[int] = ..., imbalance: _Optional[float] = ..., imbalance_if_moved: _Optional[float] = ..., would_move: _Optional[int] = ..., rank_loads: _Optional[_Iterable[float]] = ..., domains: _Optional[_Iterable[int]] = ..., checkpoints: _Optional[_Union[Checkpoints, _Mapping]] = ..., domain_imbalance: _Optional[float] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "slots", "load", "imbalance", "imbalance_if_moved", "slots_if_moved")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_IF_MOVED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IF_MOVED_FIELD_NUMBER: _ClassVar[int]
    layer: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    load: _containers.RepeatedScalarFieldContainer[float]
    imbalance: float
    imbalance_if_moved: float
    slots_if_moved: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., load: _Optional[_Iterable[float]] = ..., imbalance: _Optional[float] = ..., imbalance_if_moved: _Optional[float] = ..., slots_if_moved: _Optional[_Iterable[int]] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("version", "moves")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    version: int
    moves: int
    def __init__(self, version: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("name", "reason", "drain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    drain: bool
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., drain: bool = ...) -> None: ...

class CordonResponse(_message.Message):
    __slots__ = ("barred",)
    BARRED_FIELD_NUMBER: _ClassVar[int]
    barred: _containers.RepeatedCompositeFieldContainer[Barred]
    def __init__(self, barred: _Optional[_Iterable[_Union[Barred, _Mapping]]] = ...) -> None: ...

class UncordonRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UncordonResponse(_message.Message):
    __slots__ = ("barred",)
    BARRED_FIELD_NUMBER: _ClassVar[int]
    barred: _containers.RepeatedCompositeFieldContainer[Barred]
    def __init__(self, barred: _Optional[_Iterable[_Union[Barred, _Mapping]]] = ...) -> None: ...

class PostmortemsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PostmortemsResponse(_message.Message):
    __slots__ = ("postmortems", "changes")
    POSTMORTEMS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    postmortems: _containers.RepeatedCompositeFieldContainer[Postmortem]
    changes: _containers.RepeatedCompositeFieldContainer[GroupChange]
    def __init__(self, postmortems: _Optional[_Iterable[_Union[Postmortem, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[GroupChange, _Mapping]]] = ...) -> None: ...

class Postmortem(_message.Message):
    __slots__ = ("uid", "arrived_unix_s", "record")
    UID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    uid: str
    arrived_unix_s: float
    record: str
    def __init__(self, uid: _Optional[str] = ..., arrived_unix_s: _Optional[float] = ..., record: _Optional[str] = ...) -> None: ...

class GroupChange(_message.Message):
    __slots__ = ("unix_s", "epoch", "state", "reason")
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    epoch: int
    state: GroupState
    reason: str
    def __init__(self, unix_s: _Optional[float] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[GroupState, str]] = ..., reason: _Optional[str] = ...) -> None: ...
