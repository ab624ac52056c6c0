"""What a rank does in the contract suite: build a communicator, run steps, compare each with the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_kernels import MoECommunicator, StoreGroup, reference
from ep_kernels.config import MoEConfig
from ep_kernels.types import DispatchHandle, DispatchOutput, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.compare import expert, filled_rows, packed_layout, poison, same_bits, same_dispatch
from tests.hosts import overrides_of

Store = Any
"""torch.distributed.Store, a name that torch does not export to type checkers."""
_names = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where a rank function runs: what World.run gives, and the transport under test."""

    rank: int
    size: int
    store: Store
    transport: str

    def group(self, name: str = "", epoch: int = 0) -> StoreGroup:
        """A group over the run's store; `name` tells communicators of one run apart."""
        return StoreGroup(self.store, self.rank, self.size, epoch=epoch, name=name or f"auto-{next(_names)}")

    def config(self, case: RoutingCase, name: str = "first", **overrides: Any) -> MoEConfig:
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        return case.config(self.group(name), **(self.overrides() | {"timeout_s": 20.0} | overrides))

    def overrides(self) -> dict[str, Any]:
        """The transport under test, and its network."""
        return overrides_of(self.transport, self.rank, self.size, seed=draw_seed())

    @contextmanager
    def communicator(self, case: RoutingCase, name: str = "first", **overrides: Any) -> Iterator[MoECommunicator]:
        with MoECommunicator(self.config(case, name, **overrides)) as comm:
            yield comm


@dataclass
class Inputs:
    """Everybody's arguments of one step, on the CPU."""

    xs: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, case: RoutingCase, config: MoEConfig) -> Inputs:
        ranks = range(case.num_ranks)
        columns, scales = config.scale_columns, None
        if columns:
            scales = [case.scales(r, columns, config.scale_dtype) for r in ranks]
        elif config.quantize == "nvfp4":
            scales = [torch.tensor([448 * 6 / 2.0**r]) for r in ranks]
        return cls(
            xs=[case.x(r, config.dtype) for r in ranks],
            scales=scales,
            ids=[case.topk_ids(r) for r in ranks],
            weights=[case.topk_weights(r) for r in ranks],
        )

    def arguments(self, rank: int, device: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """(x | (x, scales), topk_ids, topk_weights) of one rank, on the device."""
        x: Any = self.xs[rank].to(device)
        if self.scales is not None:
            x = (x, self.scales[rank].to(device))
        return x, self.ids[rank].to(device), self.weights[rank].to(device)


class Expected:
    """What the reference says of one step."""

    def __init__(self, comm: MoECommunicator, inputs: Inputs) -> None:
        self.config, self.domains = comm.config, comm.domains
        self.outputs, self.step = reference.dispatch(
            comm.config, inputs.xs, inputs.ids, inputs.weights, scales=inputs.scales, active=comm.active
        )

    def combined(self, rank: int) -> torch.Tensor:
        """z of this rank when all run the toy experts."""
        ys = [expert(out, self.config.resolved_output_dtype) for out in self.outputs]
        return reference.combine(self.step, ys, domains=self.domains, sources=[rank])[0][0]


def start(comm: MoECommunicator, case: RoutingCase, **options: Any) -> tuple[Any, Inputs]:
    """dispatch_async of this rank's part of the case."""
    inputs = Inputs.of(case, comm.config)
    device = comm.capabilities.device_type
    request = comm.dispatch_async(*inputs.arguments(comm.rank, device), **options)
    return request, inputs


def caught_up(comm: MoECommunicator) -> None:
    """On devices that work asynchronously an error shows at the first check after the stream has caught up."""
    if comm.capabilities.device_type == "cuda":
        torch.cuda.synchronize()
    comm.check()


def settled(comm: MoECommunicator, call: Callable[[], Any]) -> None:
    """Make the call and raise what it met, wherever it shows."""
    call()
    caught_up(comm)


def check_dispatch(comm: MoECommunicator, inputs: Inputs, out: DispatchOutput) -> Expected:
    """The dispatch is what the reference says."""
    expected = Expected(comm, inputs)
    same_dispatch(out, expected.outputs[comm.rank], filled_rows(comm.config))
    if comm.config.scale_format is ScaleFormat.UE8M0_PACKED:
        assert out.scales is not None
        packed_layout(out.scales)
    return expected


def check_combine(
    comm: MoECommunicator, expected: Expected, out: DispatchOutput, handle: DispatchHandle, zero_copy: bool = False
) -> None:
    """Toy experts on what was delivered; the combine is what the reference says."""
    y = expert(out, comm.config.resolved_output_dtype)
    if zero_copy:
        y = comm.combine_input(handle).copy_(y)
    z = torch.full((handle.num_tokens, y.shape[-1]), float("nan"), dtype=y.dtype, device=y.device)
    assert comm.combine(y, handle, out=z) is z
    caught_up(comm)
    same_bits(z, expected.combined(comm.rank), "z")


def check_step(comm: MoECommunicator, case: RoutingCase, zero_copy: bool = False, **options: Any) -> DispatchHandle:
    """One whole step; then the received buffer is poisoned before it is recycled."""
    before = comm.dropped_rows()
    try:
        request, inputs = start(comm, case, **options)
        out, handle = request.wait()
        caught_up(comm)
        expected = check_dispatch(comm, inputs, out)
        assert comm.dropped_rows() == before + int(expected.outputs[comm.rank].num_dropped)
        check_combine(comm, expected, out, handle, zero_copy)
    except AssertionError as error:
        raise AssertionError(f"{case} {options}: {error}") from error
    poison(out.tokens)
    return handle  # type: ignore[no-any-return]


def run_cases(
    rank: int,
    size: int,
    store: Store,
    transport: str,
    cases: Sequence[RoutingCase],
    overrides: dict[str, Any],
    step_tokens: tuple[int | None, ...] = (None,),
    zero_copy: bool = False,
) -> None:
    """All cases (of equal sizes) through one communicator, `step_tokens` taking turns."""
    place = Place(rank, size, store, transport)
    with place.communicator(cases[0], **overrides) as comm:
        for case, asked in zip(cases, itertools.cycle(step_tokens), strict=False):
            tokens = None if asked is None else max(asked, *case.tokens)
            check_step(comm, case, zero_copy, step_tokens=tokens)


def run_story(
    rank: int,
    size: int,
    store: Store,
    transport: str,
    story: Callable[[MoECommunicator, RoutingCase], Any],
    case: RoutingCase,
    overrides: dict[str, Any],
) -> Any:
    """Run a story over a fresh communicator; what it returns is the rank's result."""
    with Place(rank, size, store, transport).communicator(case, **overrides) as comm:
        return story(comm, case)


def next_case(case: RoutingCase, number: int) -> RoutingCase:
    """Other ids, weights and payload of the same sizes."""
    return replace(case, seed=case.seed + number)
