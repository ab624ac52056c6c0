"""Every knob of the data plane, with unit, default and reason. Reads no environment and no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from ep_kernels.errors import ConfigError
from ep_kernels.network.network_config import NetworkConfig
from ep_kernels.routing import ExpertMap
from ep_kernels.types import CombineOrder, Layout, Mode, Overflow, ScaleFormat

MAX_TOPK = 32
"""Ids and weights of a token fit one warp."""
ROW_ALIGN_BYTES = 16
"""Rows travel as 16-byte words; other hidden sizes are refused."""
FP8_BLOCK = 128
"""Columns that share one fp8 scale."""


@runtime_checkable
class Group(Protocol):
    """Who the ranks are and how opaque bytes are exchanged at bring-up: once; twice for AUTO without `ll_max_tokens`,
    three times for collectives. The only thing asked of a bootstrap."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of rank slots R (dead ranks keep their slot)."""

    @property
    def epoch(self) -> int:
        """Membership counter, kept by the owner of the group. 0: the group has none."""

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """Give `payload`, get everybody's, in rank order. Collective. Raises TransportError past the deadline."""


MEMORY_HANDLES = ("auto", "fabric", "posix_fd", "cuda_ipc")
"""How GPUs map regions of others: of several hosts, of one host by file descriptors, of one host by CUDA IPC."""


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one MoECommunicator. Checked when built; raises ConfigError naming the field.

    All ranks of a group must give equal values, `group` and its rank apart; a mismatch is refused at bring-up.
    """

    group: Any
    """A `Group`: `ep_kernels.groups.TorchGroup`, `StoreGroup`, or the session's own."""
    num_experts: int
    """E, logical experts. Need not divide by R: the first E % R ranks own one more."""
    hidden_size: int
    """H, columns of a row. H * element size must be a multiple of 16 bytes."""
    topk: int
    """K, experts per token, at most 32 (one warp holds a token's ids)."""
    max_tokens_per_rank: int
    """M, most tokens that one dispatch may bring. Sizes the regions: R * M rows per buffer."""
    mode: Mode = Mode.LL
    layout: Layout | None = None
    """None: EXPERT_MAJOR for LL, FLAT for HT, GROUPED for AUTO."""
    dtype: Any = torch.bfloat16
    """torch.dtype of x as the caller gives it. For pass-through of packed formats: torch.uint8 with H bytes per row."""
    quantize: bool | str = False
    """Quantise x, bfloat16 or float16, inside dispatch. True: to fp8 e4m3 with a scale per 128 columns; "mxfp8": to
    e4m3 with a power of two per 32; "nvfp4": to e2m1 with an e4m3 scale per 16 and the caller's scale of all (cpu).
    `quant.py` has the bits."""
    scale_format: ScaleFormat = ScaleFormat.FP32
    """Rounding and layout of the scales of fp8 that `quantize` makes."""
    scale_columns: int = 0
    """S, columns of the caller's own scales when x comes already quantised as (x, scales); 0 = x comes alone."""
    scale_dtype: Any = torch.float32
    """torch.dtype of the caller's own scales."""
    combine_dtype: Any = None
    """What a rank's partial is rounded to before it moves. None: the output dtype. torch.float8_e4m3fn: block-128
    scaled fp8, which excludes `exact_combine`."""
    output_dtype: Any = None
    """dtype of combine's result and of the expert output. None: `dtype`, or bfloat16 when dtype is a byte format."""
    combine_order: CombineOrder = CombineOrder.RANK
    """Order in which partials of several hosts are added. One host: the same bits either way. `exact_combine` has an
    order of its own."""
    two_hop_tokens: int | None = None
    """`CombineOrder.DOMAIN` over hosts: a step in which a rank brings at least so many tokens returns one row per token
    and host, summed there; smaller ones a row per rank, which spares them a hop. The same bits. None:
    `transports.cpu.geometry.TWO_HOP_BYTES` of partials."""
    exact_combine: bool = False
    """Every routed row travels, in the output dtype, and is summed at its source in ascending k, without pre-reduction.
    Per-expert layouts only."""
    expert_map: Any = None
    """None: contiguous blocks. Else a `routing.ExpertMap`: logical expert -> (rank, slot) replicas."""
    expert_alignment: int = 1
    """Rows to which each expert's group is padded (GROUPED). Grouped GEMMs want 8 to 128."""
    max_recv_rows: int | None = None
    """Receive capacity in rows: slots per expert (EXPERT_MAJOR) or N (GROUPED, FLAT). None: the worst case."""
    exact_shapes: bool = True
    """GROUPED and FLAT: True trims N to what arrived (one host read); False gives worst-case rows + `num_rows`."""
    absent_id: int | None = None
    """FLAT: None gives local expert ids, -1 = not here. A number gives ids as dispatch got them, and this one for
    experts of other ranks and in rows that did not come (`exact_shapes` off; of AUTO the first R * `step_tokens`), with
    weight 0: what experts with a table of ids read as it is. Needs contiguous experts; may differ between ranks."""
    overflow: Overflow = Overflow.RAISE
    """With `max_recv_rows`, RAISE reads the device once per dispatch; DROP never does, and is what CUDA graphs need."""
    max_in_flight: int = 2
    """Dispatches that may be open at once (2 = dual-batch overlap); a buffer is reused after this many."""
    timeout_s: float = 10.0
    """Deadline of every wait, seconds. A healthy step takes micro- to milliseconds; 10 s forgives a paging host."""
    validate: bool = False
    """Raise ArgumentError for ids out of range instead of counting them (costs a scan, and a sync on GPUs)."""
    ll_max_tokens: int | None = None
    """AUTO: steps of at most this many tokens per rank run LL; on GPUs its buffers hold no more. None: what `crossdock
    tune` has measured on this machine (the lowest rank that knows decides for all), else the transport's default."""
    transport: str = "cpu"
    """Folder name under `ep_kernels/transports`."""
    network: Any = None
    """None: the group stays on one host. Else a `network.NetworkConfig`: how ranks of other hosts are reached. May
    differ between ranks, its provider apart."""
    memory_handle: str = "auto"
    """GPUs: how peers map a region, of MEMORY_HANDLES. "auto": the first that works here, in their order. Another one
    alone: where it does not work, a TransportError says why."""
    num_sms: int | None = None
    """GPUs: multiprocessors that one operation may fill, with one block on each. None: all for LL; for HT
    as many as keep the links busy (in dispatch of per-expert layouts 64). Results do not depend on it."""
    dispatch_sms: int | None = None
    """`num_sms` of dispatches alone. None: as `num_sms`."""
    combine_sms: int | None = None
    """`num_sms` of combines alone. None: as `num_sms`."""
    kernel_cache_dir: str | None = None
    """Folder for what is found out once on a machine, shared by processes; may differ between ranks: kernels that GPUs
    compile at first use, and `tuning.json`. None: `.cache/crossdock/kernels` in the home of this process's user."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def resolved_layout(self) -> Layout:
        """The layout with the default applied."""
        return self.layout or _LAYOUTS[self.mode]

    @property
    def resolved_output_dtype(self) -> torch.dtype:
        """dtype of expert outputs and of combine's result."""
        if self.output_dtype is not None:
            return self.output_dtype  # type: ignore[no-any-return]
        return self.dtype if self.dtype in _FLOATS else torch.bfloat16

    @property
    def resolved_combine_dtype(self) -> torch.dtype:
        """dtype in which a rank's partial moves."""
        return self.combine_dtype or self.resolved_output_dtype

    @property
    def resolved_expert_map(self) -> ExpertMap:
        """The expert map with the default applied."""
        return self.expert_map or ExpertMap.contiguous(self.num_experts, self.group.size)

    @property
    def resolved_dispatch_sms(self) -> int | None:
        """`num_sms` of dispatches."""
        return self.num_sms if self.dispatch_sms is None else self.dispatch_sms

    @property
    def resolved_combine_sms(self) -> int | None:
        """`num_sms` of combines."""
        return self.num_sms if self.combine_sms is None else self.combine_sms

    @property
    def first_id(self) -> int:
        """What local expert ids count from in `DispatchOutput.topk_ids`."""
        own = () if self.absent_id is None else self.resolved_expert_map.experts_of(self.group.rank)
        return own[0] if own else 0

    @property
    def resolved_absent_id(self) -> int:
        """The id of an expert that is not here."""
        return -1 if self.absent_id is None else self.absent_id

    @property
    def payload_dtype(self) -> torch.dtype:
        """dtype of `DispatchOutput.tokens`."""
        return _PAYLOADS.get(self.quantize, self.dtype)  # type: ignore[no-any-return]

    @property
    def payload_columns(self) -> int:
        """Last dimension of `DispatchOutput.tokens`."""
        return self.hidden_size // 2 if self.quantize == "nvfp4" else self.hidden_size


_LAYOUTS = {
    Mode.LL: Layout.EXPERT_MAJOR,
    Mode.HT: Layout.FLAT,
    Mode.AUTO: Layout.GROUPED,
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BYTES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_QUANTIZED = (torch.bfloat16, torch.float16)
_PAYLOADS = {True: torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
"""By `quantize`."""


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(field, expected, got)


def _check(c: MoEConfig) -> None:
    _require(isinstance(c.group, Group), "group", "an object like `Group`", type(c.group).__name__)
    _require(0 <= c.group.rank < c.group.size, "group", "0 <= rank < size", (c.group.rank, c.group.size))
    for name, low, high in (
        ("num_experts", 1, 1 << 20),
        ("hidden_size", 1, 1 << 20),
        ("topk", 1, MAX_TOPK),
        ("max_tokens_per_rank", 1, 1 << 24),
        ("expert_alignment", 1, 4096),
        ("max_in_flight", 1, 64),
        ("scale_columns", 0, 1 << 20),
    ):
        value = getattr(c, name)
        _require(type(value) is int and low <= value <= high, name, f"an int in {low}..{high}", value)
    _check_kinds(c)
    _require(c.topk <= c.num_experts, "topk", f"at most num_experts = {c.num_experts}", c.topk)
    _check_dtypes(c)
    _check_shapes(c)


def _check_kinds(c: MoEConfig) -> None:
    enums = (("mode", Mode), ("scale_format", ScaleFormat), ("overflow", Overflow), ("combine_order", CombineOrder))
    for name, kind in enums:
        _require(isinstance(getattr(c, name), kind), name, f"a {kind.__name__}", getattr(c, name))
    _require(c.layout is None or isinstance(c.layout, Layout), "layout", "None or a Layout", c.layout)
    for name in ("exact_combine", "exact_shapes", "validate"):
        _require(type(getattr(c, name)) is bool, name, "a bool", getattr(c, name))
    known = type(c.quantize) is bool or (isinstance(c.quantize, str) and c.quantize in _PAYLOADS)
    _require(known, "quantize", f"False or one of {tuple(_PAYLOADS)}", c.quantize)
    _require(c.memory_handle in MEMORY_HANDLES, "memory_handle", f"one of {MEMORY_HANDLES}", c.memory_handle)
    limits = ("num_sms", 1), ("dispatch_sms", 1), ("combine_sms", 1)
    for name, low in (("max_recv_rows", 1), ("ll_max_tokens", 0), ("two_hop_tokens", 0), *limits):
        value = getattr(c, name)
        fits = value is None or (type(value) is int and low <= value < 1 << 31)
        _require(fits, name, f"None or an int in {low}..2^31-1", value)
    timed = isinstance(c.timeout_s, int | float) and 0 < c.timeout_s <= 3600
    _require(timed, "timeout_s", "seconds in (0, 3600]", c.timeout_s)
    _require(c.network is None or isinstance(c.network, NetworkConfig), "network", "None or a NetworkConfig", c.network)
    folder = c.kernel_cache_dir is None or isinstance(c.kernel_cache_dir, str)
    _require(folder, "kernel_cache_dir", "None or a path as str", c.kernel_cache_dir)
    _require(isinstance(c.scale_dtype, torch.dtype), "scale_dtype", "a torch.dtype", c.scale_dtype)


def _check_dtypes(c: MoEConfig) -> None:
    _require(c.dtype in _FLOATS + _BYTES, "dtype", f"one of {_FLOATS + _BYTES}", c.dtype)
    _require(not c.quantize or c.dtype in _QUANTIZED, "quantize", f"False when dtype is {c.dtype}", c.quantize)
    _require(not (c.quantize and c.scale_columns), "scale_columns", "0 when quantize is on", c.scale_columns)
    _require(c.output_dtype in (None, *_FLOATS), "output_dtype", f"None or one of {_FLOATS}", c.output_dtype)
    partials = (None, c.resolved_output_dtype, *(() if c.exact_combine else (torch.float8_e4m3fn,)))
    what = f"one of {partials} when combine's result is {c.resolved_output_dtype}"
    what += " and exact_combine is on" if c.exact_combine else ""
    _require(c.combine_dtype in partials, "combine_dtype", what, c.combine_dtype)
    for name in ("dtype", "resolved_output_dtype", "payload_dtype"):
        columns = c.payload_columns if name == "payload_dtype" else c.hidden_size
        row = columns * getattr(c, name).itemsize
        _require(row % ROW_ALIGN_BYTES == 0, "hidden_size", f"rows of a multiple of 16 bytes as {name}", f"{row} bytes")
    if c.scale_format is ScaleFormat.UE8M0_PACKED:
        _require(bool(c.quantize), "scale_format", "fp32 or ue8m0 unless quantize is on", c.scale_format.value)
    fixed = not isinstance(c.quantize, str) or c.scale_format is ScaleFormat.FP32
    _require(fixed, "scale_format", f"its default with quantize = {c.quantize!r}", c.scale_format.value)


def _check_shapes(c: MoEConfig) -> None:
    per_expert = c.resolved_layout.per_expert
    _require(per_expert or not c.exact_combine, "exact_combine", "False with rank-wise layouts", c.exact_combine)
    aligned = c.resolved_layout is Layout.GROUPED or c.expert_alignment == 1
    _require(aligned, "expert_alignment", "1 unless the layout is GROUPED", c.expert_alignment)
    bounded = c.max_recv_rows is None or c.resolved_layout is not Layout.RANK_MAJOR
    _require(bounded, "max_recv_rows", "None with RANK_MAJOR (its slots are fixed)", c.max_recv_rows)
    flat = c.absent_id is None or (c.resolved_layout is Layout.FLAT and c.expert_map is None)
    _require(flat, "absent_id", "None unless the layout is FLAT and there is no expert_map", c.absent_id)
    small = c.absent_id is None or -(1 << 31) <= c.absent_id < 1 << 31
    _require(small, "absent_id", "a number of 32 bits", c.absent_id)
    whole = c.max_recv_rows is None or c.max_recv_rows % c.expert_alignment == 0
    _require(whole, "max_recv_rows", f"a multiple of expert_alignment = {c.expert_alignment}", c.max_recv_rows)
    if c.expert_map is not None:
        _require(isinstance(c.expert_map, ExpertMap), "expert_map", "an ExpertMap", type(c.expert_map).__name__)
        shape = (c.expert_map.num_experts, c.expert_map.num_ranks)
        want = (c.num_experts, c.group.size)
        _require(shape == want, "expert_map", f"(num_experts, ranks) = {want}", shape)


def receive_rows(config: MoEConfig, num_local_experts: int) -> int:
    """Receive capacity in rows: slots per expert (EXPERT_MAJOR), slots per rank (RANK_MAJOR), else N.

    Without `max_recv_rows`, the most that can arrive; EXPERT_MAJOR alone counts on distinct ids within a token (as
    top-k gives), since room for K copies of every token in every expert would be K times the memory for nothing.
    """
    return _most_rows(config, num_local_experts) if config.max_recv_rows is None else config.max_recv_rows


def may_overflow(config: MoEConfig, num_local_experts: int) -> bool:
    """Whether rows may be dropped at a receiver with this many local experts. EXPERT_MAJOR with repeated ids within a
    token, which no top-k gives, is not counted (see `receive_rows`)."""
    return receive_rows(config, num_local_experts) < _most_rows(config, num_local_experts)


def _most_rows(config: MoEConfig, num_local_experts: int) -> int:
    most = config.group.size * config.max_tokens_per_rank
    match config.resolved_layout:
        case Layout.RANK_MAJOR:
            return config.max_tokens_per_rank
        case Layout.GROUPED:
            pad = config.expert_alignment
            rows = most * config.topk if num_local_experts else 0
            return int((rows + num_local_experts * (pad - 1)) // pad * pad)
        case _:
            return int(most)
