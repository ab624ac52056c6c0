"""What tracing sees of a communicator, and what the operators of ops.py need of it when they run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

from ep_kernels import bringup
from ep_kernels.config import MoEConfig
from ep_kernels.transports.base import Transport
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode


@dataclass(frozen=True)
class TraceSite:
    """What tracing has to know of a communicator; every field that is read becomes a guard of the compiled code.

    Attributes:
        comm: its name in operators.
        owner: as in DispatchHandle.
        scales: payloads have scales.
        num_groups: length of counts.
        order: int32 [1] on the payload's device, which every operator of a forward pass writes: see ops.py.
        backward_order: the same of backward passes. A tensor that forward passes write cannot be saved for backward.
    """

    comm: str
    owner: int
    layout: Layout
    mode: Mode
    ll_max_tokens: int
    max_tokens: int
    hidden_size: int
    scales: bool
    num_groups: int
    dtype: torch.dtype
    output_dtype: torch.dtype
    order: torch.Tensor
    backward_order: torch.Tensor

    @classmethod
    def of(cls, owner: int, config: MoEConfig, ll_max_tokens: int, device: str) -> TraceSite:
        """The description of a communicator that has been brought up."""
        order, backward_order = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        for tensor in (order, backward_order):
            # What torch._dynamo.mark_static_address does, whose import would cost seconds. CUDA graphs of the compiler
            # may then contain what mutates it.
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        return cls(
            comm=f"crossdock-{owner}-{_digest(config)}",
            owner=owner,
            layout=config.resolved_layout,
            mode=config.mode,
            ll_max_tokens=ll_max_tokens,
            max_tokens=config.max_tokens_per_rank,
            hidden_size=config.hidden_size,
            scales=has_scales(config),
            num_groups=num_groups(config),
            dtype=config.dtype,
            output_dtype=config.resolved_output_dtype,
            order=order,
            backward_order=backward_order,
        )


def _digest(config: MoEConfig) -> str:
    """Digest of all that shapes and dtypes follow from. The compiler keeps code on disk by the text of a graph, which
    has the communicator's name: in another process that number may be one of another configuration."""
    text = repr((config.group.size, config.group.rank, sorted(bringup.fingerprint(config).items())))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Communicator(Protocol):
    """What operators need of a `MoECommunicator`."""

    _site: TraceSite
    _epoch: int
    _transport: Transport

    @property
    def config(self) -> MoEConfig:
        """The configuration that the ranks agreed on."""

    @property
    def num_local_experts(self) -> int:
        """L."""

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        previous_handle: DispatchHandle | None = None,
        step_tokens: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Both halves."""

    def combine_now(
        self, y: torch.Tensor, handle: DispatchHandle, row_weights: torch.Tensor | None, apply_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both halves; (z, the row weights that were returned)."""

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """The weight of every row."""


def num_groups(config: MoEConfig) -> int:
    """Length of `DispatchOutput.counts`."""
    group = config.group
    local: int = config.resolved_expert_map.num_local_experts(group.rank)
    return local if config.resolved_layout.per_expert else int(group.size)


def has_scales(config: MoEConfig) -> bool:
    return bool(config.quantize or config.scale_columns)
