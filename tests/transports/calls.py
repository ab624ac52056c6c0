"""Stories of calls: handles, requests, arguments, waiting. Each runs on every rank, over a communicator of its own."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels import MoECommunicator
from ep_kernels.errors import AbortedError, ArgumentError, CapacityError, ClosedError, HandleError
from tests.cases import RoutingCase
from tests.compare import expert, poison, same_bits, same_dispatch
from tests.transports.steps import (
    Expected,
    Inputs,
    caught_up,
    check_combine,
    check_dispatch,
    check_step,
    next_case,
    settled,
    start,
)


def previous_handle(comm: MoECommunicator, case: RoutingCase) -> None:
    """Same routing, other payload and weights; the handle is from long ago."""
    request, first = start(comm, case)
    out, handle = request.wait()
    poison(out.tokens)
    for number in range(1, 2 * comm.config.max_in_flight + 2):
        check_step(comm, next_case(case, 1000 + number))
        fresh = Inputs.of(next_case(case, number), comm.config)
        again = replace_weights(first, fresh, new_weights=number % 2 == 0)
        x, ids, weights = again.arguments(comm.rank, comm.capabilities.device_type)
        if number % 3 == 0:
            ids = torch.full_like(ids, -1)  # not looked at
        out, newer = comm.dispatch(x, ids, weights if number % 2 == 0 else None, previous_handle=handle)
        expected = check_dispatch(comm, again, out)
        check_combine(comm, expected, out, newer)
        assert newer.mode is handle.mode
        y = expert(out, comm.config.resolved_output_dtype)
        same_bits(comm.combine(y, newer), expected.combined(comm.rank), "combined twice")
        poison(out.tokens)


def replace_weights(first: Inputs, fresh: Inputs, new_weights: bool) -> Inputs:
    """`first`'s routing with `fresh`'s payload and perhaps weights."""
    return Inputs(fresh.xs, fresh.scales, first.ids, fresh.weights if new_weights else first.weights)


def handles_of_different_steps(comm: MoECommunicator, case: RoutingCase) -> None:
    """Ranks that bring different handles to one operation are told so, all of them, and go on."""
    (out, handle), (_, other) = (start(comm, next_case(case, n))[0].wait() for n in range(2))
    y = expert(out, comm.config.resolved_output_dtype)
    inputs = Inputs.of(case, comm.config)
    arguments = inputs.arguments(comm.rank, comm.capabilities.device_type)
    mine = other if comm.rank == 0 else handle
    for previous in (mine, None if comm.rank == 0 else handle):
        with pytest.raises(HandleError, match="dispatch: this rank brought the routing of dispatch"):
            settled(comm, lambda previous=previous: comm.dispatch(*arguments, previous_handle=previous))
    zeros = torch.zeros(*mine.rows_shape, y.shape[-1], dtype=y.dtype, device=y.device)
    with pytest.raises(HandleError, match="combine: this rank brought the routing of dispatch"):
        settled(comm, lambda: comm.combine(zeros, mine))
    comm.check()  # told once
    for number in range(2 * comm.config.max_in_flight):
        check_step(comm, next_case(case, number))


def steps_of_different_sizes(comm: MoECommunicator, case: RoutingCase) -> None:
    """AUTO, where one rank's `step_tokens` says LL and the others' HT: all are told, and the next step is right."""
    small, large = comm.ll_max_tokens, comm.config.max_tokens_per_rank
    for turn in range(2):
        arguments = Inputs.of(next_case(case, turn), comm.config).arguments(comm.rank, _type(comm))
        says = r"step_tokens: expected one that is equal .* here it chooses (LL|HT), got (HT|LL) on rank \d"
        with pytest.raises(ArgumentError, match=says):
            comm.dispatch(*arguments, step_tokens=small if comm.rank == turn else large)
        for tokens in (small, large):
            check_step(comm, next_case(case, 10 * turn), step_tokens=tokens)


def two_in_flight(comm: MoECommunicator, case: RoutingCase) -> None:
    """Waits in either order; combines of two dispatches in either order."""
    dtype = comm.config.resolved_output_dtype
    for turn in range(6):
        requests = [start(comm, next_case(case, 2 * turn + n)) for n in range(2)]
        order = (0, 1) if turn % 2 else (1, 0)
        done: dict[int, Any] = {}
        for n in order:
            request, inputs = requests[n]
            out, handle = request.wait()
            assert request.wait()[1] is handle
            done[n] = (check_dispatch(comm, inputs, out), out, handle)
        combines = {n: comm.combine_async(expert(done[n][1], dtype), done[n][2]) for n in (0, 1)}
        for n in reversed(order):
            z = combines[n].wait()
            same_bits(z, done[n][0].combined(comm.rank), f"z of {n} in turn {turn}")
            assert combines[n].wait() is z
        for n in order:
            poison(done[n][1].tokens)


def dual_batch(comm: MoECommunicator, case: RoutingCase) -> None:
    """A combine stays open over the next dispatch, as dual-batch overlap does."""
    dtype = comm.config.resolved_output_dtype
    waiting: Any = None
    for turn in range(8):
        request, inputs = start(comm, next_case(case, turn))
        if waiting is not None:
            same_bits(waiting[0].wait(), waiting[1].combined(comm.rank), f"z before turn {turn}")
        out, handle = request.wait()
        expected = check_dispatch(comm, inputs, out)
        waiting = (comm.combine_async(expert(out, dtype), handle), expected)
    waiting[0].wait()


def too_many_in_flight(comm: MoECommunicator, case: RoutingCase) -> None:
    """The limit is told before anything is sent."""
    requests = [start(comm, next_case(case, n)) for n in range(comm.config.max_in_flight)]
    with pytest.raises(HandleError, match="max_in_flight"):
        start(comm, case)
    for request, inputs in requests:
        out, handle = request.wait()
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
    check_step(comm, case)


def dropped_requests(comm: MoECommunicator, case: RoutingCase) -> None:
    """Nobody can wait for a request that was dropped, as by an exception: later operations receive it instead of being
    refused for good. What is received of others is right, on ranks that waited and on those that did not."""
    dtype, flight = comm.config.resolved_output_dtype, comm.config.max_in_flight
    for turn in range(3):
        waits = comm.rank == turn
        request, inputs = start(comm, next_case(case, turn))
        if waits:
            check_dispatch(comm, inputs, request.wait()[0])
        del request
        for n in range(flight):
            out, handle = comm.dispatch(*Inputs.of(next_case(case, n), comm.config).arguments(comm.rank, _type(comm)))
            combining = comm.combine_async(expert(out, dtype), handle)
            if waits:
                combining.wait()
            del combining
        for n in range(flight + 1):
            check_step(comm, next_case(case, 100 * turn + n))


def _type(comm: MoECommunicator) -> str:
    return comm.capabilities.device_type


def overtaken(comm: MoECommunicator, case: RoutingCase) -> None:
    """A request may wait while max_in_flight - 1 later operations come and go; one more would take its slot: it
    is refused before anything is sent. What waited is whole."""
    flight, dtype = comm.config.max_in_flight, comm.config.resolved_output_dtype
    for turn in range(3):
        cases = [next_case(case, flight * turn + n) for n in range(flight)]
        request, inputs = start(comm, cases[0])
        for later in cases[1:]:
            other, its_inputs = start(comm, later)
            out, _ = other.wait()
            check_dispatch(comm, its_inputs, out)
            poison(out.tokens)
        with pytest.raises(HandleError, match=r"dispatch: .*max_in_flight"):
            start(comm, case)
        out, handle = request.wait()
        expected = check_dispatch(comm, inputs, out)
        combining = comm.combine_async(expert(out, dtype), handle)
        for _ in cases[1:]:
            check_combine(comm, expected, out, handle)
        with pytest.raises(HandleError, match=r"combine: .*max_in_flight"):
            comm.combine(expert(out, dtype), handle)
        same_bits(combining.wait(), expected.combined(comm.rank), f"z in turn {turn}")
        check_step(comm, next_case(case, 1000 + turn))


def inputs_may_be_reused(comm: MoECommunicator, case: RoutingCase) -> None:
    """Overwriting x, ids, weights and y right after the send half changes nothing."""
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = (t.clone() for t in inputs.arguments(comm.rank, comm.capabilities.device_type))
    request = comm.dispatch_async(x, ids, weights)
    for argument in (x, ids, weights):
        poison(argument)
    out, handle = request.wait()
    expected = check_dispatch(comm, inputs, out)
    y = expert(out, comm.config.resolved_output_dtype)
    combining = comm.combine_async(y, handle)
    poison(y)
    same_bits(combining.wait(), expected.combined(comm.rank), "z")


def expired_views(comm: MoECommunicator, case: RoutingCase) -> None:
    """Views live for max_in_flight dispatches, handles longer."""
    flight = comm.config.max_in_flight
    handle = check_step(comm, case)
    for number in range(1, flight):
        check_step(comm, next_case(case, number))
        assert comm.is_current(handle)
        comm.combine_input(handle)
    request, inputs = start(comm, case)
    assert not comm.is_current(handle)
    with pytest.raises(HandleError, match="recycled"):
        comm.combine_input(handle)
    out, newer = request.wait()
    assert comm.is_current(newer)
    y = expert(out, comm.config.resolved_output_dtype)
    same_bits(comm.combine(y, handle), comm.combine(y, newer), "an old handle of the same routing still combines")
    check_dispatch(comm, inputs, out)


def bad_arguments(comm: MoECommunicator, case: RoutingCase) -> int:
    """Each is refused by name, sends nothing, and leaves the communicator as it was."""
    x, ids, weights = Inputs.of(case, comm.config).arguments(comm.rank, comm.capabilities.device_type)
    out, handle = comm.dispatch(x, ids, weights)
    y = expert(out, comm.config.resolved_output_dtype)
    rows, width = x.shape
    wide = torch.zeros(rows, 2 * width, dtype=x.dtype)
    room = y.new_empty(y.numel() + (rows - 1) * width)  # of y and an out, with a row in common
    table: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("x", (None, ids, weights), {}),
        ("x", (x.float(), ids, weights), {}),
        ("x", (x[:, :-8], ids, weights), {}),
        ("x", (x[0], ids, weights), {}),
        ("x", (x[None], ids, weights), {}),
        ("x", (wide[:, ::2], ids, weights), {}),
        ("x", (wide[:, :width], ids, weights), {}),
        ("x", (x.to("meta"), ids, weights), {}),
        ("x", (x.to_sparse(), ids, weights), {}),
        ("x", (x.repeat(comm.config.max_tokens_per_rank, 1), ids, weights), {}),
        ("x", ((x, x), ids, weights), {}),
        ("topk_ids", (x, ids[:-1], weights), {}),
        ("topk_ids", (x, ids[:, :-1], weights), {}),
        ("topk_ids", (x, ids.float(), weights), {}),
        ("topk_ids", (x, ids.short(), weights), {}),
        ("topk_ids", (x, ids.T.contiguous().T, weights), {}),
        ("topk_ids", (x, ids.tolist(), weights), {}),
        ("topk_ids", (x, None, weights), {}),
        ("topk_weights", (x, ids, weights.double()), {}),
        ("topk_weights", (x, ids, weights[:, :1]), {}),
        ("topk_weights", (x, ids, None), {}),
        ("step_tokens", (x, ids, weights), {"step_tokens": rows - 1}),
        ("step_tokens", (x, ids, weights), {"step_tokens": comm.config.max_tokens_per_rank + 1}),
        ("step_tokens", (x, ids, weights), {"step_tokens": 3.0}),
    ]
    for name, arguments, options in table:
        with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got "):
            comm.dispatch(*arguments, **options)
    combines: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("y", (y.double(), handle), {}),
        ("y", (y[..., :-1], handle), {}),
        ("y", (torch.cat([y, y]), handle), {}),
        ("y", (None, handle), {}),
        ("handle", (y, None), {}),
        ("out", (y, handle), {"out": torch.empty(rows + 1, width, dtype=y.dtype)}),
        ("out", (y, handle), {"out": torch.empty(rows, width, dtype=torch.float64)}),
        ("out", (room[: y.numel()].view(y.shape), handle), {"out": room[-rows * width :].view(rows, width)}),
    ]
    for name, arguments, options in combines:
        with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got "):
            comm.combine(*arguments, **options)
    with pytest.raises(ArgumentError, match="row_weights"):
        comm.combine_async(y, handle, row_weights=torch.zeros(1, 1, 1, 1))
    for words in ([0] * 7, [1 << 63] * 8):
        with pytest.raises(ArgumentError, match="words"):
            comm.exchange(words)
    comm.check()
    same_bits(comm.combine(y, handle), Expected(comm, Inputs.of(case, comm.config)).combined(comm.rank), "z")
    check_step(comm, next_case(case, 1))
    return len(table) + len(combines)


def wide_ids(comm: MoECommunicator, case: RoutingCase) -> None:
    """int64 ids past int32 are out of range, not some other expert."""
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = inputs.arguments(comm.rank, comm.capabilities.device_type)
    wide = ids.long()
    wide[:, 0] += 1 << 32
    out, handle = comm.dispatch(x, wide, weights)
    inputs.ids = [torch.cat([torch.full_like(i[:, :1], 1 << 30), i[:, 1:]], 1) for i in inputs.ids]
    check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
    assert int(out.num_invalid_ids) == len(ids)


def validates(comm: MoECommunicator, case: RoutingCase) -> None:
    """`validate=True` refuses what otherwise acts as -1 or propagates."""
    x, ids, weights = Inputs.of(case, comm.config).arguments(comm.rank, comm.capabilities.device_type)
    for wrong in (-2, case.num_experts):
        bad = ids.clone()
        bad[-1, -1] = wrong
        with pytest.raises(ArgumentError, match=f"topk_ids: expected -1 or 0..{case.num_experts - 1}, got {wrong}"):
            comm.dispatch(x, bad, weights)
    hurt = weights.clone()
    hurt[0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="topk_weights: expected no NaN, got 1"):
        comm.dispatch(x, ids, hurt)
    check_step(comm, case)


def nan_weights_propagate(comm: MoECommunicator, case: RoutingCase) -> None:
    """Into their own token and no other."""
    inputs = Inputs.of(case, comm.config)
    for weights in inputs.weights:
        weights[0, 0] = float("nan")
    out, handle = comm.dispatch(*inputs.arguments(comm.rank, comm.capabilities.device_type))
    check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
    if out.layout.per_expert:  # elsewhere it is the caller who weights
        z = comm.combine(torch.ones_like(expert(out, comm.config.resolved_output_dtype)), handle)
        assert z[0].isnan().all()
        assert not z[1:].isnan().any()


def overflow_raises(comm: MoECommunicator, case: RoutingCase) -> int:
    """Only ranks that overflow raise; the error lets them take part in the combine; the group goes on."""
    request, inputs = start(comm, case)
    expected = Expected(comm, inputs)
    want, before = expected.outputs[comm.rank], comm.dropped_rows()
    if int(want.num_dropped):
        with pytest.raises(CapacityError) as error:
            request.wait()
        assert error.value.num_dropped == int(want.num_dropped)
        out, handle = error.value.output, error.value.handle
        with pytest.raises(CapacityError):
            request.wait()
    else:
        out, handle = request.wait()
    same_dispatch(out, want)
    check_combine(comm, expected, out, handle)
    assert comm.dropped_rows() == before + int(want.num_dropped)
    check_step(comm, replace(case, kind="none"))
    return int(want.num_dropped)


def repeated_ids_overflow(comm: MoECommunicator, case: RoutingCase) -> None:
    """EXPERT_MAJOR without `max_recv_rows` has no room for the same id K times in every token: never silently."""
    x, ids, weights = Inputs.of(case, comm.config).arguments(comm.rank, comm.capabilities.device_type)
    dropped = comm.size * case.tokens[0] * (case.topk - 1)
    if comm.rank == 0:
        with pytest.raises(CapacityError, match=f"{dropped} rows"):
            settled(comm, lambda: comm.dispatch(x, torch.zeros_like(ids), weights))
        comm.check()  # told once
    else:
        settled(comm, lambda: comm.dispatch(x, torch.zeros_like(ids), weights))
    check_step(comm, case)


def closed(comm: MoECommunicator, case: RoutingCase) -> None:
    """Idempotent; whatever comes later says so; tensors stay readable."""
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = inputs.arguments(comm.rank, comm.capabilities.device_type)
    out, handle = comm.dispatch(x, ids, weights)
    comm.barrier()
    comm.close()
    comm.close()
    check_dispatch(comm, inputs, out)
    calls = [
        lambda: comm.dispatch(x, ids, weights),
        lambda: comm.combine(expert(out, x.dtype), handle),
        lambda: comm.combine_input(handle),
        lambda: comm.set_active([True] * comm.size, 5),
        lambda: comm.exchange([0] * 8),
        lambda: comm.wait_for_peer(0.1),
        comm.barrier,
        comm.check,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    comm.wake()
    comm.abort("late")
    assert comm.samples() == []
    with pytest.raises(ClosedError):
        comm.check()


def aborts(comm: MoECommunicator, case: RoutingCase) -> None:
    """abort() from another thread ends a wait that nobody else will end, and every later one."""
    comm.barrier()
    if comm.rank == 0:
        request, _ = start(comm, case)  # the others never dispatch
        timer = threading.Timer(0.2, comm.abort, ["re-forming"])
        timer.start()
        begin = time.monotonic()
        with pytest.raises(AbortedError, match="re-forming"):
            settled(comm, request.wait)
        assert time.monotonic() - begin < comm.config.timeout_s / 2
        timer.join()
        calls: list[Any] = [comm.check, comm.barrier, lambda: comm.set_active([True] * comm.size, 9)]
        for call in [*calls, lambda: start(comm, case)]:
            with pytest.raises(AbortedError, match="re-forming"):
                call()


def meetings(comm: MoECommunicator, case: RoutingCase) -> None:
    """exchange, wait_for_peer and wake."""
    low, high = -(1 << 63), (1 << 63) - 1
    for turn in range(20):
        got = comm.exchange([comm.rank, turn, low, high, 0, -1, comm.rank * turn, 7])
        assert got == [(r, turn, low, high, 0, -1, r * turn, 7) for r in range(comm.size)]
    samples = [sample for sample in comm.samples() if sample.op == "exchange"]
    assert len(samples) == 20 * comm.capabilities.samples
    for before, sample in itertools.pairwise(samples):
        assert sample.seq == before.seq + 1
        assert sample.start_ns >= before.start_ns + before.total_ns
        assert sample.peer_wait_ns[comm.rank] == 0
        assert sample.send_ns + max(sample.peer_wait_ns) <= sample.total_ns
    comm.barrier()
    if comm.rank == 0:
        comm.wake()
        assert comm.wait_for_peer(5.0), "a wake before the call counts"
        begin = time.monotonic()
        assert not comm.wait_for_peer(0.05)
        assert time.monotonic() - begin >= 0.05
        threading.Timer(0.05, comm.wake).start()
        assert comm.wait_for_peer(10.0)
        comm.barrier()
        if comm.size > 1:
            assert comm.wait_for_peer(10.0), "peers are in an exchange by now"
            assert comm.wait_for_peer(10.0), "and stay visible until this rank enters it"
    else:
        comm.barrier()
    comm.exchange([0] * 8)
    check_step(comm, case)


def received(comm: MoECommunicator, case: RoutingCase) -> None:
    """Tokens of each rank that came here, once each, by a routing used again too; counted once that is asked for."""
    owner = torch.tensor([copies[0][0] for copies in case.expert_map.replicas])
    wanted = torch.zeros(comm.size, dtype=torch.int64)
    assert comm.received() is None
    check_step(comm, case)
    comm.count_received()
    for number in range(4):
        inputs = Inputs.of(next_case(case, number), comm.config)
        arguments = inputs.arguments(comm.rank, comm.capabilities.device_type)
        _, handle = comm.dispatch(*arguments)
        _, _ = comm.dispatch(arguments[0], None, None, previous_handle=handle)
        here = [((ids >= 0) & (owner[ids.long()] == comm.rank)).any(1).sum() for ids in inputs.ids]
        wanted += 2 * torch.stack(here)
    caught_up(comm)
    comm.count_received()
    assert comm.received() == wanted.tolist()
    assert wanted.sum() > 0
    comm.barrier()
    comm.close()
    assert comm.received() is None


def sampled(comm: MoECommunicator, case: RoutingCase) -> None:
    """One record per operation, with nothing waited for at oneself."""
    comm.samples()
    for number in range(3):
        check_step(comm, next_case(case, number))
    samples = comm.samples()
    assert [s.op for s in samples] == ["dispatch", "combine"] * 3
    assert [s.seq for s in samples] == sorted(s.seq for s in samples)
    for op in ("dispatch", "combine"):
        found = [s for s in samples if s.op == op]
        gaps = [s.seq - found[0].seq - number for number, s in enumerate(found)]
        assert gaps == [0] * 3
    for s in samples:
        assert s.tokens == case.tokens[comm.rank]
        assert s.mode == comm.config.mode.value
        assert len(s.peer_wait_ns) == comm.size
        assert s.peer_wait_ns[comm.rank] == 0
        assert 0 <= s.send_ns <= s.total_ns
        assert s.start_ns > 0
    assert comm.samples() == []


def weights_at_home(comm: MoECommunicator, case: RoutingCase) -> None:
    """An exact combine weighs with what it is given, whatever the dispatch was given, and may lose it again at once."""
    for number in range(4):
        request, inputs = start(comm, next_case(case, number))
        out, handle = request.wait()
        late = Inputs(inputs.xs, inputs.scales, inputs.ids, [w.flip(0) * 2 + 1 for w in inputs.weights])
        z = Expected(comm, late).combined(comm.rank)
        y = expert(out, comm.config.resolved_output_dtype)
        weights = late.weights[comm.rank].to(out.tokens.device)
        same_bits(comm.combine(y, handle, topk_weights=weights), z, "combine")
        combining = comm.combine_async(y, handle, topk_weights=weights)
        weights.fill_(float("nan"))
        same_bits(combining.wait(), z, "combine_async")
        same_bits(comm.combine(y, handle), Expected(comm, inputs).combined(comm.rank), "with those of the dispatch")
    with pytest.raises(ArgumentError, match="topk_weights: expected shape"):
        comm.combine(y, handle, topk_weights=torch.zeros(1, 99, device=y.device))


def weights_at_home_need_exact_combine(comm: MoECommunicator, case: RoutingCase) -> None:
    """Elsewhere the owner of the expert has weighed long before."""
    out, handle = start(comm, case)[0].wait()
    y = expert(out, comm.config.resolved_output_dtype)
    with pytest.raises(ArgumentError, match="topk_weights: expected None unless exact_combine is on"):
        comm.combine(y, handle, topk_weights=torch.zeros(handle.num_tokens, case.topk, device=y.device))
    comm.combine(y, handle)


def buffers_before_they_are_full(comm: MoECommunicator, case: RoutingCase) -> None:
    """`request.buffers()` is the memory that `wait()` fills."""
    for number in range(2 * comm.config.max_in_flight + 1):
        request, inputs = start(comm, next_case(case, number))
        tokens, scales, counts = request.buffers()
        out, handle = request.wait()
        caught_up(comm)
        same_dispatch(
            replace(out, tokens=tokens, scales=scales, counts=counts), Expected(comm, inputs).outputs[comm.rank]
        )
        assert tokens.data_ptr() == out.tokens.data_ptr()
        assert (scales is None) == (out.scales is None)
        if scales is not None and out.scales is not None:
            assert scales.stride() == out.scales.stride()
        check_combine(comm, Expected(comm, inputs), out, handle)


def buffers_of_exact_shapes(comm: MoECommunicator, case: RoutingCase) -> None:
    """Nobody knows their shapes yet."""
    request, _ = start(comm, case)
    with pytest.raises(ArgumentError, match="exact_shapes: expected False"):
        request.buffers()
    request.wait()
