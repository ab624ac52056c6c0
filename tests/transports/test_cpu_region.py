"""The cpu transport's shared memory: nothing leaks, views outlive close, tickets are judged, idle ranks sleep."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import multiprocessing as mp
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace as dc_replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from ep_kernels import (
    AbortedError,
    ArgumentError,
    ClosedError,
    ConfigError,
    Layout,
    Mode,
    MoECommunicator,
    MoEConfig,
    PeerTimeout,
    StoreGroup,
    TransportError,
)
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.geometry import geometry_of
from ep_kernels.transports.cpu.region import OwnRegion, Ticket, open_peer, read_ticket, start_ticks
from ep_kernels.transports.cpu.transport import CpuCombine, CpuTransport
from tests import worlds
from tests.cases import RoutingCase
from tests.groups import LonelyGroup
from tests.worlds import World

Worlds = Callable[[int], World]


def make(store: dist.Store, rank: int, size: int, **fields: Any) -> MoECommunicator:
    """A small communicator."""
    shape = {"num_experts": 8, "hidden_size": 256, "topk": 2, "max_tokens_per_rank": 16, "layout": Layout.FLAT}
    group = fields.pop("group", None) or StoreGroup(store, rank, size)
    return MoECommunicator(MoEConfig(group=group, mode=Mode.HT, **{**shape, **fields}))


def step(comm: MoECommunicator, seed: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """One dispatch of random tokens: (x, received tokens, handle)."""
    generator = torch.Generator().manual_seed(seed * 64 + comm.rank)
    x = torch.randn(16, 256, generator=generator).bfloat16()
    ids = torch.rand(16, 8, generator=generator).topk(2).indices.int()
    out, handle = comm.dispatch(x, ids, torch.rand(16, 2, generator=generator))
    return x, out.tokens, handle


def regions(pid: int) -> tuple[int, int]:
    """(open descriptors, mappings) of memfd regions in a process."""
    folder = Path(f"/proc/{pid}/fd")
    descriptors = sum("crossdock-region" in os.readlink(fd) for fd in folder.iterdir() if fd.is_symlink())
    return descriptors, Path(f"/proc/{pid}/maps").read_text().count("crossdock-region")


def create_and_close(rank: int, size: int, store: dist.Store, times: int) -> list[tuple[int, int, int]]:
    seen = []
    for number in range(times):
        comm = make(dist.PrefixStore(str(number), store), rank, size)
        step(comm, number)
        comm.barrier()
        comm.close()
        del comm
        gc.collect()
        seen.append((*regions(os.getpid()), len(os.listdir("/proc/self/fd"))))
    return seen


def test_close_gives_everything_back(world: Worlds) -> None:
    for seen in world(3).run(create_and_close, 5):
        assert {(fds, maps) for fds, maps, _ in seen} == {(0, 0)}
        assert len({total for _, _, total in seen[1:]}) == 1, "descriptors grow"


def create_and_drop(rank: int, size: int, store: dist.Store, times: int) -> list[int]:
    """Without `close`: as a notebook does, or an engine that makes another one."""
    seen = []
    for number in range(times):
        comm = make(dist.PrefixStore(str(number), store), rank, size)
        step(comm, number)
        comm.barrier()
        del comm
        gc.collect()
        seen.append(len(os.listdir("/proc/self/fd")))
    return seen


def test_what_nobody_closes_gives_its_descriptors_back(world: Worlds) -> None:
    for seen in world(2).run(create_and_drop, 4):
        assert len(set(seen[1:])) == 1, f"descriptors grow: {seen}"


def die_while_serving(rank: int, size: int, store: dist.Store) -> Any:
    comm = make(store, rank, size, timeout_s=60.0)
    step(comm, 0)
    if rank == 1:
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        step(comm, 1)
    took, peer, gone = time.monotonic() - started, caught.value.peer, caught.value.gone
    comm.close()
    del comm, caught  # the traceback holds the communicator, too
    gc.collect()
    return peer, gone, took, regions(os.getpid())


def test_killed_rank_is_noticed_at_once_and_leaves_no_memory() -> None:
    pool = World(3)
    results = pool.run(die_while_serving, may_die=(1,))
    for peer, gone, took, left in (results[0], results[2]):
        assert (peer, gone, left) == (1, True, (0, 0))
        assert took < 30, "the deadline is 60 s; a dead process is seen long before it"
    assert not any("crossdock" in name for name in os.listdir("/dev/shm"))


def test_a_broken_communicator_gives_its_regions_back_when_it_closes() -> None:
    """Without the cycle collector, which runs now and then: former epochs would keep their memory until it does."""
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            _break_and_close(dist.PrefixStore(str(number), dist.HashStore()))
            assert regions(os.getpid()) == (0, 0)
    finally:
        gc.enable()


def _break_and_close(store: dist.Store) -> None:
    comms: list[MoECommunicator] = []
    told: list[str] = []

    def run(rank: int) -> None:
        comm = make(store, rank, 2)
        step(comm, 0)
        comms.append(comm)
        comm.give_up([1 - rank])
        try:
            for number in range(1, 50):  # what has arrived counts, so the faster rank may end one or more of them
                step(comm, number)
        except PeerTimeout as error:  # its traceback has frames of the transport
            told.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    assert (len(comms), len(told)) == (2, 2)


def views_after_close(rank: int, size: int, store: dist.Store) -> bool:
    comm = make(store, rank, size)
    _, tokens, handle = step(comm, 3)
    y = comm.combine_input(handle).copy_(tokens)
    x = comm.dispatch_input(16).fill_(rank)
    kept = tokens.clone()
    comm.barrier()
    comm.close()
    del comm, handle
    gc.collect()
    y += 0
    assert regions(os.getpid())[1] == 1, "the peer's region is unmapped, the own one lives while views do"
    return torch.equal(tokens, kept) and torch.equal(y, kept) and bool((x == rank).all())


def test_views_stay_readable_after_close(world: Worlds) -> None:
    assert all(world(2).run(views_after_close))


def zero_copy(rank: int, size: int, store: dist.Store) -> None:
    """Registered input and registered expert outputs give the bits of ordinary tensors, over many recycled slots."""
    comm = make(store, rank, size, layout=Layout.GROUPED)
    for number in range(12):
        x, tokens, handle = step(comm, number)
        z = comm.combine(tokens.clone(), handle)
        lent = comm.combine_input(handle).copy_(tokens)
        assert torch.equal(comm.combine(lent, handle), z)
        again = comm.dispatch_input(16).copy_(x)
        out, _ = comm.dispatch(again, None, None, previous_handle=handle)
        assert torch.equal(out.tokens, tokens)
        comm.dispatch_input(16).fill_(float("nan"))
    comm.barrier()
    comm.close()


def test_zero_copy_both_ways(world: Worlds) -> None:
    world(3).run(zero_copy)


def unfinished_combines(rank: int, size: int, store: dist.Store) -> None:
    """Dispatches may recycle the buffers of combines that nobody has waited for yet."""
    comm = make(store, rank, size)
    begun = [step(comm, number)[1:] for number in range(2)]
    expected = [comm.combine(tokens.clone(), handle) for tokens, handle in begun]
    requests = [comm.combine_async(comm.combine_input(handle).copy_(tokens), handle) for tokens, handle in begun]
    for number in range(2, 5):
        step(comm, number)
    for request, z in zip(requests, expected, strict=True):
        assert torch.equal(request.wait(), z)
    comm.barrier()
    comm.close()


def test_recycling_finishes_unwaited_combines(world: Worlds) -> None:
    world(3).run(unfinished_combines)


def lent_twice(rank: int, size: int, store: dist.Store) -> None:
    """A buffer given to two combines is not written again before peers are done with both."""
    comm = make(store, rank, size)
    _, tokens, handle = step(comm, 0)
    want = comm.combine(tokens.clone(), handle)
    y = comm.combine_input(handle).copy_(tokens)
    first, second = comm.combine_async(y, handle), comm.combine_async(y, handle)
    assert torch.equal(second.wait(), want)
    if rank == 0:
        comm.combine_input(handle).fill_(float("nan"))
        store.set("overwritten", b"1")
    else:
        with contextlib.suppress(RuntimeError):  # rank 0 must wait for `first`, so this cannot come
            store.wait(["overwritten"], timedelta(seconds=0.3))
    assert torch.equal(first.wait(), want)
    comm.barrier()
    comm.close()


def test_buffer_lent_twice(world: Worlds) -> None:
    world(2).run(lent_twice)


@pytest.mark.parametrize("call", ["dispatch_input", "combine_input", "combine"])
def test_close_from_another_thread_in_the_midst(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whatever was under way ends well or in ClosedError."""
    comm = make(None, 0, 1, group=LonelyGroup())
    _, tokens, handle = step(comm, 0)
    pending = comm.combine_async(tokens, handle)
    judge, run = CpuTransport.judge, CpuCombine._run

    def close_meanwhile(transport: CpuTransport, status: int) -> None:
        comm.close()
        judge(transport, status)

    def close_after(combine: CpuCombine, phases: int) -> None:
        run(combine, phases)
        comm.close()

    monkeypatch.setattr(CpuTransport, "judge", close_meanwhile)
    monkeypatch.setattr(CpuCombine, "_run", close_after)  # which judges nothing that went well
    with contextlib.suppress(ClosedError):
        {
            "dispatch_input": lambda: comm.dispatch_input(16),
            "combine_input": lambda: comm.combine_input(handle),
            "combine": lambda: comm.combine(tokens, handle),
        }[call]()
    with pytest.raises(ClosedError):
        pending.wait()


def idle(rank: int, size: int, store: dist.Store, seconds: float) -> float:
    comm = make(store, rank, size)
    comm.barrier()
    began, deadline = time.process_time(), time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        assert not comm.wait_for_peer(left)
    used = time.process_time() - began
    comm.barrier()
    comm.close()
    return used


def test_idle_group_uses_no_processor(world: Worlds) -> None:
    seconds = 2.0
    for used in world(4).run(idle, seconds):
        assert used < 0.1 * seconds, "one that spins has its share of a busy machine, too"


def doze(rank: int, size: int, store: dist.Store) -> Any:
    """Ranks 1.. sleep; rank 0 rings by entering an exchange. Then each wakes itself from another thread."""
    comm = make(store, rank, size)
    if rank != 0:
        assert comm.wait_for_peer(30)
    everyone = comm.exchange([rank, *range(7)])
    assert not comm.wait_for_peer(0)
    comm.wake()
    assert comm.wait_for_peer(30), "a wake before the call counts"
    waker = threading.Thread(target=comm.wake)
    waker.start()
    assert comm.wait_for_peer(30)
    waker.join()
    comm.barrier()
    comm.close()
    return everyone


def calls(rank: int, size: int, store: dist.Store) -> list[Any]:
    """Rank 0 calls an exchange and comes late to it; then it calls one and waits itself, since the others enter."""
    comm, got = make(store, rank, size), []
    for late in (True, False):
        comm.barrier()
        if rank == 0:
            comm.call_exchange()
            if late:
                store.wait([f"in-{other}" for other in range(1, size)], timedelta(seconds=30))
            else:
                assert comm.wait_for_peer(30), "who is called enters, and so calls the caller"
        else:
            assert comm.wait_for_peer(30)
            store.set(f"in-{rank}", "1")
        got.append(comm.exchange([rank, late, *range(6)]))
        assert not comm.wait_for_peer(0), "a call is for one exchange"
    comm.barrier()
    comm.close()
    comm.call_exchange()
    return got


def test_a_called_exchange(world: Worlds) -> None:
    expected = [[(rank, late, *range(6)) for rank in range(3)] for late in (True, False)]
    assert world(3).run(calls) == [expected] * 3


def rounded(rank: int, size: int, store: dist.Store, exact: bool) -> None:
    """Sums that combine rounds itself are those that it gives in float32, rounded."""
    fields: dict[str, Any] = {"layout": Layout.GROUPED, "dtype": torch.bfloat16, "output_dtype": torch.float32}
    comm = make(store, rank, size, **fields, exact_combine=exact)
    x, tokens, handle = step(comm, 7)
    y = tokens.float() * torch.rand(tokens.shape[0], 1)
    z = comm.combine(y, handle)
    out = torch.full_like(x, torch.nan)
    assert comm.combine(y, handle, out=out) is out
    assert torch.equal(out, z.bfloat16())
    request = comm.combine_async(y, handle, out=torch.empty_like(x))
    assert torch.equal(request.wait(), z.bfloat16())
    for wrong in (z.double(), z.half(), z[1:]):
        with pytest.raises(ArgumentError, match="out: expected"):
            comm.combine(y, handle, out=wrong)
    comm.barrier()
    comm.close()


@pytest.mark.parametrize("exact", [False, True])
def test_combine_rounds_sums_once(world: Worlds, exact: bool) -> None:
    world(2).run(rounded, exact)


def test_exchange_and_wake(world: Worlds) -> None:
    for everyone in world(4).run(doze):
        assert [row[0] for row in everyone] == [0, 1, 2, 3]


def abort_while_waiting(rank: int, size: int, store: dist.Store) -> None:
    comm = make(store, rank, size)
    if rank == 0:
        threading.Timer(0.1, comm.abort, ["the group re-forms"]).start()
        with pytest.raises(AbortedError, match="re-forms"):
            step(comm, 0)
        store.set("aborted", b"1")
    else:
        store.wait(["aborted"])
    comm.close()


def test_abort_ends_a_wait(world: Worlds) -> None:
    world(2).run(abort_while_waiting)


def own_ticket() -> tuple[OwnRegion, Ticket]:
    region = OwnRegion(1 << 16)
    return region, msgspec.json.decode(region.ticket(7), type=Ticket)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"abi": 8}, "one version"),
        ({"num_bytes": 5}, "one config"),
        ({"boot_id": "elsewhere"}, "another host"),
        ({"pid_namespace": 1}, "PID namespace"),
        ({"kind": "nvlink"}, "transport cpu on every rank"),
    ],
)
def test_ticket_of_a_stranger_is_refused(change: dict[str, Any], says: str) -> None:
    region, ticket = own_ticket()
    raw = msgspec.json.encode(msgspec.structs.replace(ticket, **change))
    with pytest.raises(TransportError, match=rf"rank 3.*{says}"):
        read_ticket(3, raw, abi=7, num_bytes=1 << 16)
    region.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token": -1}, "token"),
        ({"token": 1 << 63}, "token"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"secret": "s" * 64}, "secret"),
        ({"secret": "00"}, "secret"),
    ],
)
def test_network_ticket_out_of_range_is_refused(change: dict[str, Any], says: str) -> None:
    region, _ = own_ticket()
    network = msgspec.structs.replace(NetworkTicket("tcp", "127.0.0.1", 7500, 5, "00" * 32, "00" * 32, 1), **change)
    with pytest.raises(TransportError, match=rf"rank 3: its ticket cannot be read .*network\.{says}"):
        read_ticket(3, region.ticket(7, network=network), abi=7, num_bytes=1 << 16)
    region.close()


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff\x00", b'{"kind": 1}'])
def test_garbled_ticket_is_refused(raw: bytes) -> None:
    with pytest.raises(TransportError, match="rank 1: its ticket cannot be read"):
        read_ticket(1, raw, abi=7, num_bytes=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start_ticks": 1}, "given to another"),
        ({"pid": 2**22 - 1}, "gone"),
        ({"pid": -1}, "gone"),
        ({"pid": 2**62}, "gone"),
        ({"fd": 999}, "region is closed"),
        ({"fd": -7}, "region is closed"),
    ],
)
def test_ticket_of_a_gone_process_is_refused(change: dict[str, Any], says: str) -> None:
    region, ticket = own_ticket()
    before = _held()  # fewer later, where garbage of earlier tests is collected meanwhile
    with pytest.raises(TransportError, match=says):
        open_peer(2, msgspec.structs.replace(ticket, **change))
    assert not _held() - before
    region.close()


def _held() -> Counter[str]:
    """This process's descriptors of regions and processes, by what they are. Threads of earlier tests open others."""
    links = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return Counter({link: n for link, n in links.items() if "memfd:" in link or "pidfd" in link})


@pytest.mark.parametrize("why", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_a_process_that_cannot_be_watched_is_not_called_gone(monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    """No descriptor left, a container's seccomp profile, an old kernel."""

    def refuses(pid: int) -> int:
        raise OSError(why, os.strerror(why))

    region = OwnRegion(4096)
    ticket = msgspec.json.decode(region.ticket(0), type=Ticket)
    monkeypatch.setattr(os, "pidfd_open", refuses)
    says = rf"rank 3: .* cannot watch its process \d+ \(pidfd_open: .*{os.strerror(why)}"
    with pytest.raises(TransportError, match=says):
        open_peer(3, ticket)


def test_closed_region_cannot_be_redeemed() -> None:
    region, ticket = own_ticket()
    for fd in open_peer(0, ticket):
        if fd >= 0:
            os.close(fd)
    region.close()
    region.close()
    with pytest.raises(TransportError, match="region is closed"):
        open_peer(0, ticket)


def _unsealed_memfd(seals: int) -> int:
    fd = os.memfd_create("crossdock-region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _regular_file(folder: Path) -> int:
    path = folder / "region"
    path.write_bytes(bytes(1 << 16))
    return os.open(path, os.O_RDWR)


def _fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


@pytest.mark.parametrize(
    ("make_file", "says"),
    [
        (lambda _: _unsealed_memfd(0), "rank 2: its region is no sealed memfd"),
        (lambda _: _unsealed_memfd(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "rank 2: its region is no sealed memfd"),
        (lambda _: _unsealed_memfd(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "rank 2: its region is no sealed memfd"),
        (_regular_file, "rank 2: its region is no sealed memfd"),
        (lambda _: _regular_file(Path("/dev/shm")), "rank 2: its region is no sealed memfd"),
        (_fifo, "rank 2: its region is closed .the descriptor is another file"),
    ],
)
def test_a_ticket_for_a_file_that_can_be_truncated_is_refused(
    make_file: Callable[[Path], int], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, ticket = own_ticket()
    fd = make_file(tmp_path)
    modes: list[int] = []
    plain_open = os.open

    def noted_open(path: str | Path, flags: int) -> int:
        modes.append(flags)
        return plain_open(path, flags)

    monkeypatch.setattr(os, "open", noted_open)
    before = set(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(TransportError, match=says):
            open_peer(2, msgspec.structs.replace(ticket, fd=fd))
        assert not set(os.listdir("/proc/self/fd")) - before
        assert not any(flags & os.O_ACCMODE == os.O_RDWR for flags in modes), "opened for writing before it was checked"
    finally:
        os.close(fd)
        region.close()
        Path("/dev/shm/region").unlink(missing_ok=True)


def _serve_ticket_as_nobody(pipe: Connection) -> None:
    os.setgid(65534)
    os.setuid(65534)
    region = OwnRegion(1 << 16)
    pipe.send_bytes(region.ticket(7))
    pipe.poll(60)


@pytest.mark.skipif(os.geteuid() != 0, reason="expected user 0, which may become another; got another")
def test_a_region_of_another_user_is_refused() -> None:
    """Root may open anybody's files, but maps only its own."""
    ours, theirs = mp.Pipe()
    process = worlds.context().Process(target=_serve_ticket_as_nobody, args=(theirs,))
    process.start()
    theirs.close()
    try:
        ticket = msgspec.json.decode(ours.recv_bytes(), type=Ticket)
        with pytest.raises(TransportError, match=r"rank 2: its process \d+ belongs to user 65534.*as user 0"):
            open_peer(2, ticket)
        theirs_here = os.open(
            f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_RDWR
        )  # their memory, offered by a process of ours
        offered = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "fd": theirs_here}
        with pytest.raises(TransportError, match=r"rank 2: its region belongs to user 65534.*as user 0"):
            open_peer(2, msgspec.structs.replace(ticket, **offered))
        os.close(theirs_here)
    finally:
        ours.close()
        process.join(60)


def test_nobody_can_shrink_a_region() -> None:
    region, ticket = own_ticket()
    fd, _, process = open_peer(0, ticket)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
    finally:
        os.close(fd)
        os.close(process)
        region.close()


def test_geometry_uses_the_largest_rank() -> None:
    """E % R ranks own one expert more; regions must be equal all the same."""
    sizes = []
    for rank in range(3):
        config = MoEConfig(
            group=LonelyGroup(rank, 3), num_experts=7, hidden_size=64, topk=2, max_tokens_per_rank=4, expert_alignment=1
        )
        sizes.append(native.region_parts(geometry_of(config)).total)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("max_tokens_per_rank", {"max_tokens_per_rank": 1 << 24, "num_experts": 256, "topk": 1}),
        ("max_tokens_per_rank", {"max_tokens_per_rank": 1 << 24, "layout": Layout.FLAT, "topk": 32}),
        ("max_recv_rows", {"max_recv_rows": 1 << 30}),
    ],
)
def test_more_rows_than_an_int32_numbers_are_refused(field: str, change: dict[str, Any]) -> None:
    fields = {"group": LonelyGroup(0, 8), "num_experts": 64, "hidden_size": 8, "topk": 2, "max_tokens_per_rank": 4}
    with pytest.raises(ConfigError, match=f"^{field}: expected at most 2147483647 rows"):
        MoECommunicator(MoEConfig(**(fields | change)))


def test_too_many_ranks_are_refused() -> None:
    group = dc_replace(LonelyGroup(), size=65)
    config = MoEConfig(group=group, num_experts=65, hidden_size=64, topk=2, max_tokens_per_rank=4)
    with pytest.raises(ValueError, match="at most 64 ranks"):
        MoECommunicator(config)


@pytest.mark.parametrize(
    "change", [{"landing_bytes": 4096}, {"landing_fd": -1, "landing_bytes": 0}], ids=["short", "none"]
)
def test_mirrors_of_another_size_are_refused_before_they_are_mapped(change: dict[str, int]) -> None:
    """A read past the end of a short one would end this process by SIGBUS."""
    network = NetworkConfig(listen="127.0.0.1:0", domain="a")
    case = RoutingCase(4, 2, 64, (3, 3))
    transport = CpuTransport(case.config(LonelyGroup(0, 2), network=network))
    try:
        own = transport.allocate(None)
        other = msgspec.structs.replace(msgspec.json.decode(own, type=Ticket), **change)
        with pytest.raises(TransportError, match=r"rank 1: mirrors of \d+ bytes, expected \d+"):
            transport.import_regions([own, msgspec.json.encode(other)])
    finally:
        transport.close()
