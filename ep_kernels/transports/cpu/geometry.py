"""Everything that fixes the shapes of a region, out of a configuration."""

from __future__ import annotations

from ep_kernels import quant
from ep_kernels.config import FP8_BLOCK, MoEConfig, receive_rows
from ep_kernels.errors import ConfigError
from ep_kernels.transports.cpu import native
from ep_kernels.types import CombineOrder, Layout

MAX_ROWS = 2**31 - 1
"""Places of rows are int32."""
TWO_HOP_BYTES = 256 << 10
"""Bytes of one rank's tokens, as partials, from which on a combine goes by collectors: fewer return sooner by one hop,
which wakes nobody else (docs/lab/network-speed.md)."""
_NS = 1_000_000_000
_ROUTING_BYTES = 8
"""Bytes for each chosen expert of a row: its place and its weight."""


def geometry_of(config: MoEConfig) -> native.Geometry:
    """Everything that fixes shapes, as the native half wants it."""
    experts = config.resolved_expert_map
    group, local = config.group, experts.num_local_experts(config.group.rank)
    out_dtype, layout = config.resolved_output_dtype, config.resolved_layout
    capacity = receive_rows(config, local)
    most = receive_rows(config, experts.stride)
    groups = {Layout.EXPERT_MAJOR: (local, experts.stride), Layout.RANK_MAJOR: (group.size, group.size)}
    here, anywhere = groups.get(layout, (1, 1))
    scale_bytes, scales = _scale_format(config)
    return native.Geometry(
        rank=group.rank,
        ranks=group.size,
        experts=config.num_experts,
        local_experts=local,
        stride=experts.stride,
        topk=config.topk,
        max_tokens=config.max_tokens_per_rank,
        in_flight=config.max_in_flight,
        hidden=config.hidden_size,
        exact=config.exact_combine,
        alignment=config.expert_alignment,
        by_domain=_by_domain(config),
        x_type=native.type_code(config.dtype),
        out_type=native.type_code(out_dtype),
        combine_type=native.type_code(config.resolved_combine_dtype),
        layout=native.layout_code(layout),
        scales=scales,
        first_id=config.first_id,
        absent_id=config.resolved_absent_id,
        two_hop_tokens=two_hop_tokens(config),
        row_bytes=config.payload_columns * config.payload_dtype.itemsize,
        scale_bytes=scale_bytes,
        capacity=capacity * here,
        slots=capacity,
        y_rows=most * anywhere,
        timeout_ns=int(config.timeout_s * _NS),
    )


def _by_domain(config: MoEConfig) -> bool:
    return config.combine_order is CombineOrder.DOMAIN and config.network is not None and not config.exact_combine


def two_hop_tokens(config: MoEConfig) -> int:
    """Tokens of a rank from which on a combine goes by collectors: equal on all ranks, since the configuration is."""
    if config.two_hop_tokens is not None:
        return config.two_hop_tokens
    return -(-TWO_HOP_BYTES // quant.partial_bytes(config))


def wire_bytes(config: MoEConfig, geometry: native.Geometry) -> tuple[int, int]:
    row = geometry.row_bytes + geometry.scale_bytes + _ROUTING_BYTES * geometry.topk
    return row, quant.partial_bytes(config)


def check_rows(config: MoEConfig, geometry: native.Geometry) -> None:
    """Raises ConfigError: more rows than their numbers can say."""
    routed = geometry.ranks * geometry.max_tokens * geometry.topk
    most = max(routed, geometry.capacity, geometry.y_rows)
    field = "max_recv_rows" if config.max_recv_rows and routed <= MAX_ROWS else "max_tokens_per_rank"
    if most > MAX_ROWS:
        raise ConfigError(field, f"at most {MAX_ROWS} rows in all with transport cpu", f"room for {most}")


def _scale_format(config: MoEConfig) -> tuple[int, int]:
    """(bytes of one row's scales as they are staged, `cd::Scales`)."""
    if config.quantize is True:
        return -(-config.hidden_size // FP8_BLOCK) * 4, native.SCALES[config.scale_format]
    columns, dtype = quant.delivered_scales(config)
    return columns * dtype.itemsize, native.SCALES.get(config.quantize, native.CALLER_SCALES if columns else 0)
