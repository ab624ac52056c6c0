"""Memory of a communicator on this rank: the native object, the region, the mirrors, and the buffers of each slot."""

from __future__ import annotations

import ctypes
import math

import torch

from ep_kernels import quant
from ep_kernels.config import MoEConfig
from ep_kernels.network.network import Channel
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.cpu_member import NativeOwner
from ep_kernels.transports.cpu.cpu_routing import StatePlaces
from ep_kernels.transports.cpu.region import OwnRegion, private_bytes
from ep_kernels.types import Layout, ScaleFormat


class SlotBuffers:
    """Buffers of one of the max_in_flight slots: `input` and `expert_outputs` are parts of the region, what dispatch
    delivers to is private and made when first used."""

    def __init__(self, config: MoEConfig, geometry: native.Geometry) -> None:
        self._config, self._geometry = config, geometry
        self.layout, self.exact_shapes = config.resolved_layout, config.exact_shapes
        self.per_expert = self.layout.per_expert
        self._is_exact = self.exact_shapes and self.layout in (Layout.GROUPED, Layout.FLAT)
        self._lead: tuple[int, ...] = {
            Layout.EXPERT_MAJOR: (geometry.local_experts, geometry.slots),
            Layout.RANK_MAJOR: (geometry.ranks, geometry.max_tokens),
        }.get(self.layout, (geometry.capacity,))
        self.output_row_bytes = config.hidden_size * config.resolved_output_dtype.itemsize
        self.expert_outputs = torch.empty(0, config.hidden_size, dtype=config.resolved_output_dtype, device="cpu")
        self.input = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._tokens: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None
        self._addresses: tuple[int, int] | None = None
        self._packed = config.scale_format is ScaleFormat.UE8M0_PACKED
        self._words, self._scale_dtype = quant.delivered_scales(config)

    def lead(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if self._is_exact else self._lead

    def tokens(self) -> torch.Tensor:
        """Payload [*worst case, H]."""
        if self._tokens is None:
            geometry = self._geometry
            with torch.inference_mode(False):  # it is handed out again outside of the mode that the first call is in
                raw = private_bytes(geometry.capacity * geometry.row_bytes).view(self._config.payload_dtype)
                self._tokens = raw.view(*self._lead, self._config.payload_columns)
        return self._tokens

    def addresses(self) -> tuple[int, int]:
        """Of the payload and of the scales; 0: there are none."""
        if self._addresses is None:
            scales = self.scale_bytes()
            self._addresses = self.tokens().data_ptr(), 0 if scales is None else scales.data_ptr()
        return self._addresses

    def scale_bytes(self) -> torch.Tensor | None:
        """Room for the scales of the worst case, or None."""
        if self._scales is None and self._geometry.scale_bytes:
            rows = self._geometry.capacity
            planes = 1 if len(self._lead) == 1 else self._lead[0]
            padded = rows + planes * quant.ROW_PAD
            num_bytes = padded * self._words * 4 if self._packed else rows * self._geometry.scale_bytes
            with torch.inference_mode(False):
                self._scales = private_bytes(num_bytes)
        return self._scales

    def scales(self, lead: tuple[int, ...], packed_stride: int) -> torch.Tensor | None:
        """What was delivered, as the caller wants it."""
        raw = self.scale_bytes()
        if raw is None:
            return None
        if self._packed:
            plane = (self._words * packed_stride,) if len(lead) > 1 else ()
            return raw.view(torch.int32).as_strided((*lead, self._words), (*plane, 1, packed_stride))
        return raw.view(self._scale_dtype).view(*self._lead, self._words)[: lead[0]]

    def input_rows(self, num_tokens: int) -> torch.Tensor:
        """The registered input buffer, [num_tokens, H] of `config.dtype`."""
        rows = self.input.view(self._config.dtype).view(-1, self._config.hidden_size)
        return rows[:num_tokens]

    def outputs(self, lead: tuple[int, ...]) -> torch.Tensor:
        """The registered expert output buffer, [*lead, H] output dtype."""
        rows = self.expert_outputs[: math.prod(lead)]
        return rows if len(lead) == 1 else rows.view(*lead, self._config.hidden_size)


class NativeComm(NativeOwner):
    """Also owns the buffers of each slot and, where there are ranks of other hosts, the mirrors and the network."""

    def __init__(self, config: MoEConfig, geometry: native.Geometry) -> None:
        lib, experts = native.load(), config.resolved_expert_map
        first, ranks, slots = experts.tables()
        places = ranks * experts.stride + slots
        self.channel: Channel | None = None
        self.landing: OwnRegion | None = None
        super().__init__(lib, lib.cd_create(ctypes.byref(geometry), first.data_ptr(), places.data_ptr()))
        self.next = (ctypes.c_uint64 * 4).from_address(lib.cd_next(self.pointer))
        """Numbers of the next dispatch, combine, barrier and exchange."""
        self.collecting: list[object] = [None] * config.max_in_flight
        """Records of combines, by slot, that the native half may read in any wait (native/collector.hpp)."""
        self.buffers = [SlotBuffers(config, geometry) for _ in range(config.max_in_flight)]
        self.outputs = config.hidden_size, config.resolved_output_dtype
        """H and dtype of z."""
        self.places = StatePlaces(geometry)

    def close_in_child(self) -> None:
        if self.channel is not None:
            self.channel.close_in_child()
        for buffers in self.buffers:
            buffers.expert_outputs, buffers.input = buffers.expert_outputs.new_empty(0), buffers.input.new_empty(0)
        super().close_in_child()
        self.landing = None

    def close(self) -> None:
        """Peers and the network no longer reach this rank. What operations work on stays."""
        if self.channel is not None:
            self.channel.close()
        super().close()
        if self.landing is not None:
            self.landing.close()

    def free(self, pointer: int) -> None:
        if self.channel is not None:
            self.channel.close()
        super().free(pointer)
        if self.channel is not None:
            self.channel.free()
