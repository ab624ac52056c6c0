"""Crossdock itself, by its public API.

Inside the times: everything. One kernel per operation routes, exchanges the counts, quantises (fp8), moves rows and
metadata to their final place, expands them per expert (per-expert layouts) and, in combine, weights (per-expert
layouts) and sums. Rank-wise layouts leave weighting to the caller, here as in serving. No staging copies are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import BOUNDED, Case
from benchmarks.gpu import Inputs, Row, check
from ep_kernels import Layout, MoECommunicator, MoEConfig, Overflow, quant
from ep_kernels.network import NetworkConfig
from ep_kernels.routing import delivered
from ep_kernels.telemetry import Samples
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.plan import most_blocks
from ep_kernels.types import PeerTraffic


class Crossdock:
    """See `gpu.Backend`; what a dispatch returns is (DispatchOutput, DispatchHandle)."""

    rotates = True

    def __init__(self, case: Case, group: Any, transport: str = "nvlink", network: NetworkConfig | None = None) -> None:
        self._case = case
        self._scale: torch.Tensor | None = None
        exact_shapes = case.form == "exact"
        self._comm = MoECommunicator(
            MoEConfig(
                group=group,
                num_experts=case.experts,
                hidden_size=case.hidden,
                topk=case.topk,
                max_tokens_per_rank=case.tokens,
                mode=case.mode,
                layout=case.layout,
                dtype=case.dtype,
                quantize=case.quantize,
                combine_dtype=torch.float8_e4m3fn if case.fp8_combine else None,
                exact_combine=case.exact_combine,
                exact_shapes=exact_shapes,
                overflow=Overflow.RAISE if exact_shapes else Overflow.DROP,
                num_sms=case.num_sms,
                max_recv_rows=int(BOUNDED * case.tokens * case.topk) if case.form == "bounded" else None,
                transport=transport,
                network=network,
            )
        )
        self.sms = _filled(self._comm.config) if transport == "nvlink" else {}

    def prepare(self, inputs: Inputs) -> None:
        """See `Backend`."""

    def dispatch(self, inputs: Inputs, previous: Any = None) -> Any:
        """See `Backend`."""
        handle = None if previous is None else previous[1]
        return self._comm.dispatch(self._rows(inputs), inputs.topk_ids, inputs.topk_weights, previous_handle=handle)

    def _rows(self, inputs: Inputs) -> Any:
        """As dispatch takes them: NVFP4 wants a scale of all rows beside them."""
        if self._case.quantize != "nvfp4":
            return inputs.x
        if self._scale is None:
            self._scale = check.global_scale(inputs.x.device)
        return inputs.x, self._scale

    def tokens(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        return received[0].tokens  # type: ignore[no-any-return]

    def experts(self, received: Any) -> torch.Tensor:
        """See `Backend`."""
        out, dtype = received[0], self._case.dtype
        tokens = out.tokens if out.scales is None else quant.dequantize(out.tokens, out.scales, self._scale)
        if not out.layout.per_expert:
            y = check.toy_rank_wise(tokens, out.topk_ids, out.topk_weights, dtype)
        elif out.layout is Layout.EXPERT_MAJOR:
            slots = torch.arange(len(tokens), device=tokens.device)
            y = check.toy_per_expert(tokens, (1 + slots / 4)[:, None], dtype)
        else:
            rows = torch.arange(len(tokens), device=tokens.device)
            slots = torch.searchsorted(out.offsets, rows.int(), right=True) - 1
            y = check.toy_per_expert(tokens, 1 + slots / 4, dtype)
        return y.masked_fill_(~delivered(out)[..., None], float("nan"))

    def combine(self, y: torch.Tensor, received: Any, inputs: Inputs, out: torch.Tensor) -> None:
        """See `Backend`."""
        self._comm.combine(y, received[1], out=out)

    # Over several hosts: what the network has counted.

    def traffic(self) -> list[PeerTraffic]:
        """By rank of another host, since the start."""
        return self._comm.traffic()

    def settled(self) -> tuple[int, int]:
        """(bytes, messages) sent when all ranks have come to a barrier, whose own messages the proxies have sent."""
        self._comm.barrier()
        torch.cuda.synchronize()
        time.sleep(0.01)
        peers = self.traffic()
        return sum(peer.sent_bytes for peer in peers), sum(peer.sent_messages for peer in peers)

    def samples(self) -> Samples:
        """Of the operations that have ended since the last call."""
        return self._comm.samples()

    # Halves: each sends and returns what receives.

    def send_dispatch(self, inputs: Inputs) -> Callable[[], Any]:
        """The sending half of `dispatch`; its receiving half returns what `dispatch` returns."""
        return self._comm.dispatch_async(self._rows(inputs), inputs.topk_ids, inputs.topk_weights).wait

    def send_combine(self, y: torch.Tensor, received: Any, out: torch.Tensor) -> Callable[[], Any]:
        """The sending half of `combine`."""
        return self._comm.combine_async(y, received[1], out=out).wait

    def result(self, inputs: Inputs) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty_like(inputs.x)

    def fault(self, inputs: Inputs, out: torch.Tensor, row: Row) -> str:
        """See `Backend`."""
        return check.fault(out, check.expected(self._case, inputs, row), exact=True)

    def close(self) -> None:
        """See `Backend`. Raises what a kernel met."""
        if self._comm.capabilities.device_type == "cuda":
            torch.cuda.synchronize()
        self._comm.check()
        self._comm.close()


def _filled(config: MoEConfig) -> dict[str, int]:
    """Multiprocessors that each kernel fills."""
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    sizes, asked = plan.sizes_of(config), (config.resolved_dispatch_sms, config.resolved_combine_sms)
    dispatch, combine = (most_blocks(config, each, num_sms) for each in asked)
    return {
        "dispatch": plan.dispatch_launch(config, sizes, config.mode, dispatch).num_blocks,
        "combine": plan.combine_launch(config, sizes, config.mode, combine).num_blocks,
    }


def create(case: Case, rank: int, group: Any) -> Crossdock:
    """See `gpu.load`."""
    return Crossdock(case, group)
