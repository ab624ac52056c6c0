from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("data", "dtype", "shape")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "family", "num_layers", "moe_layers", "num_experts", "hidden_size", "topk", "dtype", "max_tokens_per_step", "epoch", "rank", "world_size", "serving", "formats", "request_port", "request_socket", "request_host")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PORT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SOCKET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_HOST_FIELD_NUMBER: _ClassVar[int]
    model: str
    family: str
    num_layers: int
    moe_layers: _containers.RepeatedScalarFieldContainer[int]
    num_experts: int
    hidden_size: int
    topk: int
    dtype: str
    max_tokens_per_step: int
    epoch: int
    rank: int
    world_size: int
    serving: bool
    formats: _containers.RepeatedScalarFieldContainer[str]
    request_port: int
    request_socket: str
    request_host: str
    def __init__(self, model: _Optional[str] = ..., family: _Optional[str] = ..., num_layers: _Optional[int] = ..., moe_layers: _Optional[_Iterable[int]] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ..., topk: _Optional[int] = ..., dtype: _Optional[str] = ..., max_tokens_per_step: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., serving: bool = ..., formats: _Optional[_Iterable[str]] = ..., request_port: _Optional[int] = ..., request_socket: _Optional[str] = ..., request_host: _Optional[str] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("id", "layer", "x", "topk_ids", "topk_weights", "timeout_ms", "cancel", "model", "traceparent")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    TOPK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    layer: int
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    timeout_ms: int
    cancel: bool
    model: str
    traceparent: str
    def __init__(self, id: _Optional[int] = ..., layer: _Optional[int] = ..., x: _Optional[_Union[Tensor, _Mapping]] = ..., topk_ids: _Optional[_Union[Tensor, _Mapping]] = ..., topk_weights: _Optional[_Union[Tensor, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., cancel: bool = ..., model: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("id", "y", "error", "timing", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: int
    y: Tensor
    error: Error
    timing: Timing
    model: str
    def __init__(self, id: _Optional[int] = ..., y: _Optional[_Union[Tensor, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "lost_ranks", "epoch")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    lost_ranks: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., lost_ranks: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_ns", "dispatch_ns", "experts_ns", "combine_ns", "steps")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_NS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_NS_FIELD_NUMBER: _ClassVar[int]
    COMBINE_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    dispatch_ns: int
    experts_ns: int
    combine_ns: int
    steps: int
    def __init__(self, queue_ns: _Optional[int] = ..., dispatch_ns: _Optional[int] = ..., experts_ns: _Optional[int] = ..., combine_ns: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("rank", "epoch", "operations")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    epoch: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, rank: _Optional[int] = ..., epoch: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("op", "mode", "seq", "tokens", "start_ns", "send_ns", "total_ns", "wait_ns")
    OP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    SEND_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    op: str
    mode: str
    seq: int
    tokens: int
    start_ns: int
    send_ns: int
    total_ns: int
    wait_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, op: _Optional[str] = ..., mode: _Optional[str] = ..., seq: _Optional[int] = ..., tokens: _Optional[int] = ..., start_ns: _Optional[int] = ..., send_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., wait_ns: _Optional[_Iterable[int]] = ...) -> None: ...
