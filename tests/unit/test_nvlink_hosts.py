"""The host side of the nvlink transport that needs no GPU: descriptors between processes, and the hosts' exchange."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels.errors import AbortedError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Network
from ep_kernels.transports.base import EXCHANGE_WORDS
from ep_kernels.transports.nvlink.memory import domain, sharing
from ep_kernels.transports.nvlink.memory.domain import Domain
from ep_kernels.transports.nvlink.memory.landing import Landing
from ep_kernels.transports.nvlink.memory.mailbox import Mailbox
from ep_kernels.transports.nvlink.memory.remote_pages import BLOCK_WORDS
from ep_kernels.transports.nvlink.memory.ticket import Host, RegionTicket
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember
from tests.gpu.loopback_group import LoopGroup

SIZE = 3
WORDS = [0] * 8
WAIT_S = 20.0


UPS = (1 << 31 | 1 << 63, 0, 1 << 32 | 1)
"""Masks of ranks."""
LATE_SEED = 96219
"""`shuffle` holds the first message of rank 2 to each peer back for more than 2.7 ms."""
HOSTS = {"one-host": (0, 0, 0), "two-hosts": (0, 0, 1), "three-hosts-shuffled": (0, 1, 2)}


@pytest.fixture(params=list(HOSTS))
def boxes(request: pytest.FixtureRequest) -> Iterator[list[Mailbox]]:
    """Pages of a host are mapped; words of ranks of different hosts travel over real connections."""
    hosts, dead = HOSTS[request.param], set[int]()
    gone = [(ctypes.c_int64 * SIZE)() for _ in hosts]
    made = [Mailbox(rank, lambda peer, rank=rank: peer in dead or gone[rank][peer] == abi.DEAD) for rank in range(SIZE)]
    provider = "shuffle(tcp)" if "shuffled" in request.param else "tcp"
    config = NetworkConfig(listen="127.0.0.1:0", provider=provider, seed=LATE_SEED)
    tickets = {}
    for rank, box in enumerate(made):
        if len(set(hosts)) > 1:
            tickets[rank] = box.open_network(config, SIZE, ctypes.addressof(gone[rank]), WAIT_S)
        box.dead = dead  # type: ignore[attr-defined]
    far = [{peer: tickets[peer] for peer in range(SIZE) if hosts[peer] != host} for host in hosts]
    together([lambda box=box, far=far: box.connect(far, WAIT_S) for box, far in zip(made, far, strict=True)])
    for rank, box in enumerate(made):
        box.attach([other.fd if hosts[peer] == hosts[rank] else -1 for peer, other in enumerate(made)])
    yield made
    for box in made:
        box.close()
    if (network := Network._shared.pop(config, None)) is not None:
        network.close()  # with what still lingers: other tests count descriptors


def agree_without(boxes: list[Mailbox], ranks: list[int], epoch: int) -> None:
    """The ranks go on in an epoch without the others, and part from them."""
    mask = [rank in ranks for rank in range(SIZE)]
    together([lambda r=r: boxes[r].agree(mask, epoch, (0, 0, 0), 0, 10) for r in ranks])  # type: ignore[misc]
    for rank in ranks:
        boxes[rank].leave(mask, epoch)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [job.result() for job in [pool.submit(call) for call in calls]]


def look_until_it_raises(box: Mailbox, op: str) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        box.check_left_out(op)


def test_exchange_stays_in_step(boxes: list[Mailbox]) -> None:
    def story(rank: int) -> None:
        for turn in range(300):
            got = boxes[rank].exchange([rank, turn, -(1 << 63), (1 << 63) - 1, 0, 0, 0, rank * turn], 10)
            assert got == [(r, turn, -(1 << 63), (1 << 63) - 1, 0, 0, 0, r * turn) for r in range(SIZE)]

    together([lambda rank=rank: story(rank) for rank in range(SIZE)])  # type: ignore[misc]


def test_the_words_of_the_last_exchange_arrive_before_their_rank_closes(boxes: list[Mailbox]) -> None:
    """It has everybody's words while its own, the first that it sends, are still held back (`LATE_SEED`)."""
    with ThreadPoolExecutor(SIZE) as pool:
        jobs = [pool.submit(box.exchange, [rank] * EXCHANGE_WORDS, 5.0) for rank, box in enumerate(boxes[:2])]
        while not all(boxes[2]._vouched(rank, 1) for rank in range(2)):
            time.sleep(0.001)
        boxes[2].exchange([2] * EXCHANGE_WORDS, 5.0)
        boxes[2].settle(5.0)
        boxes[2].close()
        assert [job.result()[2] for job in jobs] == [(2,) * EXCHANGE_WORDS] * 2


def test_words_are_written_before_the_number_and_read_after_it(boxes: list[Mailbox]) -> None:
    """Processors that reorder stores find a fence between the two."""
    page, seen = boxes[0]._pages[0], list[tuple[int, list[int]]]()
    block = slice(BLOCK_WORDS + 1, 2 * BLOCK_WORDS)
    boxes[0]._fence = lambda: seen.append((page[BLOCK_WORDS], page[block].tolist()))
    words = list(range(1, 1 + EXCHANGE_WORDS))
    together([lambda box=box: box.exchange(words, 5.0) for box in boxes])
    assert seen == [(0, words), (1, words), (1, words)]


def test_silent_and_dead_ranks_are_named(boxes: list[Mailbox]) -> None:
    with pytest.raises(PeerTimeout) as silent:
        boxes[0].exchange(WORDS, 0.05)
    assert (silent.value.peer, silent.value.gone, silent.value.op) == (1, False, "exchange")
    boxes[0].dead.add(1)  # type: ignore[attr-defined]
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as dead:
        boxes[0].exchange(WORDS, 30)
    assert (dead.value.peer, dead.value.gone) == (1, True)
    assert time.monotonic() - begin < 25, "long before the deadline of 30 s"


def test_with_a_rank_that_is_given_up_no_wait_goes_on_until_the_others_agree_without_it(boxes: list[Mailbox]) -> None:
    with pytest.raises(PeerTimeout):  # so rank 1 has entered the first exchange
        boxes[1].exchange(WORDS, 0.01)
    threading.Timer(0.05, boxes[0].give_up, [[1]]).start()
    for _ in range(2):  # first it is rank 2 that is waited for, then rank 1
        with pytest.raises(PeerTimeout, match=r"rank 1 .*: it was given up") as error:
            boxes[0].exchange(WORDS, 30)
        assert (error.value.peer, error.value.seen, error.value.given_up) == (1, 1, True)
    boxes[2].give_up([1])
    mask = [True, False, True]
    together([lambda r=r: boxes[r].agree(mask, 1, (0, 0, 0), 0, 10) for r in (0, 2)])  # type: ignore[misc]
    together([lambda r=r: boxes[r].exchange(WORDS, 10) for r in (0, 2)])  # type: ignore[misc]


def test_exchanges_are_sampled_with_the_wait_for_each_peer(boxes: list[Mailbox]) -> None:
    """Rank 2 enters when the others have waited for it."""
    with ThreadPoolExecutor(SIZE) as pool:
        jobs = [pool.submit(box.exchange, [0] * EXCHANGE_WORDS, WAIT_S) for box in boxes[:2]]
        time.sleep(0.2)
        began_ns = time.monotonic_ns()
        jobs.append(pool.submit(boxes[2].exchange, [0] * EXCHANGE_WORDS, WAIT_S))
        for job in jobs:
            job.result()
    for rank, box in enumerate(boxes):
        (sample,) = box.samples()
        assert (sample.op, sample.mode, sample.seq, sample.peer_wait_ns[rank]) == ("exchange", "host", 1, 0)
        assert sample.total_ns >= max(sample.peer_wait_ns) + sample.send_ns
        if rank < 2:
            assert sample.start_ns + sample.send_ns + sample.peer_wait_ns[2] >= began_ns
            assert sample.peer_wait_ns[1 - rank] < sample.peer_wait_ns[2]
    together([lambda box=box: box.exchange([0] * EXCHANGE_WORDS, WAIT_S, sampled=False) for box in boxes])
    assert not any(box.samples() for box in boxes)


def test_agreement_heals_exchanges_out_of_step(boxes: list[Mailbox]) -> None:
    for _ in range(3):
        with pytest.raises(PeerTimeout):
            boxes[0].exchange(WORDS, 0.01)
    mask = [True, False, True]
    answers = together([lambda r=r: boxes[r].agree(mask, 1, (10 + r, 0, 0), UPS[r], 10) for r in (0, 2)])  # type: ignore[misc]
    assert answers[0] == answers[1] == [((10, 0, 0), UPS[0]), ((), 0), ((12, 0, 0), UPS[2])]
    rows = together([lambda r=r: boxes[r].exchange([r] * 8, 10) for r in (0, 2)])  # type: ignore[misc]
    assert rows == [[(0,) * 8, None, (2,) * 8]] * 2


def test_a_rank_whose_rows_alone_are_cut_off_agrees(boxes: list[Mailbox]) -> None:
    """The end of their connections marks it as dead; those of its words stand."""
    if boxes[0].remote is None:
        pytest.skip("rows have connections of their own between hosts only")
    boxes[0].dead.update({1, 2} if 1 in boxes[0].remote.ranks else {2})  # type: ignore[attr-defined]
    together([lambda r=r: boxes[r].agree([True] * SIZE, 1, (0, 0, 0), 0, 10) for r in range(SIZE)])  # type: ignore[misc]
    with pytest.raises(PeerTimeout) as error:
        boxes[0].exchange(WORDS, 10)
    assert error.value.gone
    assert error.value.waited_s < 5


@pytest.mark.parametrize("rank", [0, 2])
def test_a_connection_that_ends_between_two_looks_of_set_active_is_made_again(boxes: list[Mailbox], rank: int) -> None:
    """The other end has given it up before; this one hears of that when its words have been sent."""
    box, other, renew, looks = boxes[rank], 2 - rank, boxes[rank]._renew, list[float]()
    if box.remote is None:
        pytest.skip("one host has no connections")
    box.remote.leave(other, 0)
    until = time.monotonic() + WAIT_S
    while boxes[other].remote.is_up(rank):  # type: ignore[union-attr]
        assert time.monotonic() < until
    box.dead.add(other)  # type: ignore[attr-defined]

    def look(deadline: float) -> None:
        if looks:  # at the first one it stands
            renew(deadline)
        looks.append(deadline)

    box._renew = look  # type: ignore[method-assign]
    with ThreadPoolExecutor(SIZE) as pool:
        jobs = [pool.submit(box.agree, [True] * SIZE, 1, (0, 0, 0), 0, 10)]
        while not looks:
            time.sleep(0.001)
        jobs += [pool.submit(boxes[r].agree, [True] * SIZE, 1, (r, 0, 0), 0, 10) for r in range(SIZE) if r != rank]
        assert [words[0] for words, _ in jobs[0].result()] == [0 if r == rank else r for r in range(SIZE)]


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_who_was_left_out_hears_of_it(boxes: list[Mailbox], ahead: int) -> None:
    """Whatever the others have exchanged meanwhile, none of it is taken for an answer; all can then meet again."""
    together([lambda r=r: boxes[r].exchange(WORDS, 10) for r in range(SIZE)])  # type: ignore[misc]
    agree_without(boxes, [1, 2], 3)
    for _ in range(ahead):
        together([lambda r=r: boxes[r].exchange(WORDS, 10) for r in (1, 2)])  # type: ignore[misc]
    begin = time.monotonic()
    for op, call in (("exchange", lambda: boxes[0].exchange(WORDS, 30)), ("wait", lambda: boxes[0].wait_for_peer(30))):
        if op == "exchange" or not ahead:  # a doorbell that rang before it looked is only a doorbell
            with pytest.raises(TransportError, match=rf"{op}.*: rank [12] has gone on in epoch 3 without this rank"):
                call()
    assert time.monotonic() - begin < 25, "long before the deadline of 30 s"
    everybody = [lambda r=r: boxes[r].agree([True] * SIZE, 4, (r, 0, 0), 0, 10) for r in range(SIZE)]  # type: ignore[misc]
    assert [words[0] for words, _ in together(everybody)[0]] == [0, 1, 2]
    rows = together([lambda r=r: boxes[r].exchange([r] * 8, 10) for r in range(SIZE)])  # type: ignore[misc]
    assert rows == [[(r,) * 8 for r in range(SIZE)]] * SIZE


def test_a_look_tells_who_was_left_out_and_nobody_who_is_on_the_way(boxes: list[Mailbox]) -> None:
    for box in boxes:
        box.check_left_out("check")
    agree_without(boxes, [1, 2], 3)
    with pytest.raises(TransportError, match=r"dispatch: rank [12] has gone on in epoch 3 without this rank"):
        look_until_it_raises(boxes[0], "dispatch")
    boxes[1].check_left_out("check")
    fences, looked = list[int](), threading.Event()

    def hold() -> None:
        fences.append(1)
        if len(fences) == 2:  # it has entered the epoch, in which the others then agree, and reads their words
            looked.wait(10)

    boxes[0]._fence = hold
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(box.agree, [True] * SIZE, 4, (0, 0, 0), 0, 10) for box in boxes]
        for job in jobs[1:]:
            job.result()
        boxes[0].check_left_out("check")
        looked.set()
        jobs[0].result()


def test_different_masks_do_not_agree(boxes: list[Mailbox]) -> None:
    masks = [[True] * SIZE, [False, True, True], [False, True, True]]

    def agree(rank: int) -> str:
        try:
            boxes[rank].agree(masks[rank], 1, (0, 0, 0), 0, 5)
        except TransportError as error:
            return str(error)
        return ""

    said = together([lambda r=r: agree(r) for r in range(SIZE)])  # type: ignore[misc]
    assert said == ["set_active: rank 1 has gone on in epoch 1 without this rank", "", ""]


def test_late_for_an_epoch(boxes: list[Mailbox]) -> None:
    """A rank that asks for an epoch when its peers ask for the next one does not mix the two."""
    with pytest.raises(PeerTimeout) as silent:
        boxes[1].agree([True] * SIZE, 2, (0, 0, 0), 0, 0.02)
    assert silent.value.op == "set_active"
    with pytest.raises(TransportError, match="rank 1 has gone on in epoch 2"):
        together([lambda r=r: boxes[r].agree([True] * SIZE, 1, (0, 0, 0), 0, 10) for r in (0, 2)])  # type: ignore[misc]


def test_doorbell(boxes: list[Mailbox]) -> None:
    boxes[0].wake()
    assert boxes[0].wait_for_peer(5), "a wake before the call counts"
    assert not boxes[0].wait_for_peer(0.02)
    entering = threading.Thread(target=lambda: boxes[1].exchange(WORDS, 10))
    entering.start()
    assert boxes[0].wait_for_peer(5)
    assert boxes[0].wait_for_peer(5), "a peer stays visible until this rank enters"
    together([lambda r=r: boxes[r].exchange(WORDS, 10) for r in (0, 2)])  # type: ignore[misc]
    entering.join()


def test_abort_ends_every_wait(boxes: list[Mailbox]) -> None:
    threading.Timer(0.02, boxes[0].abort, ["re-forming"]).start()
    with pytest.raises(AbortedError, match="re-forming"):
        boxes[0].exchange(WORDS, 30)
    with pytest.raises(AbortedError, match="re-forming"):
        boxes[0].wait_for_peer(30)


def test_a_server_that_was_short_of_descriptors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, short = socket.socket.accept, [errno.EMFILE, errno.ENFILE]

    def accepted(self: socket.socket) -> Any:
        if short:
            raise OSError(short.pop(), "no descriptor is left")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    read, write = os.pipe()
    server = sharing.DescriptorServer([read])
    fds, _ = sharing.fetch(0, server.address, 1, 5.0)
    server.close()
    assert not server._thread.is_alive()
    for fd in (read, write, *fds):
        os.close(fd)


def test_descriptors_travel() -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read, write])
    try:
        theirs, pid = sharing.fetch(1, server.address, 2, 5)
        assert pid == os.getpid()
        assert not {read, write} & set(theirs)
        os.write(theirs[1], b"through the copy")
        assert os.read(read, 99) == b"through the copy"
    finally:
        server.close()
        server.close()
    with pytest.raises(TransportError, match="rank 1 gave no memory handle"):
        sharing.fetch(1, server.address, 2, 5)
    for fd in (read, write, *theirs):
        os.close(fd)


@pytest.mark.parametrize("missing", [0, 2, None])
def test_no_descriptor_outlives_an_import(monkeypatch: pytest.MonkeyPatch, missing: int | None) -> None:
    """Of `SIZE` ranks, this one is 1; whether or not a peer's region cannot be had."""
    group = LoopGroup(1, SIZE)
    host: Any = SimpleNamespace(mark_gone=None)
    made: Any = Domain(group, 5.0, "abi", host)
    own, attached = os.open(os.devnull, os.O_RDONLY), list[list[int]]()
    made.mailbox = SimpleNamespace(
        fd=own, connect=lambda *_: None, attach=lambda fds: attached.append([os.fstat(fd).st_ino for fd in fds])
    )
    made.region = SimpleNamespace(mapping=SimpleNamespace(address=1))
    monkeypatch.setattr(domain, "PeerWatch", lambda pids, tell: None)

    def bring(rank: int, ticket: RegionTicket, share: Any) -> tuple[int, Any, int]:
        if rank == missing:
            raise TransportError(f"nvlink: cannot map the memory of rank {rank}")
        return os.open(os.devnull, os.O_RDONLY), SimpleNamespace(address=rank), 0

    made._import = bring
    blank = RegionTicket("abi", "fabric", 0, 0, b"", b"", Host("here"))
    before = os.listdir("/proc/self/fd")
    if missing is None:
        made.import_regions([blank.encode()] * SIZE)
        assert attached == [[os.fstat(own).st_ino] * SIZE], "open while they are mapped"
    else:
        with pytest.raises(TransportError, match=f"rank {missing}"):
            made.import_regions([blank.encode()] * SIZE)
    assert os.listdir("/proc/self/fd") == before
    os.close(own)


def test_what_the_network_brings_is_shared_with_ranks_of_the_host() -> None:
    own, page = Landing(4096), os.open(os.devnull, os.O_RDONLY)
    server = sharing.DescriptorServer([page, own.fd, page])
    made: Any = Domain(LoopGroup(1, SIZE), 5.0, "abi", SimpleNamespace())  # type: ignore[arg-type]
    made._mapped, shared = lambda *_: "region", dict[int, Landing]()
    ticket = RegionTicket("abi", "posix_fd", 0, 0, server.address, b"", Host("here", shares=True))
    got, mapped, _ = made._import(2, ticket, lambda rank, fd: shared.update({rank: Landing(4096, fd)}))
    server.close()
    own.memory[:4] = b"rows"
    assert mapped == "region"
    assert shared[2].memory[:4] == b"rows"
    own.close()
    own.close()
    for fd in (got, page):
        os.close(fd)


def test_a_rank_whose_boxes_are_on_its_gpu_shares_none() -> None:
    """Ranks 0, 2 and 3 are of one host, 1 and 4 of another."""
    boxes: Any = "ticket"
    hosts = [
        Host(name, boxes, boxes, shares) for name, shares in zip("abaab", (True, True, False, True, True), strict=True)
    ]
    made: Any = Domain(LoopGroup(0, 5), 5.0, "abi", SimpleNamespace())  # type: ignore[arg-type]
    made._boxes = boxes
    made._find_boxes([SimpleNamespace(host=host) for host in hosts], dict.fromkeys((1, 4), boxes))
    assert (made.hosts, made.landings) == ((0, 1, 0, 0, 1), (0, 1, 2, 0, 1))


def test_descriptors_of_another_user_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read, write])
    monkeypatch.setattr(sharing, "_peer_of", lambda connection: (1, os.geteuid() + 1))
    try:
        with pytest.raises(TransportError, match=f"rank 1 gave no memory handle .it runs as user {os.geteuid() + 1}"):
            sharing.fetch(1, server.address, 2, 5)
    finally:
        server.close()
        os.close(read)
        os.close(write)


def test_only_who_knows_the_nonce_gets_them() -> None:
    read, write = os.pipe()
    server = sharing.DescriptorServer([read, write])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="rank 4 refused"):
        sharing.fetch(4, bytes(16) + server.address[16:], 2, 5)
    assert len(sharing.fetch(4, server.address, 2, 5)[0]) == 2, "and the server still serves"
    server.close()  # its thread has ended, which had the other end of either connection
    assert len(os.listdir("/proc/self/fd")) == before + 2 - 1
    for fd in (read, write):
        os.close(fd)


def test_a_launch_wakes_the_proxy_first() -> None:
    """Of ranks that have one; kernels that push cannot."""
    did: list[str] = []
    streams = SimpleNamespace(enter=lambda: did.append("stream") or 7)
    channel = SimpleNamespace(wake=lambda: did.append("wake"))
    for remote, wanted in ((None, ["stream"]), (SimpleNamespace(channel=channel), ["wake", "stream"])):
        member: Any = SimpleNamespace(_remote=remote, _streams=streams)
        assert NvlinkMember.enter(member) == 7
        assert did == wanted
        did.clear()


def test_a_rank_that_got_no_region_gives_the_network_back() -> None:
    """As where its kernels do not compile: else the port would let others in, and a proxy watch its ring, for good."""
    closed = list[str]()
    config = SimpleNamespace(group=SimpleNamespace(size=2, epoch=0))
    member = NvlinkMember(config, "abi")
    member._remote = SimpleNamespace(close=lambda: closed.append("network"))  # type: ignore[assignment]
    member.close()
    member.close()
    assert closed == ["network"]


def test_close_waits_until_rows_and_words_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[tuple[str, float]]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    member = NvlinkMember(SimpleNamespace(group=SimpleNamespace(size=2, epoch=0)), "abi")
    member._remote = SimpleNamespace(settle=lambda most_s: waited.append(("rows", most_s)))  # type: ignore[assignment]
    member._device = torch.device("cuda", 0)
    mailbox = SimpleNamespace(settle=lambda most_s: waited.append(("words", most_s)))
    member._domain = SimpleNamespace(mailbox=mailbox)  # type: ignore[assignment]
    member.drain(7.0)
    assert waited == [("rows", 7.0), ("words", 7.0)]


@pytest.mark.parametrize("settle", [RemoteRanks.settle, Mailbox.settle])
def test_abort_ends_the_wait_for_a_rank_that_takes_nothing(settle: Callable[[Any, float], int]) -> None:
    channel = SimpleNamespace(
        aborted=None, up=lambda: 2, is_quiet=lambda mask: mask != 2, ranks=(1,), has_given_up=lambda ranks: False
    )
    waiter: Any = SimpleNamespace(ranks=(1,), channel=channel, remote=channel, _active=[True, True], _aborted=None)
    waiter._is_over = lambda: waiter._aborted is not None
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(settle, waiter, WAIT_S)
        with pytest.raises(TimeoutError):
            done.result(0.1)
        channel.aborted = waiter._aborted = "why"
        assert done.result(5.0) == 0
        channel.aborted = waiter._aborted = None
        assert settle(waiter, 0.01) == 2


def test_a_member_is_on_no_stream_behind_a_barrier_and_once_closed() -> None:
    did = list[str]()
    member: Any = NvlinkMember(SimpleNamespace(group=SimpleNamespace(size=2, epoch=0)), "abi")
    member._barrier_call = member._launch = lambda _: None
    member._streams = SimpleNamespace(rest=lambda: did.append("rest"))
    member._tables = SimpleNamespace(host=SimpleNamespace(relate_clocks=lambda: None, abort=did.append))
    member.settle = lambda: did.append("host waited")
    member.barrier()
    member.close()
    assert did == ["host waited", "rest", "rest", "the communicator was closed"]


def test_set_active_names_a_rank_that_takes_nothing(boxes: list[Mailbox], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rows of the old epoch would arrive in the new one."""
    unsent = r"^set_active: rank 2 did not deliver credit .*: what this rank has for it does not leave$"
    with monkeypatch.context() as patched:
        patched.setattr(boxes[0], "remote", SimpleNamespace(ranks=[2], is_quiet=lambda mask: not mask & 4))
        with pytest.raises(PeerTimeout, match=unsent) as error:
            boxes[0].agree([True] * SIZE, 1, (0, 0, 0), 0, 0.01)
    assert error.value.peer == 2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    host = SimpleNamespace(interrupted=contextlib.nullcontext)
    config = SimpleNamespace(group=SimpleNamespace(size=3, epoch=0), timeout_s=0.01)
    member: Any = NvlinkMember(config, "abi")
    member._tables, member._domain = SimpleNamespace(host=host), SimpleNamespace(mailbox=None)
    member._device, member._settle_copies = torch.device("cuda", 0), lambda: None
    channel = SimpleNamespace(
        aborted=None, up=lambda: 6, is_quiet=lambda mask: not mask & 4, has_given_up=lambda ranks: False
    )
    remote: Any = RemoteRanks.__new__(RemoteRanks)
    remote._tickets, remote.channel, remote._native = dict.fromkeys((1, 2)), channel, None
    member._remote = remote
    with pytest.raises(PeerTimeout, match=unsent):
        member.set_active([True] * SIZE, 1)
