"""Stories of backward passes. Each runs on every rank, over a communicator of its own."""

from __future__ import annotations

import math

import pytest
import torch

from ep_kernels import MoECommunicator, autograd, reference
from ep_kernels.errors import ArgumentError
from ep_kernels.routing import delivered
from ep_kernels.types import DispatchOutput, Layout
from tests.cases import RoutingCase
from tests.compare import expert, same_bits
from tests.transports.steps import Expected, Inputs, check_dispatch, start


def differentiable(comm: MoECommunicator, case: RoutingCase) -> None:
    """Gradients equal those of a dense MoE of plain torch operations, in float32."""
    inputs = Inputs.of(case, comm.config)
    xs = [x.nan_to_num(0.5, 1.0, -1.0).clamp(-2, 2) for x in inputs.xs]
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.num_experts, case.hidden_size, case.hidden_size)
    matrices = torch.randn(shape, generator=generator).div(8).requires_grad_()
    device = comm.capabilities.device_type
    x, weights = (t[comm.rank].to(device, copy=True).requires_grad_() for t in (xs, inputs.weights))
    pull = torch.randn(x.shape, generator=generator)
    out, handle = autograd.dispatch(comm, x, inputs.ids[comm.rank].to(device), weights)
    y = apply_experts(comm, out, matrices.to(device))
    z = autograd.combine(comm, y, handle, out.topk_weights)
    (z * pull.to(device)).sum().backward()  # type: ignore[no-untyped-call]
    got = [z.detach(), x.grad, weights.grad]
    assert matrices.grad is not None
    everybody = sum_over_ranks(comm, matrices.grad)
    want = dense_gradients(case, xs, inputs, matrices.detach(), comm.rank, pull)
    for name, a, b in zip(("z", "dx", "dw"), got, want[:3], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{case} {n}: {m}")  # type: ignore[misc]
    total = sum_over_ranks(comm, want[3])
    torch.testing.assert_close(everybody, total, rtol=1e-4, atol=1e-4, msg=lambda m: f"{case} experts: {m}")


def sum_over_ranks(comm: MoECommunicator, values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over ranks, through `exchange`, as float32 bits."""
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % 8))
    total = torch.zeros_like(flat)
    for first in range(0, len(flat), 8):
        rows = comm.exchange(flat[first : first + 8].view(torch.int32).tolist())
        for row in rows:
            total[first : first + 8] += torch.tensor(row, dtype=torch.int32).view(torch.float32)
    return total[: values.numel()].view(values.shape)


def apply_experts(comm: MoECommunicator, out: DispatchOutput, matrices: torch.Tensor) -> torch.Tensor:
    """Linear experts on rows of any layout, differentiable; touches undelivered rows too, as padded GEMMs do."""
    mine = matrices[list(comm.config.resolved_expert_map.experts_of(comm.rank))]
    if out.layout is Layout.EXPERT_MAJOR:
        return torch.einsum("lsh,lhg->lsg", out.tokens, mine)
    if out.layout is Layout.GROUPED:
        assert out.offsets is not None
        ends = out.offsets.tolist()
        parts = [out.tokens[ends[i] : ends[i + 1]] @ m for i, m in enumerate(mine)]
        return torch.cat([*parts, out.tokens[ends[-1] :]])
    assert out.topk_ids is not None
    assert out.topk_weights is not None
    ids = torch.where(delivered(out)[..., None], out.topk_ids, -1)
    y = torch.zeros_like(out.tokens)
    for slot, matrix in enumerate(mine):
        gate = torch.where(ids == slot, out.topk_weights, 0.0).sum(-1, keepdim=True)
        y = y + gate * (out.tokens @ matrix)
    return y


def dense_gradients(
    case: RoutingCase, xs: list[torch.Tensor], inputs: Inputs, matrices: torch.Tensor, rank: int, pull: torch.Tensor
) -> list[torch.Tensor]:
    """(z, dx, dw, d experts) of this rank's tokens without any communication."""
    x, w = xs[rank].clone().requires_grad_(), inputs.weights[rank].clone().requires_grad_()
    experts = matrices.clone().requires_grad_()
    ids = inputs.ids[rank].long()
    known = (ids >= 0) & (ids < case.num_experts)
    z = torch.zeros_like(x)
    for k in range(case.topk):
        chosen = experts[torch.where(known[:, k], ids[:, k], 0)]
        term = torch.einsum("th,thg->tg", x, chosen) * w[:, k, None]
        z = z + torch.where(known[:, k, None], term, 0.0)
    (z * pull).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert w.grad is not None
    assert experts.grad is not None
    return [z.detach(), x.grad, w.grad, experts.grad]


def backward_matches_reference(comm: MoECommunicator, case: RoutingCase) -> None:
    """The two options of combine that backward passes use, bit for bit."""
    request, inputs = start(comm, case)
    out, handle = request.wait()
    expected = check_dispatch(comm, inputs, out)
    extra = () if out.layout.per_expert else (case.topk,)
    shapes = [(*o.tokens.shape[:-1], *extra) for o in expected.outputs]
    numbers = [torch.arange(math.prod(shape)).float().view(shape) + 1e5 * r for r, shape in enumerate(shapes)]
    dtype = comm.config.resolved_output_dtype
    ys = [expert(o, dtype) for o in expected.outputs]
    zs, home = reference.combine(expected.step, ys, row_weights=numbers, apply_weights=False, domains=comm.domains)
    assert home is not None
    mine = numbers[comm.rank].to(out.tokens.device)
    request = comm.combine_async(expert(out, dtype), handle, row_weights=mine, apply_weights=False)
    same_bits(request.wait(), zs[comm.rank], "unweighted z")
    same_bits(request.weights, home[comm.rank], "numbers that came home")
    if out.layout.per_expert:
        rows = comm.row_weights(handle)
        same_bits(rows, all_row_weights(expected)[comm.rank], "row weights")
    else:
        with pytest.raises(ArgumentError, match="layout"):
            comm.row_weights(handle)


def all_row_weights(expected: Expected) -> list[torch.Tensor]:
    """The weight of every row of every rank, 0 where nothing was delivered."""
    rows = [torch.zeros(o.tokens.shape[:-1]) for o in expected.outputs]
    for rank, tables in enumerate(expected.step.places):
        for source, place in enumerate(tables):
            rows[rank].view(-1)[place[place >= 0]] = expected.step.weights[source][place >= 0]
    return rows
