"""Stories of transports whose work runs on streams of a device. Each runs on every rank."""

from __future__ import annotations

import torch

from ep_kernels import MoECommunicator
from ep_kernels.types import Layout
from tests.cases import RoutingCase
from tests.compare import expert, same_bits
from tests.transports.steps import Inputs, caught_up, check_dispatch, next_case


def any_stream(comm: MoECommunicator, case: RoutingCase, rounds: int = 12) -> None:
    """Each half on another stream than the one before, with nothing but the communicator to order them, while the
    stream that is left behind has work of its own."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    at = 0

    def elsewhere() -> torch.cuda.StreamContext:
        nonlocal at
        with torch.cuda.stream(streams[at % 3]):
            torch.cuda._sleep(2_000_000)
        at += 1
        return torch.cuda.stream(streams[at % 3])

    for number in range(rounds):
        inputs = Inputs.of(next_case(case, number), comm.config)
        arguments = inputs.arguments(comm.rank, "cuda")
        torch.cuda.synchronize()
        with elsewhere():
            request = comm.dispatch_async(*arguments)
        with elsewhere():
            out, handle = request.wait()
            expected = check_dispatch(comm, inputs, out)
            y = expert(out, comm.config.resolved_output_dtype)
            combining = comm.combine_async(y, handle)
        with elsewhere():
            z = combining.wait()
            same_bits(z, expected.combined(comm.rank), f"z of step {number}")
        del request, out, handle, combining, z


def never_waits_for_the_device(comm: MoECommunicator, case: RoutingCase) -> None:
    """Where no shape depends on counts, or the routing is used again, calls return while the stream is far behind."""
    inputs = Inputs.of(case, comm.config)
    arguments = inputs.arguments(comm.rank, "cuda")
    out, handle = comm.dispatch(*arguments)
    y = expert(out, comm.config.resolved_output_dtype)
    comm.combine(y, handle)
    torch.cuda.synchronize()
    comm.barrier()
    behind = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    behind.record()
    previous = handle if comm.config.exact_shapes and out.layout in (Layout.GROUPED, Layout.FLAT) else None
    out, handle = comm.dispatch(*arguments, previous_handle=previous)
    z = comm.combine(y, handle)
    assert not behind.query(), "a call waited for the device"
    caught_up(comm)
    same_bits(z, check_dispatch(comm, inputs, out).combined(comm.rank), "z")
