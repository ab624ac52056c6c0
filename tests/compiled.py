"""Stories of compiled functions: several MoE layers in one `torch.compile`, compared with the reference bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_kernels import MoECommunicator, autograd, reference
from ep_kernels.config import MoEConfig
from ep_kernels.routing import delivered
from ep_kernels.types import DispatchOutput, Layout
from tests.cases import RoutingCase
from tests.compare import same_bits
from tests.transports.steps import Inputs, check_step, next_case

LAYERS = 3
Step = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class How:
    """How a function is compiled, and how often it is called.

    Attributes:
        backend, mode: of torch.compile.
        dynamic: T changes from call to call (marked so), else it stays.
        replays: CUDA graphs are expected: from the third call on no operator runs on the host.
        fullgraph: of torch.compile; without it, the compiler runs parts of the function eagerly.
    """

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool = False
    replays: bool = False
    calls: int = 4
    fullgraph: bool = True


def gained(out: DispatchOutput, dtype: torch.dtype) -> torch.Tensor:
    """Experts whose bits a compiler cannot change: one product or sum is rounded at a time, none can be fused."""
    tokens = out.tokens.float()
    if out.layout is Layout.EXPERT_MAJOR:
        gain = (1 + torch.arange(tokens.shape[0], device=tokens.device) / 4)[:, None].expand(tokens.shape[:-1])
    elif out.layout is Layout.GROUPED:
        assert out.offsets is not None
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        gain = 1 + ((rows[:, None] >= out.offsets).sum(1) - 1) / 4
    else:
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        gain = torch.zeros(tokens.shape[:-1], device=tokens.device)
        for k in range(out.topk_ids.shape[-1]):
            gain = gain + torch.where(out.topk_ids[..., k] >= 0, out.topk_weights[..., k], 0.0)
    y = tokens * gain[..., None]
    return torch.where(delivered(out)[..., None], y, float("nan")).to(dtype)


def layers_of(comm: MoECommunicator) -> Step:
    """LAYERS layers, each with a routing of its own; gives z and the rows that the first layer received."""
    dtype = comm.config.resolved_output_dtype

    def step(
        x: torch.Tensor, ids: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = None
        for layer in range(LAYERS):
            out, handle = comm.dispatch(x, ids[layer], weights[layer])
            rows = out.tokens if rows is None else rows
            x = comm.combine(gained(out, dtype), handle)
        assert rows is not None
        return x, rows

    return step


def expected(config: MoEConfig, steps: list[Inputs], rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(z, rows of the first layer, which of them hold a token) of a rank, by the reference."""
    xs, first = steps[0].xs, None
    for inputs in steps:
        outputs, step = reference.dispatch(config, xs, inputs.ids, inputs.weights)
        first = outputs[rank] if first is None else first
        xs, _ = reference.combine(step, [gained(out, config.resolved_output_dtype) for out in outputs])
    assert first is not None
    return xs[rank], first.tokens, delivered(first)


def steps_of(case: RoutingCase, config: MoEConfig) -> list[Inputs]:
    """Fresh routing for each layer."""
    return [Inputs.of(next_case(case, 100 * layer), config) for layer in range(LAYERS)]


def compiled_layers(comm: MoECommunicator, case: RoutingCase, how: How) -> None:
    """Every call is right, also between eager steps that recycle and poison all buffers; what a call gave stays."""
    torch._dynamo.reset()
    device, rank = comm.capabilities.device_type, comm.rank
    run = torch.compile(layers_of(comm), fullgraph=how.fullgraph, backend=how.backend, mode=how.mode)
    kept: list[Any] = []
    for number in range(how.calls):
        case = next_case(case, 1)
        if how.dynamic:
            case = replace(
                case, tokens=tuple(max(2, (t + 3 * number) % comm.config.max_tokens_per_rank) for t in case.tokens)
            )
        steps = steps_of(case, comm.config)
        x, ids, weights = steps[0].arguments(rank, device)
        all_ids, all_weights = [ids], [weights]
        for inputs in steps[1:]:
            _, ids, weights = inputs.arguments(rank, device)
            all_ids.append(ids)
            all_weights.append(weights)
        if how.dynamic:
            for tensor in (x, *all_ids, *all_weights):
                torch._dynamo.mark_dynamic(tensor, 0)
        before = comm._dispatches.num_begun
        z, rows = run(x, all_ids, all_weights)
        if how.replays:
            assert number < 3 or comm._dispatches.num_begun == before, "a call ran its operators on the host"
            z, rows = z.clone(), rows.clone()
        kept.append((number, z, rows, expected(comm.config, steps, rank)))
        for turn in range(comm.config.max_in_flight + 1):
            check_step(comm, next_case(case, 1000 + turn))
        comm.check()
    for number, z, rows, (want, first, held) in kept:
        same_bits(z, want, f"{how} z of call {number}")
        same_bits(rows.cpu()[held], first[held], f"{how} rows of call {number}")


def training_step(comm: MoECommunicator) -> Callable[..., torch.Tensor]:
    """Two differentiable layers, dense experts; the loss."""

    def loss(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            out, handle = autograd.dispatch(comm, x, ids, weights)
            y = out.tokens * scale
            if not out.layout.per_expert:
                assert out.topk_weights is not None
                assert out.topk_ids is not None
                held = delivered(out)[..., None]
                gate = torch.where(held & (out.topk_ids >= 0), out.topk_weights, 0.0).sum(-1, keepdim=True)
                y = (y.float() * gate).to(x.dtype)
            x = autograd.combine(comm, y, handle, out.topk_weights)
        return x.float().square().sum()

    return loss


def compiled_gradients(comm: MoECommunicator, case: RoutingCase, how: How) -> None:
    """Loss and gradients of a compiled training step are those of the eager one: equal bits where nothing is fused,
    else as close as the payload's dtype allows, in norm."""
    torch._dynamo.reset()
    device, dtype = comm.capabilities.device_type, comm.config.dtype
    loss = training_step(comm)
    run = torch.compile(loss, fullgraph=how.fullgraph, backend=how.backend)
    for number in range(how.calls):
        inputs = Inputs.of(next_case(case, number), comm.config)
        ids, weights = inputs.ids[comm.rank].to(device), inputs.weights[comm.rank].to(device)
        x = torch.randn(inputs.xs[comm.rank].shape, generator=torch.Generator().manual_seed(number)).to(device, dtype)
        scale = torch.linspace(0.5, 1.5, x.shape[1], device=device).to(dtype)
        results = []
        for function in (loss, run):
            leaves = [t.clone().requires_grad_() for t in (x, weights, scale)]
            value = function(leaves[0], ids, leaves[1], leaves[2])
            value.backward()  # type: ignore[no-untyped-call]
            results.append([value.detach()[None], *(leaf.grad for leaf in leaves)])
        for name, eager, compiled in zip(("loss", "dx", "dw", "dscale"), *results, strict=True):
            if how.backend == "inductor":
                error = float((compiled.float() - eager.float()).norm() / eager.float().norm())
                assert error < (0.03 if dtype is torch.bfloat16 else 1e-5), f"{case} {name}: relative error {error}"
            else:
                same_bits(compiled, eager, f"{case} {name}")
        check_step(comm, next_case(case, 1000 + number))
