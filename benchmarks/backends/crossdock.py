"""Crossdock itself. Inside the times: the whole public call, argument checks, routing metadata and layout included.

The tokens lie in `dispatch_input` and the experts' outputs in `combine_input`, which are part of the API.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.backends import Setup
from benchmarks.cases import Step
from ep_kernels import Layout, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.network import NetworkConfig


class Crossdock:
    """See `backends.Backend`.

    Args:
        setup: of the backend.
        network: None: one host.
        options: more fields of the MoEConfig.
    """

    def __init__(self, setup: Setup, network: NetworkConfig | None = None, **options: Any) -> None:
        case = setup.case
        self.payload_s: dict[str, list[float]] = {}
        self._case, self._rank = case, setup.rank
        self._comm = MoECommunicator(
            MoEConfig(
                group=StoreGroup(setup.store, setup.rank, case.ranks),
                num_experts=case.experts,
                hidden_size=case.hidden,
                topk=case.topk,
                max_tokens_per_rank=case.tokens,
                mode=case.mode,
                layout=case.layout,
                dtype=case.dtype,
                timeout_s=60,
                network=network,
                **options,
            )
        )
        self._out = torch.empty(case.tokens, case.hidden, dtype=case.dtype)

    def prepare(self, x: torch.Tensor, step: Step) -> None:
        """See `Backend`."""
        self._x = self._comm.dispatch_input(len(x)).copy_(x)
        self._ids, self._weights = step.topk_ids[self._rank], step.topk_weights[self._rank]

    def dispatch(self) -> None:
        """See `Backend`."""
        self._received, self._handle = self._comm.dispatch(self._x, self._ids, self._weights)

    def experts(self) -> None:
        """See `Backend`. The experts do nothing: outputs are the inputs."""
        self._y = self._comm.combine_input(self._handle)
        tokens, counts = self._received.tokens, self._received.counts.tolist()
        if self._case.layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
            for group, count in enumerate(counts):
                self._y[group, :count].copy_(tokens[group, :count])
        else:
            self._y.copy_(tokens)

    def combine(self) -> None:
        """See `Backend`."""
        self._comm.combine(self._y, self._handle, out=self._out)

    def barrier(self) -> None:
        """See `Backend`."""
        self._comm.barrier()

    def close(self) -> None:
        """See `Backend`."""
        self._comm.close()


def create(setup: Setup) -> Crossdock:
    """See `backends.load`."""
    return Crossdock(setup)
