"""Regions between two processes on two GPUs, by every kind of handle: both sides write, nothing outlives its users. And
communicators that come and go: nothing leaks. Nobody else may use the GPUs meanwhile."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from ep_kernels import Layout, Mode, MoECommunicator, TransportError, jit
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.memory import memory, sharing
from ep_kernels.transports.nvlink.memory.memory import HandleKind
from tests.cases import RoutingCase, draw_seed
from tests.gpu import lives
from tests.transports.steps import Inputs, Place, Store, check_step, next_case
from tests.worlds import RankDied, World

pytestmark = pytest.mark.gpu(2)
REGION_BYTES = 512 << 20
WORDS = REGION_BYTES // 4
SLACK_BYTES = 64 << 20
SPARE_BYTES = 128 << 20
"""Torch loads kernels late. Thirty leaked regions (10 MiB and more) take more."""
TRIFLE_BYTES = 64 << 10
OWNER, PEER = 0, 1
FACTOR, STEP = 3, 17
TOUCH = """
extern "C" __global__ void touch(int* words, unsigned count, int factor, int step) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    words[i] = words[i] * factor + step;
}
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pool = World(2)
    yield pool
    pool.close()


@functools.cache
def touch_kernel(device: int) -> driver.Function:
    binary = jit.compile_source(TOUCH, "touch", driver.architecture(device))
    return driver.Function(binary.cubin, "touch", 0)


def touch(address: int, device: int, factor: int, step: int) -> None:
    """words = words * factor + step, by the multiprocessors of `device`."""
    numbers = (ctypes.c_uint64(address), ctypes.c_uint(WORDS), ctypes.c_int(factor), ctypes.c_int(step))
    touch_kernel(device).launch(64, 256, torch.cuda.current_stream().cuda_stream, *numbers)
    torch.cuda.synchronize()


def prepare(rank: int) -> None:
    """Everything that takes memory of its own happens before anything is measured."""
    torch.cuda.set_device(rank)
    torch.zeros(1, device=rank)
    touch_kernel(rank)
    torch.cuda.synchronize()
    torch.cuda.mem_get_info(OWNER)


def free_on_owner() -> int:
    return torch.cuda.mem_get_info(OWNER)[0]


def await_free(at_least: int, device: int = OWNER) -> int:
    """Free bytes on a device, once there are so many or after ten seconds. What this process lent by CUDA IPC, and a
    peer has returned, is freed as the next communicator does it."""
    deadline = time.monotonic() + 10
    while (free := torch.cuda.mem_get_info(device)[0]) < at_least and time.monotonic() < deadline:
        time.sleep(0.01)
        memory.free_returned()
    return free


def signal_step(store: Store, name: str, text: str = "") -> None:
    store.set(name, text)


def await_step(store: Store, name: str) -> str:
    store.wait([name], timedelta(seconds=50))
    return str(store.get(name).decode())


def export(store: Store, region: memory.Region) -> sharing.DescriptorServer | None:
    """Publish a region; the server that hands out its descriptor, if it has one."""
    server = sharing.DescriptorServer([region.fd]) if region.fd >= 0 else None
    facts = [region.mapping.num_bytes, "" if server is None else server.address.hex(), region.token.hex(), os.getpid()]
    signal_step(store, "ticket", json.dumps(facts))
    return server


def redeem(kind: HandleKind, ticket: list[Any]) -> memory.Mapping:
    num_bytes, address, token, _ = ticket
    fds = sharing.fetch(OWNER, bytes.fromhex(address), 1, 20)[0] if address else [-1]
    try:
        return memory.redeem(kind, num_bytes, PEER, fds[0], bytes.fromhex(token))
    finally:
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def own(kind: HandleKind, store: Store) -> memory.Region | str:
    """A region, or why this machine refuses the kind, which the peer is told too."""
    try:
        return memory.Region(kind, REGION_BYTES, OWNER)
    except TransportError as error:
        signal_step(store, "ticket", json.dumps([str(error)]))
        return str(error)


def words_of(region: memory.Region) -> torch.Tensor:
    return region.mapping.view(0, (WORDS,), torch.int32)


def lend(rank: int, size: int, store: Store, kind: HandleKind) -> str:
    """Both write in turn; then both let go. Returns why the kind is refused, or nothing."""
    prepare(rank)
    if rank == PEER:
        return borrow(store, kind)
    before = free_on_owner()
    region = own(kind, store)
    if isinstance(region, str):
        return region
    pattern = torch.arange(WORDS, dtype=torch.int32, device=OWNER)
    words_of(region).copy_(pattern)
    torch.cuda.synchronize()
    server = export(store, region)
    await_step(store, "touched")
    assert torch.equal(words_of(region), pattern * FACTOR + STEP), "what the peer wrote"
    touch(region.mapping.address, OWNER, 5, -1)
    signal_step(store, "touched again")
    await_step(store, "closed")
    del pattern
    torch.cuda.empty_cache()
    assert free_on_owner() <= before - REGION_BYTES + SLACK_BYTES, "the region is still there"
    view = words_of(region)
    region.close()
    region.close()
    assert int(view[3]) == (3 * FACTOR + STEP) * 5 - 1, "a view keeps the memory"
    del view
    assert await_free(before - SLACK_BYTES) >= before - SLACK_BYTES, "the region was not freed"
    if server is not None:
        server.close()
    return ""


def borrow(store: Store, kind: HandleKind) -> str:
    ticket = json.loads(await_step(store, "ticket"))
    if len(ticket) == 1:
        return str(ticket[0])
    mapping = redeem(kind, ticket)
    touch(mapping.address, PEER, FACTOR, STEP)
    signal_step(store, "touched")
    await_step(store, "touched again")
    read = torch.empty(WORDS, dtype=torch.int32)
    driver.call("cuMemcpyDtoH", read.data_ptr(), mapping.address, REGION_BYTES)
    assert torch.equal(read, (torch.arange(WORDS, dtype=torch.int32) * FACTOR + STEP) * 5 - 1), "what the owner wrote"
    del mapping
    signal_step(store, "closed")
    return ""


def outlive(rank: int, size: int, store: Store, kind: HandleKind) -> str:
    """The owner is killed; the peer goes on undisturbed, lets go, and then the memory is free."""
    prepare(rank)
    if rank == OWNER:
        region = own(kind, store)
        if isinstance(region, str):
            return region
        words_of(region).fill_(7)
        torch.cuda.synchronize()
        server = export(store, region)
        await_step(store, "mapped")
        os.kill(os.getpid(), signal.SIGKILL)
        return str(server)
    ticket = json.loads(await_step(store, "ticket"))
    if len(ticket) == 1:
        return str(ticket[0])
    mapping, held = redeem(kind, ticket), free_on_owner()
    touch(mapping.address, PEER, 1, 1)
    watched = os.pidfd_open(ticket[3])
    signal_step(store, "mapped")
    assert select.select([watched], [], [], 30)[0], "the owner did not die"
    if kind is not HandleKind.CUDA_IPC:  # which leaves it undefined
        touch(mapping.address, PEER, 2, 0)
        read = torch.empty(1024, dtype=torch.int32)
        driver.call("cuMemcpyDtoH", read.data_ptr(), mapping.address, 4096)
        assert bool((read == 16).all())
    del mapping
    wanted = held + REGION_BYTES - SLACK_BYTES
    assert await_free(wanted) >= wanted, "the memory of a dead owner was not freed"
    return ""


def reason_of(results: list[Any]) -> str:
    reasons = {text for text in results if not isinstance(text, RankDied)}
    assert len(reasons) == 1, reasons
    return str(reasons.pop())


@pytest.mark.parametrize("kind", list(HandleKind))
@pytest.mark.parametrize("story", [lend, outlive])
def test_shared_between_processes(world: World, kind: HandleKind, story: Callable[..., str]) -> None:
    reason = reason_of(world.run(story, kind, may_die=(OWNER,) if story is outlive else ()))
    if reason:
        assert kind is HandleKind.FABRIC, f"every machine has {kind}: {reason}"
        assert reason.startswith("cuMem"), reason
        pytest.skip(f"refused here: {reason}")


def choose(rank: int, size: int, store: Store) -> list[str]:
    """What is chosen, what the refusals say, and what the probes say of each kind."""
    torch.cuda.set_device(rank)
    torch.zeros(1, device=rank)
    probes = {kind: memory.probe(kind, rank) for kind in HandleKind}
    kind, refused = memory.choose_kind(rank)
    assert refused == {
        k: why for k, why in probes.items() if why and list(HandleKind).index(k) < list(HandleKind).index(kind)
    }
    assert probes[kind] == ""
    assert memory.choose_kind(rank, "cuda_ipc") == (HandleKind.CUDA_IPC, {})
    return [f"{k.value}: {why or 'works'}" for k, why in probes.items()]


def test_every_kind_is_probed_for_real(world: World, record_property: Callable[[str, object], None]) -> None:
    found = world.run(choose, timeout_s=120)
    print("\n".join(found[0]))
    record_property("kinds", found[0])
    assert found[0][1:] == ["posix_fd: works", "cuda_ipc: works"]


def steps_over(rank: int, size: int, store: Store, kind: HandleKind, case: RoutingCase, mode: Mode) -> str:
    """Whole communicators whose regions are shared in this way; their memory is free after close."""
    place = Place(rank, size, store, "nvlink")
    torch.cuda.set_device(rank)
    torch.zeros(1, device=rank)
    reason = memory.probe(kind, rank)
    if reason:
        with pytest.raises(TransportError, match=f"memory_handle={kind.value!r} does not work on device {rank}"):
            MoECommunicator(place.config(case, mode=mode, layout=Layout.GROUPED, memory_handle=kind.value))
        return reason
    with place.communicator(case, mode=mode, layout=Layout.GROUPED, memory_handle=kind.value) as comm:
        for number in range(6):
            check_step(comm, next_case(case, number))
    return ""


@pytest.mark.parametrize("kind", list(HandleKind))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT])
def test_communicators_over_each_kind(world: World, kind: HandleKind, mode: Mode) -> None:
    case = RoutingCase(9, 4, 256, (24, 19), "uniform", draw_seed(), max_tokens=24)
    reason = reason_of(world.run(steps_over, kind, case, mode, timeout_s=120))
    if reason:
        assert kind is HandleKind.FABRIC, f"every machine has {kind}: {reason}"
        pytest.skip(f"refused here: {reason}")


def closed_while_written_to(rank: int, size: int, store: Store, kind: HandleKind, case: RoutingCase) -> str:
    """The owner closes while its peer goes on writing to its region: that is nobody else's memory yet, whatever the
    owner allocates, and free once the peer has closed."""
    place = Place(rank, size, store, "nvlink")
    prepare(rank)
    reason = memory.probe(kind, rank)
    if reason:
        return reason
    comm = MoECommunicator(place.config(case, mode=Mode.LL, layout=Layout.RANK_MAJOR, memory_handle=kind.value))
    check_step(comm, case)
    comm.barrier()
    if rank == PEER:
        address = comm._transport._domain.mappings[OWNER].address  # type: ignore[attr-defined]
        await_step(store, "owner closed")
        for _ in range(200):
            touch(address, PEER, 0, -1)
        signal_step(store, "written")
        comm.close()
        signal_step(store, "peer closed")
        return ""
    region_bytes = comm._transport._domain.region.mapping.num_bytes  # type: ignore[attr-defined]
    assert region_bytes >= REGION_BYTES, "touch writes no further"
    comm.close()
    torch.cuda.empty_cache()
    held = free_on_owner()
    zeros = torch.zeros(WORDS, dtype=torch.int32, device=OWNER)  # where the region was, if that were free
    torch.cuda.synchronize()
    signal_step(store, "owner closed")
    await_step(store, "written")
    assert not bool(zeros.any()), "the peer wrote to what is no region any more"
    await_step(store, "peer closed")
    del zeros
    torch.cuda.empty_cache()
    memory.free_returned()
    assert await_free(held + region_bytes - SLACK_BYTES) >= held + region_bytes - SLACK_BYTES, "it was not freed"
    return ""


@pytest.mark.parametrize("kind", list(HandleKind))
def test_nobody_gets_a_region_that_is_still_written_to(world: World, kind: HandleKind) -> None:
    case = RoutingCase(64, 8, 7168, (24, 19), "uniform", draw_seed(), max_tokens=4096)
    reason = reason_of(world.run(closed_while_written_to, kind, case, timeout_s=120))
    if reason:
        assert kind is HandleKind.FABRIC, f"every machine has {kind}: {reason}"
        pytest.skip(f"refused here: {reason}")


def closed_and_kept(rank: int, size: int, store: Store, case: RoutingCase) -> None:
    """The caller keeps closed communicators, and yet their regions are free. The first turn loads kernels."""
    place, kept, before = Place(rank, size, store, "nvlink"), [], 0
    for turn in range(4):
        comm = MoECommunicator(place.config(case, f"turn {turn}", mode=Mode.LL, layout=Layout.RANK_MAJOR))
        if turn:
            assert torch.cuda.mem_get_info(rank)[0] < before - REGION_BYTES, "the region is not there"
        out, handle = comm.dispatch(*Inputs.of(case, comm.config).arguments(rank, "cuda"))
        comm.combine(torch.zeros(out.tokens.shape, dtype=torch.bfloat16, device="cuda"), handle)
        comm.close()
        del out
        kept.append((comm, handle))
        torch.cuda.empty_cache()
        if turn:
            assert await_free(before - SLACK_BYTES, rank) >= before - SLACK_BYTES, f"turn {turn}"
        signal_step(store, f"closed {turn} {rank}")
        await_step(store, f"closed {turn} {1 - rank}")
        before = before or torch.cuda.mem_get_info(rank)[0]


def test_close_frees_the_region(world: World) -> None:
    case = RoutingCase(64, 8, 7168, (24, 19), "uniform", draw_seed(), max_tokens=4096)
    world.run(closed_and_kept, case, timeout_s=120)


@pytest.mark.slow
def test_a_hundred_lives_leave_nothing() -> None:
    pool = World(min(8, torch.cuda.device_count()))
    tokens = tuple((3 * rank + 2) % 7 for rank in range(pool.size))
    case = RoutingCase(2 * pool.size + 1, 3, 1024, tokens, "uniform", draw_seed(), max_tokens=512)
    results = pool.run(lives.born_and_closed, "nvlink", case, 100, timeout_s=240)
    pool.close()
    for more, kept_bytes, missing_bytes in results:
        assert more == []
        assert kept_bytes < TRIFLE_BYTES
        assert missing_bytes < SPARE_BYTES
