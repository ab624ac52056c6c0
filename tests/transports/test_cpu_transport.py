"""Operations of the cpu transport: what is refused, ids, requests under way, kept steps; and looks for peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_kernels import (
    AbortedError,
    ArgumentError,
    ClosedError,
    HandleError,
    Layout,
    Mode,
    MoECommunicator,
    StoreGroup,
    TransportError,
)
from ep_kernels.transports.base import StepInputs
from tests.cases import RoutingCase
from tests.groups import LonelyGroup
from tests.worlds import World

Worlds = Callable[[int], World]

E, H, K, M = 8, 32, 2, 160


def make(store: dist.Store, rank: int, size: int, **overrides: Any) -> MoECommunicator:
    case = RoutingCase(E, K, H, (M,) * size)
    fields = {"mode": Mode.AUTO, "layout": Layout.GROUPED, "dtype": torch.float32} | overrides
    return MoECommunicator(case.config(StoreGroup(store, rank, size), **fields))


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, H), torch.randint(-1, E, (tokens, K), dtype=torch.int32), torch.rand(tokens, K)


def refused(rank: int, size: int, store: dist.Store) -> None:
    """Nothing is sent: the operation that follows is the first."""
    comm = make(store, rank, size)
    x, ids, weights = drawn(2)
    wrong: list[tuple[str, Any, Any, Any, Any]] = [
        ("x", x.double(), ids, weights, None), ("x", x[:, :31], ids, weights, None),
        ("topk_ids", x, ids.float(), weights, None), ("topk_weights", x, ids, weights[:1], None),
        ("topk_weights", x, ids, weights.t(), None), ("step_tokens", x, ids, weights, 1),
        ("step_tokens", x, ids, weights, 1.5), ("topk_ids", x, None, weights, None),
        ("x", torch.randn(H, 2).t(), ids, weights, None), ("step_tokens", x, ids, weights, 1 << 20),
        ("x", [x], ids, weights, None),
    ]  # fmt: skip
    for name, *given, step_tokens in wrong:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            comm.dispatch(*given, step_tokens=step_tokens)
        with torch.no_grad(), pytest.raises(ArgumentError, match=f"^{name}: expected"):
            comm.begin_step(comm.step_inputs(*given), 2 if step_tokens is None else step_tokens)
    out, handle = comm.dispatch(x, ids, weights)
    assert handle.seq == 1
    for bad in (out.tokens.double(), out.tokens[:, :3], None):
        with pytest.raises(ArgumentError, match=r"^y: expected"):
            comm.combine(bad, handle)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^out: expected"):
        comm.combine(comm.combine_input(handle), handle, out=torch.empty(5, H))
    comm.combine(comm.combine_input(handle), handle)
    comm.barrier()
    comm.close()
    with pytest.raises(ClosedError):
        comm.dispatch(x, ids, weights)
    with torch.no_grad(), pytest.raises(ClosedError):
        comm.begin_step(comm.step_inputs(x, ids, weights), 2)


def test_wrong_arguments_are_refused_before_anything_is_sent(world: Worlds) -> None:
    world(2).run(refused)


def wide(rank: int, size: int, store: dist.Store) -> None:
    """int64 ids reach the native call as they are, out of range of int32 too: they count as invalid."""
    comm, (x, ids, weights) = make(store, rank, size), drawn(5)
    ids[0, 0] = E
    far = ids.long()
    far[0, 0] = (1 << 32) + 1  # the low half of it is an expert
    results = []
    for given in (ids, far):
        out, handle = comm.dispatch(x, given, weights)
        assert handle.topk_ids is given
        rows = [out.tokens, out.counts, out.valid, out.num_rows, out.num_invalid_ids]
        results.append([*(part.clone() for part in rows), comm.combine(out.tokens.clone(), handle)])
        results[-1].append(comm.dispatch(x, None, None, previous_handle=handle)[0].tokens.clone())
    for narrow, other in zip(*results, strict=True):
        assert torch.equal(narrow, other)
    assert results[1][4].item() == 1
    comm.barrier()
    comm.close()


def test_wide_ids_are_as_narrow_ones(world: Worlds) -> None:
    world(2).run(wide)


def beside_pending(rank: int, size: int, store: dist.Store) -> None:
    """With a request under way an operation receives it where it must."""
    comm, given = make(store, rank, size), drawn(4)
    pending = comm.dispatch_async(*given)
    later, handle = comm.dispatch(*given)
    counts = later.counts.clone()
    assert torch.equal(pending.wait()[0].counts, counts)
    combined = comm.combine_async(later.tokens.clone(), handle)
    assert torch.equal(comm.combine(later.tokens.clone(), handle), combined.wait())
    comm.barrier()
    comm.close()


def test_beside_what_is_under_way(world: Worlds) -> None:
    world(2).run(beside_pending)


def in_step(
    comm: MoECommunicator, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], step_tokens: int,
    inputs: StepInputs | None = None,
) -> torch.Tensor:  # fmt: skip
    """z of a kept step."""
    step = comm.begin_step(inputs or comm.step_inputs(*given), step_tokens)
    assert step is not None
    torch.mul(step.tokens, comm.rank + 2, out=step.y)
    assert int(step.offsets[-1]) == int(step.counts.sum()) == len(step.y)
    return comm.end_step(step, torch.full((len(given[0]), H), torch.nan))


def kept_steps(rank: int, size: int, store: dist.Store) -> None:
    """Beside dispatches and combines, which other ranks may use for the same step."""
    comm = make(store, rank, size)
    torch.manual_seed(rank)
    with torch.no_grad():
        for number, (tokens, step_tokens) in enumerate([(3, 5), (0, 1), (M, M), (rank, 2), (3, 3)] * 3):
            given = drawn(tokens)
            out, handle = comm.dispatch(*given, step_tokens=step_tokens)
            expected = comm.combine(out.tokens * (rank + 2), handle)
            if number % size == rank:
                out, handle = comm.dispatch(*given, step_tokens=step_tokens)
                z = comm.combine(out.tokens * (rank + 2), handle)
            else:
                z = in_step(comm, given, step_tokens)
            assert torch.equal(z, expected)
    comm.barrier()
    comm.close()


def test_kept_steps_give_what_dispatch_and_combine_give(world: Worlds) -> None:
    world(2).run(kept_steps)


def given_again(rank: int, size: int, store: dist.Store) -> None:
    """Tensors that were checked once, with other values in each step; another communicator does not take them."""
    comm, other = (make(dist.PrefixStore(name, store), rank, size) for name in ("one", "other"))
    given = drawn(4)
    inputs = comm.step_inputs(*given)
    with torch.no_grad():
        for _ in range(2 * comm.config.max_in_flight + 1):
            for old, new in zip(given, drawn(4), strict=True):
                old.copy_(new)
            out, handle = comm.dispatch(*given)
            expected = comm.combine(out.tokens * (rank + 2), handle)
            assert torch.equal(in_step(comm, given, 4, inputs), expected)
        with pytest.raises(ArgumentError, match="inputs: expected those that this communicator has checked"):
            other.begin_step(inputs, 4)
    for each in (comm, other):
        each.barrier()
        each.close()


def test_inputs_of_kept_steps_are_given_again(world: Worlds) -> None:
    world(2).run(given_again)


def no_kept_steps(rank: int, size: int, store: dist.Store) -> None:
    comm, (x, ids, weights) = make(store, rank, size), drawn(2)
    assert comm.begin_step(comm.step_inputs(x, ids, weights), 2) is None, "gradients are recorded"
    with torch.no_grad():
        pending = comm.dispatch_async(x, ids, weights)
        assert comm.begin_step(comm.step_inputs(x, ids, weights), 2) is None
        pending.wait()
        step = comm.begin_step(comm.step_inputs(x, ids, weights), 2)
        assert step is not None
        step.y.copy_(step.tokens)
        for out in (torch.empty(3, H), torch.empty(2, H).double(), comm.rank, step.y[:0] if rank else step.y[:2]):
            with pytest.raises(ArgumentError):
                comm.end_step(step, out)  # type: ignore[arg-type]
        comm.end_step(step, torch.empty(2, H))
        with pytest.raises(HandleError):
            comm.end_step(step, torch.empty(2, H))
        step = comm.begin_step(comm.step_inputs(x, ids, weights), 2)
        assert step is not None
        later = [comm.dispatch(x, ids, weights) for _ in range(comm.config.max_in_flight)]
        with pytest.raises(HandleError, match="before the next dispatch"):
            comm.end_step(step, torch.empty(2, H))
        for out, handle in later:
            comm.combine(out.tokens.clone(), handle)
        step = comm.begin_step(comm.step_inputs(x, ids, weights), 2)
        assert step is not None
        comm.set_active([True] * size, 1)
        with pytest.raises(HandleError):
            comm.end_step(step, torch.empty(2, H))
        assert in_step(comm, (x, ids, weights), 2).isfinite().all()
        comm.barrier()
        comm.count_received()
        assert comm.begin_step(comm.step_inputs(x, ids, weights), 2) is None
    comm.close()
    assert comm.begin_step(comm.step_inputs(x, ids, weights), 2) is None
    with pytest.raises(ClosedError):
        comm.end_step(step, torch.empty(2, H))
    for overrides in ({"max_recv_rows": 3}, {"validate": True}):
        comm = make(dist.PrefixStore(str(overrides), store), rank, size, **overrides)
        with torch.no_grad():
            assert comm.begin_step(comm.step_inputs(x, ids, weights), 2) is None
        comm.close()


def fixed_shapes(rank: int, size: int, store: dist.Store) -> None:
    comm = make(store, rank, size, exact_shapes=False)
    with torch.no_grad():
        for tokens in (3, 0, rank):
            given = drawn(tokens)
            out, handle = comm.dispatch(*given, step_tokens=5)
            expected = comm.combine(out.tokens * (rank + 2), handle)
            step = comm.begin_step(comm.step_inputs(*given), 5)
            assert step is not None
            assert step.tokens.shape == out.tokens.shape
            torch.mul(step.tokens, rank + 2, out=step.y)
            assert torch.equal(comm.end_step(step, torch.empty(tokens, H)), expected)
    comm.barrier()
    comm.close()


def test_kept_steps_of_fixed_shapes(world: Worlds) -> None:
    world(2).run(fixed_shapes)


def overwritten(rank: int, size: int, store: dist.Store) -> None:
    """Backward of what autograd saved before a kept step wrote there raises, instead of giving other gradients."""
    comm, given, weight = make(store, rank, size), drawn(4), torch.randn(H, H, requires_grad=True)
    losses = []
    for _ in range(comm.config.max_in_flight):
        out, handle = comm.dispatch(*given)
        z = torch.empty(4, H)
        losses += [(out.tokens @ weight).sum(), (comm.combine(out.tokens.clone(), handle, out=z) @ weight).sum()]
    with torch.no_grad():
        step = comm.begin_step(comm.step_inputs(*given), 4)
        assert step is not None
        step.y.copy_(step.tokens)
        comm.end_step(step, z)
    for changed in (losses[0], losses[-1]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed.backward()
    losses[2].backward()
    comm.barrier()
    comm.close()


def closed(rank: int, size: int, store: dist.Store) -> tuple[int, int]:
    """Mapped regions of a communicator that has kept steps, before it is closed and after."""
    comm = make(store, rank, size)
    with torch.no_grad():
        for _ in range(comm.config.max_in_flight):
            in_step(comm, drawn(3), 3)
        assert comm.begin_step(comm.step_inputs(*drawn(3)), 3) is not None
    comm.barrier()
    before = _regions()
    comm.close()
    return before, _regions()


def _regions() -> int:
    return sum("crossdock-region" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_closed_communicator_keeps_no_steps(world: Worlds) -> None:
    for before, after in world(2).run(closed):
        assert before > after


def test_gradients_of_what_a_kept_step_overwrites_are_refused(world: Worlds) -> None:
    world(2).run(overwritten)


def test_what_no_kept_step_serves(world: Worlds) -> None:
    world(2).run(no_kept_steps)


def looks(rank: int, size: int, store: dist.Store) -> list[float]:
    """Seconds that looks of rank 0 took: for a wake before it and during it, in vain, for a descriptor, for a peer."""
    comm, took = make(store, rank, size), list[float]()
    readable, writable = os.pipe()

    def look(expected: bool, timeout_s: float = 30.0) -> None:
        begin = time.monotonic()
        assert comm.look_for_peer(timeout_s, readable) is expected
        took.append(time.monotonic() - begin)

    if rank == 0:
        comm.wake()
        look(True)
        threading.Timer(0.02, comm.wake).start()
        look(True)
        look(False, 0.01)
        threading.Timer(0.02, os.write, (writable, b".")).start()
        look(False)
        os.read(readable, 1)
    comm.barrier()
    if rank == 0:
        look(True)
    elif rank == 1:
        comm.call_exchange()
    comm.exchange([rank, *range(7)])
    comm.barrier()
    if rank == 0:
        threading.Timer(0.02, comm.abort, ("over",)).start()
        with pytest.raises(AbortedError):
            comm.look_for_peer(30, readable)
    comm.close()
    return took


def test_a_look_ends_as_soon_as_it_has_seen_something(world: Worlds) -> None:
    took = world(3).run(looks)[0]
    assert len(took) == 5
    assert max(took) < 10
    assert took[2] >= 0.01


def alarmed(rank: int, size: int, store: dist.Store) -> None:
    """A handler's exception ends rank 0's dispatch, which has sent its rows; rank 1 comes later."""
    comm, given = make(store, rank, size, timeout_s=3.0), drawn(5)
    if rank == 0:

        def handler(*_: object) -> None:
            raise ValueError("alarm")

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ValueError, match="alarm"):
            comm.dispatch(*given)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for _ in range(2):
            with pytest.raises(TransportError, match="signal handler's exception ended an operation"):
                comm.dispatch(*given)
        store.set("over", "1")
    else:
        store.get("over")
    comm.close()


def test_what_a_handler_raised_is_an_error_of_the_next_call_too(world: Worlds) -> None:
    """It would take the rows of the step that was interrupted for those of the next."""
    world(2).run(alarmed)


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.FLAT])
def test_a_trimmed_handle_has_all_rows_that_arrived(layout: Layout) -> None:
    """With fewer, combine would read what lies behind y."""
    config = RoutingCase(E, K, H, (M,)).config(
        LonelyGroup(), mode=Mode.AUTO, layout=layout, dtype=torch.float32, exact_shapes=False
    )
    with MoECommunicator(config) as comm:
        out, handle = comm.dispatch(*drawn(5))
        rows = int(out.num_rows)
        with pytest.raises(
            ArgumentError, match=rf"num_rows: expected the {rows} that arrived, or more, got {rows - 1}"
        ):
            comm.trimmed(handle, rows - 1)
        z = comm.combine(out.tokens, handle)
        for more in (0, 1):
            trimmed = comm.trimmed(handle, rows + more)
            assert torch.equal(comm.combine(out.tokens[: rows + more].clone(), trimmed), z)
