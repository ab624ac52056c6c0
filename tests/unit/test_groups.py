"""Bootstraps: what one rank gives, all ranks get; a missing one is named."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ep_kernels import Mode, MoECommunicator, StoreGroup, TorchGroup
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.config import Group
from ep_kernels.errors import ConfigError, TransportError
from tests.cases import RoutingCase, draw_seed
from tests.waiting import until
from tests.worlds import World

PAYLOADS = [b"", b"\x00", b"rank 2 " * 5000]


def gathers(rank: int, size: int, store: Any, kind: str) -> None:
    if kind == "torch":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        group: Group = TorchGroup() if kind == "torch" else StoreGroup(store, rank, size, epoch=3)
        assert isinstance(group, Group)
        assert (group.rank, group.size, group.epoch) == (rank, size, 0 if kind == "torch" else 3)
        assert list(group.all_gather(PAYLOADS[rank], 20.0)) == PAYLOADS
        again = PAYLOADS[-1 - rank]
        assert list(group.all_gather(again, 20.0)) == PAYLOADS[::-1]
        case = RoutingCase(4, 2, 16, (2, 3, 1), seed=draw_seed())
        with MoECommunicator(case.config(group)) as comm:
            assert len(comm.exchange([rank] * 8)) == size
    finally:
        if kind == "torch":
            dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_everybody_gets_everything(kind: str) -> None:
    World(3).run(gathers, kind)


@contextlib.contextmanager
def group_of(kind: str, rank: int, size: int, store: Any) -> Iterator[Group]:
    """The process group's own deadline is torch's, half an hour."""
    if kind == "store":
        yield StoreGroup(store, rank, size)
        return
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield TorchGroup()
    finally:
        dist.destroy_process_group()


def ranks_that_do_not_come(rank: int, size: int, store: Any, kind: str) -> None:
    """Rank 2 stays away: rank 1, who would wait for long, ends with rank 0. Then rank 2 is in step with the others."""
    with group_of(kind, rank, size, store) as group:
        begin = time.monotonic()
        if rank < 2:
            with pytest.raises(TransportError, match=r"^bring-up: ranks \[2\] did not arrive within 0.5 s$"):
                group.all_gather(b"first", (0.5, 100.0)[rank])
            assert time.monotonic() - begin < 20
            store.set(f"ended/{rank}", b"")
        store.wait(["ended/0", "ended/1"], timedelta(seconds=60))
        assert list(group.all_gather(b"%d" % rank, 20.0)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_missing_ranks_are_named_and_the_next_exchange_is_whole(kind: str) -> None:
    World(3).run(ranks_that_do_not_come, kind)


def a_rank_comes_too_late(rank: int, size: int, store: Any) -> None:
    """It hears that its peer had come before, and the peer's next exchange does not take its words for new ones."""
    group = StoreGroup(store, rank, size)
    if rank == 0:
        with pytest.raises(TransportError, match=r"ranks \[1\] did not arrive within 0.1 s$"):
            group.all_gather(b"early", 0.1)
        store.set("gone", b"")
        store.wait(["late"], timedelta(seconds=60))
    else:
        store.wait(["gone"], timedelta(seconds=60))
        with pytest.raises(
            TransportError, match=r"\[0\] did not .* 0.2 s; before this rank came, ranks \[1\] .* 0.1 s$"
        ):
            group.all_gather(b"late", 0.2)
        store.set("late", b"")
    assert list(group.all_gather(b"%d" % rank, 20.0)) == [b"0", b"1"]


def test_a_rank_that_comes_too_late_hears_why() -> None:
    World(2).run(a_rank_comes_too_late)


def members_of_many_groups(rank: int, size: int, store: Any) -> None:
    """Two objects of one process group count its exchanges together; sub-groups have their own."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        pair = dist.new_group([1, 2])
        for turn in range(3):
            if rank:
                assert list(TorchGroup(pair).all_gather(b"%d" % rank, 20.0)) == [b"1", b"2"]
            everybody = TorchGroup().all_gather(b"%d in turn %d" % (rank, turn), 20.0)
            assert list(everybody) == [b"%d in turn %d" % (one, turn) for one in range(size)]
    finally:
        dist.destroy_process_group()


def test_exchanges_of_process_groups_do_not_mix() -> None:
    World(3).run(members_of_many_groups)


def communicators_wait_as_configured(rank: int, size: int, store: Any, kind: str) -> None:
    """Rank 1 lives and stays away."""
    with group_of(kind, rank, size, store) as group:
        if rank == 0:
            case = RoutingCase(4, 2, 16, (2, 3), seed=draw_seed())
            for make in (
                lambda: MoECommunicator(case.config(group, timeout_s=0.2)),
                lambda: MoECommunicator(case.config(group, timeout_s=0.2, mode=Mode.AUTO)),
                lambda: Collectives(CollectiveConfig(group=group, transport="cpu", timeout_s=0.2)),
            ):
                begin = time.monotonic()
                with pytest.raises(TransportError, match=r"ranks \[1\] did not arrive within 0.2 s"):
                    make()
                assert time.monotonic() - begin < 20
            store.set("done", b"")
        store.wait(["done"], timedelta(seconds=60))


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_a_communicator_waits_as_long_as_it_was_told(kind: str) -> None:
    World(2).run(communicators_wait_as_configured, kind)


def the_store_stands_still(rank: int, size: int, store: Any, kind: str) -> None:
    """Rank 0, which serves the store, is stopped."""
    options: dict[str, Any] = {"is_master": rank == 0, "wait_for_workers": False}
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, size, **options)  # type: ignore[attr-defined]
        store.set("port", str(served.port))
    else:
        port = int(store.get("port"))
        served = dist.TCPStore("127.0.0.1", port, size, **options)  # type: ignore[attr-defined]
    with group_of(kind, rank, size, served) as group:
        assert list(group.all_gather(b"%d" % rank, 20.0)) == [b"0", b"1"]
        if rank == 0:
            store.set("pid", str(os.getpid()))
            store.wait(["done"], timedelta(seconds=60))
            return
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
            begin = time.monotonic()
            with pytest.raises(TransportError, match=r"the store of the group did not answer within 0.1 s"):
                group.all_gather(b"", 0.1)
            assert time.monotonic() - begin < 20
        finally:
            os.kill(pid, signal.SIGCONT)
            store.set("done", b"")


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_a_store_that_stands_still_is_named(kind: str) -> None:
    World(2).run(the_store_stands_still, kind)


def the_name_is_used_twice(rank: int, size: int, store: Any) -> None:
    """Every rank is refused: its peers' words of before would be taken for those of now, and their regions, too."""
    first = StoreGroup(store, rank, size, name="layer")
    assert len(first.all_gather(b"ticket", 20.0)) == len(first.all_gather(b"again", 20.0)) == size
    with pytest.raises(ConfigError, match=r"group: expected a StoreGroup whose name is new .*, got 'layer'"):
        StoreGroup(store, rank, size, name="layer").all_gather(b"ticket", 20.0)
    for other in (StoreGroup(store, rank, size, name="layer", epoch=1), StoreGroup(store, rank, size, name="other")):
        assert len(other.all_gather(b"ticket", 20.0)) == size


def test_a_second_group_of_a_name_is_refused() -> None:
    World(2).run(the_name_is_used_twice)


def epochs_do_not_mix(rank: int, size: int, store: Any) -> list[bytes]:
    old = StoreGroup(store, rank, size, epoch=1)
    new = StoreGroup(store, rank, size, epoch=2)
    first = new.all_gather(b"new %d" % rank, 20.0)
    assert list(old.all_gather(b"old %d" % rank, 20.0)) == [b"old 0", b"old 1"]
    return list(first)


def test_one_store_serves_many_epochs() -> None:
    assert World(2).run(epochs_do_not_mix) == [[b"new 0", b"new 1"]] * 2
