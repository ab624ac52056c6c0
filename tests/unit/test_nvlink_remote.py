"""A domain over several hosts: regions by handles in tickets, words and life by the network, nothing of one host."""

from __future__ import annotations

import ctypes
import enum
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import Network
from ep_kernels.transports.base import EXCHANGE_WORDS
from ep_kernels.transports.nvlink.memory.domain import Domain
from ep_kernels.transports.nvlink.memory.mailbox import Mailbox
from ep_kernels.transports.nvlink.memory.remote_pages import PAGE_BYTES, RemotePages
from ep_kernels.transports.nvlink.memory.ticket import RegionTicket
from tests import worlds
from tests.gpu.loopback_group import LoopGroup

WAIT_S = 30.0
SOON_S = 2.0


@pytest.fixture(autouse=True)
def no_network_stays() -> Iterator[None]:
    """What lingers would be counted by other tests."""
    yield
    for network in list(Network._shared.values()):
        if not network.in_use:
            del Network._shared[network.config]
            network.close()


class Kind(enum.Enum):
    """Of `memory.HandleKind`."""

    FABRIC = "fabric"
    POSIX_FD = "posix_fd"
    CUDA_IPC = "cuda_ipc"


def fake_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """In place of the driver; what was redeemed."""
    redeemed: list[tuple[Any, ...]] = []

    def redeem(kind: Kind, num_bytes: int, device: int, fd: int, token: bytes, lease: Any = None) -> Any:
        redeemed.append((kind, num_bytes, fd, token, lease))
        return SimpleNamespace(address=1, close=lambda: None, close_in_child=lambda: None)

    fake = SimpleNamespace(HandleKind=Kind, redeem=redeem, free_returned=lambda: None, keep=lambda *_: None)
    monkeypatch.setitem(sys.modules, "ep_kernels.transports.nvlink.memory.memory", fake)
    monkeypatch.setattr("ep_kernels.transports.nvlink.memory.memory", fake, raising=False)
    return redeemed


def domain_of(rank: int, size: int, kind: Kind, where: str, name: str = "floor") -> tuple[Any, bytes]:
    """A domain whose region is of that kind, and its ticket, without any server."""
    gone = (ctypes.c_int64 * size)()
    host: Any = SimpleNamespace(
        gone_address=ctypes.addressof(gone), is_gone=lambda peer: gone[peer] == abi.DEAD, mark_gone=None, words=gone
    )
    config = NetworkConfig(listen="127.0.0.1:0", domain=where)
    domain: Any = Domain(LoopGroup(rank, size), WAIT_S, name, host, config)
    domain._device = SimpleNamespace(index=0)
    domain.region = SimpleNamespace(mapping=SimpleNamespace(address=7))
    domain.mailbox = Mailbox(rank, host.is_gone)
    domain._open.append(domain.mailbox)
    return domain, RegionTicket(
        name, kind.value, 4096, rank, b"", f"handle of {rank}".encode(), domain._where()
    ).encode()


def test_fabric_handles_travel_in_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    redeemed = fake_memory(monkeypatch)
    made = [domain_of(rank, 3, Kind.FABRIC, f"tray-{rank}") for rank in range(3)]
    tickets, domains = [ticket for _, ticket in made], [domain for domain, _ in made]
    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(domain.import_regions, tickets) for domain in domains]:
            job.result()
        assert sorted(redeemed) == sorted(
            [(Kind.FABRIC, 4096, -1, f"handle of {r}".encode(), None) for r in (0, 1, 2)] * 2, key=str
        )
        words = [[rank] * EXCHANGE_WORDS for rank in range(3)]
        jobs = [pool.submit(domain.mailbox.exchange, words[rank], WAIT_S) for rank, domain in enumerate(domains)]
        assert [job.result() for job in jobs] == [[tuple(row) for row in words]] * 3
    assert all(domains[0].is_watched(rank) for rank in (1, 2))
    domains[2].close()
    until = time.monotonic() + WAIT_S
    while domains[0].is_watched(2) and time.monotonic() < until:
        time.sleep(0.005)
    assert not domains[0].is_watched(2)
    for domain in domains:
        domain.close()


@pytest.mark.parametrize("name", ["", "f", "floor", "0123456789abcdef", "longer than sixteen", "16 alike: one end"])
def test_an_abi_of_any_length_is_compared_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redeemed = fake_memory(monkeypatch)
    for theirs in (name, name + "\0", name + " "):
        made = [domain_of(rank, 2, Kind.FABRIC, f"tray-{rank}", (name, theirs)[rank]) for rank in range(2)]
        domains, tickets = [domain for domain, _ in made], [ticket for _, ticket in made]
        try:
            if theirs == name:
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(partial(Domain.import_regions, tickets=tickets), domains))
                assert len(redeemed) == 2
            else:
                with pytest.raises(TransportError, match=f"region ABI of rank 1: expected {name}, got {theirs}"):
                    domains[0].import_regions(tickets)
        finally:
            for domain in domains:
                domain.close()


def test_memory_that_does_not_leave_a_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_memory(monkeypatch)
    (one, first), (other, second) = (domain_of(rank, 2, Kind.POSIX_FD, f"host-{rank}") for rank in range(2))
    with pytest.raises(TransportError, match="rank 1, which is on another host: expected a fabric handle, got a file"):
        one.import_regions([first, second])
    for domain in (one, other):
        domain.close()


def _rank(rank: int, pipe: Connection) -> None:
    """A process that exchanges words with the rank of another one, forever."""
    gone = (ctypes.c_int64 * 2)()
    box = Mailbox(rank, lambda peer: gone[peer] == abi.DEAD)
    ticket = box.open_network(NetworkConfig(listen="127.0.0.1:0"), 2, ctypes.addressof(gone), WAIT_S)
    pipe.send(msgspec.json.encode(ticket))
    box.connect({1 - rank: msgspec.json.decode(pipe.recv(), type=NetworkTicket)}, WAIT_S)
    box.attach([box.fd if peer == rank else -1 for peer in range(2)])
    turn = 0
    try:
        while True:
            got = box.exchange([rank, turn, 0, 0, 0, 0, 0, 0], WAIT_S)
            assert got == [(0, turn, 0, 0, 0, 0, 0, 0), (1, turn, 0, 0, 0, 0, 0, 0)]
            turn += 1
            if turn == 100:
                pipe.send("running")
    except PeerTimeout as error:
        pipe.send((error.peer, error.gone, time.monotonic()))


def test_a_killed_process_of_another_host_is_named_at_once() -> None:
    processes = worlds.context()
    pipes = [processes.Pipe() for _ in range(2)]
    ranks = [processes.Process(target=_rank, args=(rank, pipes[rank][1]), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    tickets = [pipe.recv() for pipe, _ in pipes]
    for rank, (pipe, _) in enumerate(pipes):
        pipe.send(tickets[1 - rank])
    assert [pipe.recv() for pipe, _ in pipes] == ["running"] * 2
    killed = time.monotonic()
    ranks[1].kill()
    peer, gone, at = pipes[0][0].recv()
    assert (peer, gone) == (1, True)
    assert at - killed < SOON_S
    for process in ranks:
        process.join(WAIT_S)


def stuck_box(is_quiet: bool) -> Mailbox:
    """Rank 0's, whose proxy takes nothing for rank 1; `is_quiet`: it has sent what it had."""
    box, remote = Mailbox(0, lambda peer: False), RemotePages.__new__(RemotePages)
    remote._tickets, remote._told, remote._joined = {1: None}, [0, 0], [0, 0]  # type: ignore[dict-item, assignment]
    remote._channel = SimpleNamespace(  # type: ignore[assignment]
        push=lambda *_: False, is_quiet=lambda mask: is_quiet, give_up=lambda ranks: None
    )
    box.remote, box._active = remote, [True, True]
    box._pages = [memoryview(box._maps[0]).cast("q"), memoryview(bytearray(PAGE_BYTES)).cast("q")]
    return box


@pytest.mark.parametrize("is_quiet", [True, False])
def test_words_that_do_not_leave_end_a_call_at_its_deadline(is_quiet: bool) -> None:
    box = stuck_box(is_quiet)
    with pytest.raises(PeerTimeout, match=r"exchange: rank 1 did not deliver credit .*does not leave"):
        box.exchange([0] * EXCHANGE_WORDS, 0.05)
    with pytest.raises(PeerTimeout, match=r"set_active: rank 1 did not deliver credit .*does not leave"):
        box.agree([True, True], 1, (0, 0, 0), 0, 0.05)
    box.give_up([1])
    with pytest.raises(PeerTimeout) as raised:
        box.exchange([0] * EXCHANGE_WORDS, WAIT_S)
    assert raised.value.given_up
