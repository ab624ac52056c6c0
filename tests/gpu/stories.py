"""What ranks do in test_several_gpus.py. Each story runs on every rank, over a communicator of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ep_kernels import MoECommunicator
from tests.cases import KINDS, RoutingCase
from tests.compare import expert, poison, same_bits, same_dispatch
from tests.gpu.loopback import Loopback
from tests.transports.steps import (
    Expected,
    Inputs,
    Place,
    Store,
    check_combine,
    check_dispatch,
    check_step,
    next_case,
    start,
)


def replayed_graph(comm: MoECommunicator, case: RoutingCase, pairs: int = 4, replays: int = 12) -> None:
    """Several dispatch + combine pairs in one graph, replayed with other routing, counts and payload each time: every
    kind of routing comes up, tokens without any expert and ids out of range included."""
    device = comm.capabilities.device_type
    statics = [Inputs.of(case, comm.config).arguments(comm.rank, device) for _ in range(pairs)]
    check_step(comm, case)
    torch.cuda.synchronize()
    comm.barrier()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for x, ids, weights in statics:
            out, handle = comm.dispatch(x, ids, weights)
            y = expert(out, comm.config.resolved_output_dtype)
            results.append((out, comm.combine(y, handle)))
    for replay in range(replays):
        steps = [Inputs.of(any_kind(case, replay * pairs + n), comm.config) for n in range(pairs)]
        for static, inputs in zip(statics, steps, strict=True):
            for kept, fresh in zip(static, inputs.arguments(comm.rank, device), strict=True):
                kept.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        for n, (inputs, (out, z)) in enumerate(zip(steps, results, strict=True)):
            expected = Expected(comm, inputs)
            same_bits(z, expected.combined(comm.rank), f"z of pair {n} in replay {replay}")
            if n >= pairs - comm.config.max_in_flight:  # views of earlier pairs have been recycled
                same_dispatch(out, expected.outputs[comm.rank])
        check_step(comm, next_case(case, 1000 + replay))  # eager steps and replays mix


def phases_in_a_graph(comm: MoECommunicator, case: RoutingCase, replays: int = 300, looks: int = 10) -> None:
    """One graph in which both dispatches send before either receives, and so do both combines; replayed with other
    routing, counts and payload each time. Nobody waits for the device but to look, now and then; what a replay
    delivered is poisoned before the next."""
    device, dtype = comm.capabilities.device_type, comm.config.resolved_output_dtype
    statics = [Inputs.of(any_kind(case, n), comm.config).arguments(comm.rank, device) for n in range(2)]
    check_step(comm, case)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatching = [comm.dispatch_async(*static) for static in statics]
        delivered = [request.wait() for request in dispatching]
        combining = [comm.combine_async(expert(out, dtype), handle) for out, handle in delivered]
        results = [request.wait() for request in combining]
    for replay in range(replays):
        steps = [any_kind(case, 2 * replay + n) for n in range(2)]
        for static, step in zip(statics, steps, strict=True):
            fresh = step.x(comm.rank, comm.config.dtype), step.topk_ids(comm.rank), step.topk_weights(comm.rank)
            for kept, new in zip(static, fresh, strict=True):
                kept.copy_(new)
        graph.replay()
        looked_at = (replay + 1) % (replays // looks) == 0
        if looked_at:
            torch.cuda.synchronize()
            comm.check()
        for n, (step, (out, _), z) in enumerate(zip(steps, delivered, results, strict=True)):
            if looked_at:
                expected = Expected(comm, Inputs.of(step, comm.config))
                same_dispatch(out, expected.outputs[comm.rank])
                same_bits(z, expected.combined(comm.rank), f"z of pair {n} in replay {replay}")
            poison(out.tokens)
            poison(z)
        if looked_at:
            check_step(comm, next_case(case, 1_000_000 + replay))  # eager steps and replays mix


def any_kind(case: RoutingCase, number: int) -> RoutingCase:
    """Fresh routing; the kinds take turns. All ids of a token are distinct."""
    kinds = [kind for kind in KINDS if kind != "repeated"]
    return replace(next_case(case, number), kind=kinds[number % len(kinds)])


def delayed(comm: MoECommunicator, case: RoutingCase, steps: int = 24) -> None:
    """Ranks and phases drift apart by up to a few milliseconds; every buffer is poisoned before it is recycled."""
    draw = random.Random(case.seed * 64 + comm.rank)
    for number in range(steps):
        drift(draw)
        request, inputs = start(comm, next_case(case, number))
        drift(draw)
        out, handle = request.wait()
        expected = check_dispatch(comm, inputs, out)
        y = expert(out, comm.config.resolved_output_dtype)
        drift(draw)
        combining = comm.combine_async(y, handle)
        drift(draw)
        same_bits(combining.wait(), expected.combined(comm.rank), f"z of step {number}")
        poison(out.tokens)


def drift(draw: random.Random) -> None:
    if draw.random() < 0.5:
        torch.cuda._sleep(int(draw.random() ** 3 * 6e6))


def two_streams(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, overrides: dict[str, Any]
) -> None:
    """Two communicators on two streams, launched in the same order on all ranks."""
    place = Place(rank, size, store, transport)
    with place.communicator(case, "a", **overrides) as a, place.communicator(case, "b", **overrides) as b:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for turn in range(20):
            begun = []
            for comm, stream in zip((a, b), streams, strict=True):
                with torch.cuda.stream(stream):
                    begun.append(start(comm, next_case(case, turn)))
            for comm, stream, (request, inputs) in zip((a, b), streams, begun, strict=True):
                with torch.cuda.stream(stream):
                    out, handle = request.wait()
                    check_combine(comm, check_dispatch(comm, inputs, out), out, handle)


def moved_between_streams(comm: MoECommunicator, case: RoutingCase, steps: int = 24) -> None:
    """Dispatch on one stream, combine late on another, streams in turns: what both used is dropped while the combine
    waits, and what torch gives out on the first stream next is poisoned."""
    device, dtype = comm.capabilities.device_type, comm.config.resolved_output_dtype
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    num_words = engine_of(comm).blanks[1].numel()
    for number in range(steps):
        first, second = streams if number % 3 else reversed(streams)
        inputs = Inputs.of(next_case(case, number), comm.config)
        with torch.cuda.stream(first):
            out, handle = comm.dispatch(*inputs.arguments(comm.rank, device))
            y = expert(out, dtype)
        expected, like = Expected(comm, inputs), (y.shape, y.dtype)
        with torch.cuda.stream(second):
            second.wait_stream(first)
            torch.cuda._sleep(int(4e6))
            z = comm.combine(y, handle)
        del out, handle, y
        with torch.cuda.stream(first):
            for _ in range(4):
                poison(torch.empty(num_words, dtype=torch.int32, device=device))
                poison(torch.empty(like[0], dtype=like[1], device=device))
        torch.cuda.synchronize()
        comm.check()
        same_bits(z, expected.combined(comm.rank), f"z of step {number}")


def agrees_at_any_size(comm: MoECommunicator, case: RoutingCase) -> None:
    """A serving-sized step, twice: equal to the reference and so to itself."""
    for number in range(2):
        check_step(comm, next_case(case, number))


def wrapped(comm: MoECommunicator, case: RoutingCase, start_at: int) -> None:
    """Sequence numbers pass 2^31 or 2^32, in eager steps and in a replayed graph."""
    for turn in range(3):
        check_step(comm, next_case(case, turn))
    preset(comm, start_at)
    modes = set()
    for turn in range(10):
        tokens = None if turn % 2 else max(case.tokens)
        modes.add(check_step(comm, next_case(case, turn), step_tokens=tokens).mode)
        comm.barrier()
    dispatch, _, barrier = engine_of(comm).tables.sequence()
    assert dispatch == start_at + 10
    assert barrier == start_at + 10
    assert len(modes) == 2
    preset(comm, start_at)
    replayed_graph(comm, case, pairs=3, replays=3)


def engine_of(comm: MoECommunicator) -> Any:
    """The engine behind a communicator of transport nvlink."""
    return comm._transport._engine  # type: ignore[attr-defined]


def preset(comm: MoECommunicator, value: int) -> None:
    """Let all ranks go on counting from `value`, as the loop-back harness does."""
    comm.barrier()
    torch.cuda.synchronize()
    comm.exchange([0] * 8)  # nobody's kernels touch anybody's region any more
    engine = engine_of(comm)
    region = SimpleNamespace(data=engine._memory.view(0, (engine.region_bytes,), torch.uint8))
    remote = comm._transport._remote  # type: ignore[attr-defined]
    alone = SimpleNamespace(engines=[engine], memory=[region], remotes=[] if remote is None else [remote])
    Loopback.preset(alone, value)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    comm.exchange([0] * 8)
