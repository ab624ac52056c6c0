"""Bootstraps: what one rank gives, all ranks get; a missing one is named."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from ep_kernels import MoECommunicator, StoreGroup, TorchGroup
from ep_kernels.config import Group
from ep_kernels.errors import ConfigError, TransportError
from tests.cases import RoutingCase, draw_seed
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


def only_rank_zero_comes(rank: int, size: int, store: Any) -> None:
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(TransportError, match=r"ranks \[1, 2\] did not arrive within 0.3 s"):
            StoreGroup(store, rank, size).all_gather(b"", 0.3)
        assert time.monotonic() - begin < 20


def test_a_missing_rank_is_named() -> None:
    World(3).run(only_rank_zero_comes)


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
