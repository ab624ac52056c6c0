"""What ranks do in test_faults.py: one does not come to a step, all recover, as vLLM's runner and sentinel have it."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossdock.common.config import FrameworkConfig
from ep_kernels import Layout, Mode, MoECommunicator, PeerTimeout

PATIENCE_S = 30.0
NUM_EXPERTS, HIDDEN, TOKENS = 8, 64, 4


class Call(NamedTuple):
    """Of which the manager makes a communicator."""

    num_experts: int


def step(comm: MoECommunicator) -> None:
    """A step whose experts do nothing: each token comes home twice over."""
    ids = torch.arange(TOKENS * 2, dtype=torch.int32).view(TOKENS, 2) % NUM_EXPERTS
    x = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    out, handle = comm.dispatch(x, ids, torch.ones(TOKENS, 2))
    torch.testing.assert_close(comm.combine(out.tokens, handle), 2 * x)


def one_misses_a_step(rank: int, size: int, store: Any, backend: str) -> tuple[bool, list[int], bool]:
    """(a fault was seen before, the mask after one, a fault is seen after recovery)."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        manager = manager_of(backend, rank, size)
        place = manager._pool.make(
            "test", Call(NUM_EXPERTS), torch.empty(0), TOKENS, mode=Mode.LL, layout=Layout.EXPERT_MAJOR,
            num_experts=NUM_EXPERTS, topk=2, hidden_size=HIDDEN,
        )  # fmt: skip
        comm = place.comm
        assert manager.support_fault_tolerance
        step(comm)
        before = bool(manager.query_fault())
        if rank == 1:
            dist.barrier()
        else:
            with pytest.raises(PeerTimeout, match="rank 1 did not deliver"):
                step(comm)
            dist.barrier()
        mask = manager.query_active_mask()
        assert mask.dtype == torch.int32
        manager.clean_buffers()
        step(comm)
        after = bool(manager.query_fault())
        manager.destroy()
        return before, mask.tolist(), after
    finally:
        dist.destroy_process_group()


def manager_of(backend: str, rank: int, size: int) -> Any:
    """The manager that stands in that backend's place, with a short deadline."""
    from vllm.distributed import parallel_state

    from crossdock.vllm_plugin import managers

    chosen = {"ll": managers.LowLatencyManager, "ht": managers.HighThroughputManager, "v2": managers.GraphManager}
    group = mock.Mock(rank_in_group=rank, world_size=size)
    settings = FrameworkConfig(timeout_s=PATIENCE_S)
    with (
        mock.patch.object(parallel_state, "get_dp_group", return_value=group),
        mock.patch.object(parallel_state, "get_tp_group", return_value=group),
        mock.patch.object(FrameworkConfig, "from_env", return_value=settings),
    ):
        return chosen[backend](dist.group.WORLD)
