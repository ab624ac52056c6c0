"""How fast the links alone would allow it, for the routing that was really measured. Pure arithmetic.

A token goes once to each rank that holds one of its experts; what stays on its own GPU costs the links nothing. The
bound of a step is the busiest port, out or in, of any GPU, at the rate that plain stores of all GPUs to all others
reach: measured on H200 with NVLink 4, see docs/benchmarks.md.
"""

from __future__ import annotations

import torch

from benchmarks.cases import Case, ranks_of

GBPS_WITHIN_4, GBPS_BEYOND_4 = 350.0, 343.0
"""Bytes per nanosecond that leave one GPU of up to four, and of more, by stores of its multiprocessors."""
GBPS_COPIES = 386.0
"""The most that copy engines were seen to move out of a GPU (4 H200, 512 MiB a rank): no law, but no run was above."""


def rows_to(case: Case, topk_ids: torch.Tensor) -> torch.Tensor:
    """int64 [R]: rows of these tokens that each rank gets, one per (token, rank), the own rank included."""
    owner = ranks_of(case, topk_ids)
    ranks = torch.arange(case.ranks, device=topk_ids.device)
    return (owner[:, :, None] == ranks).any(1).sum(0)


def rows_back(case: Case, topk_ids: torch.Tensor) -> torch.Tensor:
    """int64 [R]: rows that combine brings from each rank for these tokens, the own rank included."""
    if not case.exact_combine:
        return rows_to(case, topk_ids)
    return (ranks_of(case, topk_ids)[..., None] == torch.arange(case.ranks, device=topk_ids.device)).sum((0, 1))


def remote(table: torch.Tensor) -> torch.Tensor:
    """[..., R, R] rows from -> to, without those that stay."""
    return table - torch.diag_embed(table.diagonal(dim1=-2, dim2=-1))


def busiest_rows(table: torch.Tensor) -> float:
    """Rows through the busiest port, mean over steps; table [S, R, R] from -> to."""
    away = remote(table)
    ports = torch.cat([away.sum(-1), away.sum(-2)], -1)
    return float(ports.max(-1).values.double().mean())


def sent_rows(table: torch.Tensor) -> float:
    """Rows that leave a GPU, mean over steps and GPUs."""
    return float(remote(table).sum(-1).double().mean())


def gbps(ranks: int, *, copies: bool = False) -> float:
    """Rate of the bound: of stores, or of copy engines."""
    if copies:
        return GBPS_COPIES
    return GBPS_WITHIN_4 if ranks <= 4 else GBPS_BEYOND_4


def bound_us(case: Case, table: torch.Tensor, op: str) -> float:
    """Microseconds of the busiest port. Combine takes the same rows back, so in and out change places."""
    return busiest_rows(table) * case.moved_bytes(op) / gbps(case.ranks) / 1e3
