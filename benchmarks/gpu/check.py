"""What combine must give, computed at home without any communication: the arithmetic of `ep_kernels.reference`.

Three kinds of experts. `given_x`: they do nothing (the timed loops, rows of the payload's own type). `pattern`: every
row of a rank is that rank's random vector (the timed loops where rows arrive as fp8). `toy`: expert number e of a rank
multiplies by 1 + e/4 (before and after the loops), so a row at the wrong expert, rank or token changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.cases import Case, ranks_of
from benchmarks.gpu import Inputs, Row
from ep_kernels import quant

LARGEST = 8.0
"""Magnitude that normal values hardly reach."""
TOLERANCE = 1e-2
"""Relative error of backends that promise no bits: their partials are rounded to bf16 more than once."""


def expected(case: Case, inputs: Inputs, row: Row) -> torch.Tensor:
    """z [T, H]: per rank, ascending, the partial that it returns, rounded as it moves, summed in fp32; where combine is
    exact, per k, ascending, the row that it returns, rounded as it moves, weighted.

    `row(rank, here, k)` is float32 [T, H]: for per-expert layouts the output of expert k of each token, for others (k
    None) the row that `rank` made of each token; `here` [T, K] says which experts lie on `rank`.
    """
    owner, weights = ranks_of(case, inputs.topk_ids), inputs.topk_weights
    if case.exact_combine:
        exact = ((_row(case, owner, k, row) * weights[:, k, None], owner[:, k] >= 0) for k in range(case.topk))
        return _sum(exact, inputs.x.shape, inputs.x.device).to(case.dtype)
    terms = []
    for rank in range(case.ranks):
        here = owner == rank
        if case.layout.per_expert:
            rows = ((row(rank, here, k) * weights[:, k, None], here[:, k]) for k in range(case.topk))
            partial = _sum(rows, inputs.x.shape, inputs.x.device)
        else:
            partial = row(rank, here, None)
        terms.append((_moved(case, partial), here.any(1)))
    return _sum(terms, inputs.x.shape, inputs.x.device).to(case.dtype)


def _sum(terms: Iterable[tuple[torch.Tensor, torch.Tensor]], shape: torch.Size, device: torch.device) -> torch.Tensor:
    """In fp32 and in the given order, from the first present value."""
    total, seen = torch.zeros(shape, device=device), torch.zeros(shape[0], 1, dtype=torch.bool, device=device)
    for value, present in terms:
        total = torch.where(present[:, None], torch.where(seen, total + value, value), total)
        seen = seen | present[:, None]
    return total


def _row(case: Case, owner: torch.Tensor, k: int, row: Row) -> torch.Tensor:
    """float32 [T, H] of each token's expert k, wherever it is."""
    rows = [(row(rank, owner == rank, k), owner[:, k] == rank) for rank in range(case.ranks)]
    return _moved(case, _sum(rows, rows[0][0].shape, owner.device))


def _moved(case: Case, partial: torch.Tensor) -> torch.Tensor:
    if case.fp8_combine:
        return quant.dequantize(*quant.quantize(partial))
    return partial.to(case.dtype).float()


# The three kinds of experts, as home sees them.


def given_x(inputs: Inputs) -> Row:
    """Experts that do nothing."""
    return lambda rank, here, k: inputs.x.float()


def pattern(case: Case, inputs: Inputs, seed: int) -> Row:
    """Experts of a rank all give `vector(case, rank)`."""
    return lambda rank, here, k: vector(case, rank, seed, inputs.x.device).float().expand(inputs.x.shape)


def vector(case: Case, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """[H] normal values, known to all ranks."""
    drawn = torch.randn(case.hidden, generator=torch.Generator().manual_seed(seed * 64 + rank))
    return drawn.to(device, case.dtype)


def toy(case: Case, inputs: Inputs) -> Row:
    """What `toy_rank_wise` and `toy_per_expert` make of the token, seen from home."""
    x = dispatched(case, inputs.x)
    slot = inputs.topk_ids % (case.experts // case.ranks)

    def row(rank: int, here: torch.Tensor, k: int | None) -> torch.Tensor:
        if k is not None:
            return toy_per_expert(x, 1 + slot[:, k] / 4, case.dtype).float()
        return toy_rank_wise(x, torch.where(here, slot, -1), inputs.topk_weights, case.dtype).float()

    return row


def dispatched(case: Case, x: torch.Tensor) -> torch.Tensor:
    """What rows x [T, H] mean when they have been dispatched."""
    if case.quantize == "nvfp4":
        scale = global_scale(x.device)
        return quant.dequantize(*quant.quantize_nvfp4(x, scale), scale)
    if case.quantize == "mxfp8":
        return quant.dequantize(*quant.quantize_mxfp8(x))
    return quant.dequantize(*quant.quantize(x)) if case.quantize else x


def global_scale(device: torch.device) -> torch.Tensor:
    """float32 [1]: NVFP4's scale of all rows, for values of up to LARGEST."""
    return torch.tensor([quant.FP8_MAX * quant.FP4_MAX / LARGEST], device=device)


def toy_per_expert(tokens: torch.Tensor, gain: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tokens [..., H] times gain [...], as `dtype`."""
    return (tokens.float() * gain[..., None]).to(dtype)


def toy_rank_wise(
    tokens: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """tokens [..., H], local_ids and weights [..., K] (-1 = not here): the weighted sum of the token's experts here."""
    gain = torch.zeros(tokens.shape[:-1], device=tokens.device)
    for k in range(local_ids.shape[-1]):
        gain = gain + torch.where(local_ids[..., k] >= 0, weights[..., k] * (1 + local_ids[..., k] / 4), 0)
    return toy_per_expert(tokens, gain, dtype)


def fault(got: torch.Tensor, want: torch.Tensor, *, exact: bool) -> str:
    """What is wrong with `got`, "" if nothing: it must have the bits of `want` (`exact`), or be near it."""
    if exact:
        wrong = (got.view(torch.int16) != want.view(torch.int16)).any(-1)
        return f"{int(wrong.sum())} of {len(wrong)} rows have other bits than the reference" if wrong.any() else ""
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))
    return "" if error <= TOLERANCE else f"relative error {error:.3g}"
