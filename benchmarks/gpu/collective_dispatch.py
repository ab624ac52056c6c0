"""Who brings a step's tokens to every rank in the benchmark, RANK_MAJOR: ours by `Mode.AG` or HT, NCCL's all-gather.

`crossdock` does what a dispatch does: ids and weights travel too, and local ids, counts and flags come out. HT moves
rows to the ranks that hold their experts. `nccl` and `nccl_ce`: one all-gather of rows with ids and weights packed
behind them, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.collective_backends import Nccl, Runner
from benchmarks.gpu.collective_cases import HIDDEN, CollectiveCase
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig

EXPERTS, TOPK = 256, 8


class Dispatch:
    """See `collective_backends.Runner`; out is bf16 [R * T * H], of HT where rows may lack."""

    def __init__(self, case: CollectiveCase, group: Any, ranks: int) -> None:
        tokens = case.num_bytes // (2 * HIDDEN)
        own = torch.Generator("cuda").manual_seed(31 + group.rank)
        self._ids = torch.rand(tokens, EXPERTS, generator=own, device="cuda").topk(TOPK, sorted=False).indices.int()
        self._weights = torch.rand(tokens, TOPK, generator=own, device="cuda")
        self._comm = MoECommunicator(
            MoEConfig(
                group=group, num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=tokens,
                mode=Mode(case.algorithm), layout=Layout.RANK_MAJOR, num_sms=case.num_sms, transport="nvlink",
            )
        )  # fmt: skip
        self.x = torch.empty(case.numel, dtype=case.dtype, device="cuda")
        self.out = torch.empty(case.shape_out(ranks), dtype=case.dtype, device="cuda")

    def run(self) -> None:
        """See `Runner`."""
        got, _ = self._comm.dispatch(self.x.view(-1, HIDDEN), self._ids, self._weights)
        self.out = got.tokens.view(-1)

    def close(self) -> None:
        """See `Runner`."""
        torch.cuda.synchronize()
        del self.out
        self._comm.close()


class Packed:
    """`inner`'s gather of bytes; x [T * H] and out [R, T * H] are its rows. See `Runner`."""

    def __init__(self, case: CollectiveCase, inner: Runner, ranks: int) -> None:
        self._inner = inner
        self.x = inner.x[: case.num_bytes].view(case.dtype)
        self.out = inner.out.view(ranks, -1)[:, : case.num_bytes].view(case.dtype)

    def run(self) -> None:
        """See `Runner`."""
        self._inner.run()

    def close(self) -> None:
        """See `Runner`."""
        del self.x, self.out
        self._inner.close()


def packed(case: CollectiveCase) -> CollectiveCase:
    """The all-gather that moves rows, ids and weights together."""
    tokens = case.num_bytes // (2 * HIDDEN)
    return replace(case, op="all_gather", num_bytes=case.num_bytes + 8 * TOPK * tokens, dtype=torch.uint8)


def create_dispatch(name: str, case: CollectiveCase, group: Any, ranks: int) -> Runner:
    """Backend `name` on a dispatch; collective."""
    if name == "crossdock":
        return Dispatch(case, group, ranks)
    ways = {"nccl": (False, False), "nccl_ce": (True, True)}
    windows, copies = ways[name]
    return Packed(case, Nccl(packed(case), ranks, windows=windows, copies=copies), ranks)
