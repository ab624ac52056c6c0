"""FSDP2 training steps over a gloo world, with our all-gather and without, and compiled functions. On every rank."""

from __future__ import annotations

import gc
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu import fsdp
from benchmarks.gpu.fsdp_model import SIZES
from crossdock.common.transports import needs_gpu
from ep_kernels import TorchGroup
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.fsdp import AllGather
from ep_kernels.collectives.zero import ZeroGathers
from ep_kernels.errors import ArgumentError, PeerTimeout
from tests.collectives.fallback_stories import gloo
from tests.collectives.steps import Seat, Store, check_all, everyone, on_device, same_bits, values

WIDTH = 33
"""Rows that ranks do not divide."""


class Model(nn.Module):
    """Three blocks with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        return self.head(x)


class Counting(AllGather):
    """How many gathers ran, how many of them in registered memory."""

    def __init__(self, coll: Collectives) -> None:
        super().__init__(coll)
        self.calls = self.registered = 0

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.registered += self._coll._transport.offset_of(output_tensor) is not None  # type: ignore[attr-defined]
        return super().__call__(output_tensor, *args, **kwargs)


def losses(device: str, rank: int, size: int, gather: AllGather | None, how: dict[str, Any]) -> list[float]:
    """Of 20 steps of a model that is the same on all ranks; data differ."""
    torch.manual_seed(1)
    mesh = init_device_mesh(device, (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how.get("mixed") else MixedPrecisionPolicy()
    model = Model().to(device)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=how.get("reshard", True))
        if gather is not None:
            module.set_custom_all_gather(gather)
    if how.get("prefetch"):
        for first, second in zip(model.blocks, model.blocks[1:], strict=False):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(20):
        x = values((5, WIDTH), torch.float32, rank, step).to(device)
        if how.get("async"):
            for block in model.blocks:
                block.unshard(async_op=True)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def with_and_without(
    rank: int, size: int, store: Store, transport: str, how: dict[str, Any], pool_bytes: int
) -> tuple[int, int]:
    """20 steps: bit-identical losses; (gathers, those in registered memory)."""
    with gloo(rank, size, store), warnings.catch_warnings():
        warnings.simplefilter("ignore" if pool_bytes else "error", RuntimeWarning)
        device = "cuda" if needs_gpu(transport) else "cpu"
        plain = losses(device, rank, size, None, how)
        config = CollectiveConfig(group=TorchGroup(), transport=transport, pool_bytes=pool_bytes)
        with Collectives(config) as coll:
            gather = Counting(coll)
            ours = losses(device, rank, size, gather, how)
            coll.barrier()
        assert ours == plain
        assert len(set(plain)) == 20, "the model learns"
        return gather.calls, gather.registered


def benchmark_steps(rank: int, size: int, store: Store) -> None:
    """The steps of the benchmark, on CPUs: its pool has room for all buffers of a step, and losses are equal."""
    with gloo(rank, size, store), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        device, tiny = torch.device("cpu"), SIZES["tiny"]
        plain, *ours = (
            fsdp.trained(gather, tiny, 3, 1, device).losses for gather in ("nccl", "crossdock", "crossdock_staged")
        )
        assert ours == [plain, plain]
        assert len(set(plain)) == 3


def wrong_group(rank: int, size: int, store: Store, transport: str) -> None:
    """Collectives of other ranks than the module's are refused."""
    with gloo(rank, size, store):
        alone = [dist.new_group([r]) for r in range(size)][rank]
        with Seat(rank, size, store, transport).collectives() as coll:
            x = torch.zeros(4)
            with pytest.raises(ArgumentError, match=f"group: expected rank {rank} of {size}, as the collectives"):
                AllGather(coll)(torch.zeros(4), x, alone)


def held_buffers(rank: int, size: int, store: Store) -> None:
    """Rank 0 holds a gathered tensor. As garbage it costs nothing; held for good, both ranks say what may be why."""
    with gloo(rank, size, store), Seat(rank, size, store, "cpu").collectives(timeout_s=3.0) as coll:
        gather = AllGather(coll)

        def step(*, later: bool = False) -> torch.Tensor:
            out = gather.allocate((size,), dtype=torch.float32, device=torch.device("cpu"))
            done = gather(out, out[rank : rank + 1].fill_(rank), dist.group.WORLD, async_op=later)
            assert done is None or done.wait()
            return out

        gc.disable()
        try:
            circle: list[Any] = [step()] if rank == 0 else [step() * 1]
            circle.append(circle)
            del circle
            step()
        finally:
            gc.enable()
        gathers = coll.samples()
        assert [sample.op for sample in gathers].count("exchange") == 1, "for the buffer"
        held = step() if rank == 0 else step() * 1
        with pytest.raises(PeerTimeout) as error:
            step(later=rank == 1)
        does = ("asks all for one more buffer of 8 bytes, beside 1 in use here", "gathers into a buffer that it has")[
            rank
        ]
        assert f"this rank {does}" in "".join(error.value.__notes__), held
        store.set(f"told/{rank}", b"")
        store.wait(["told/0", "told/1"])


def other_ranks(rank: int, size: int, store: Store) -> None:
    """As many, and this one at the same place among them: strided pairs, and pairs from both ends."""
    with gloo(rank, size, store):
        strided, mirrored = (
            [dist.new_group(list(pair)) for pair in pairs][index]
            for pairs, index in ((((0, 2), (1, 3)), rank % 2), (((0, 3), (1, 2)), int(rank in (1, 2))))
        )
        assert dist.get_rank(strided) == dist.get_rank(mirrored)
        with Collectives(CollectiveConfig(group=TorchGroup(strided), pool_bytes=1 << 16)) as coll:
            gather, out, x = AllGather(coll), torch.zeros(2), torch.full((1,), float(rank))
            gather(out, x, strided)
            assert out.tolist() == [rank % 2, rank % 2 + 2]
            with pytest.raises(ArgumentError, match="group: expected ranks"):
                gather(out, x, mirrored)


class _Backend:
    """As DeepSpeed's object behind its all-gathers."""

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def stand_in_for_deepspeed() -> Any:
    """What `ZeroGathers` and the story below need of the module, laid out as there."""
    module: Any = SimpleNamespace(cdb=_Backend())

    def gather(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        return module.cdb.all_gather_into_tensor(output_tensor=out, input_tensor=x, group=group, async_op=async_op)

    return SimpleNamespace(comm=SimpleNamespace(comm=module, all_gather_into_tensor=gather))


def zero_without_deepspeed(rank: int, size: int, store: Store, transport: str) -> None:
    """The story below over a stand-in; what is not initialised is refused."""
    with gloo(rank, size, store):
        deepspeed = stand_in_for_deepspeed()
        own_way_of_zero(deepspeed, rank, size, transport)
        deepspeed.comm.comm.cdb = None
        with Seat(rank, size, store, transport).collectives() as coll:
            with pytest.raises(ArgumentError, match="deepspeed: expected an initialised module"):
                ZeroGathers(coll, deepspeed)
            coll.barrier()


def own_way_of_zero(deepspeed: Any, rank: int, size: int, transport: str) -> None:
    """Groups of other ranks, large shards, tensors of other strides and devices go DeepSpeed's own way, with one
    warning; once the gathers are closed all do."""
    device = "cuda" if needs_gpu(transport) else "cpu"
    alone = [dist.new_group([r]) for r in range(size)][rank]
    gather = deepspeed.comm.all_gather_into_tensor
    want = [float(r) for r in range(size) for _ in range(3)]

    def ours(coll: Collectives) -> int:
        return [sample.op for sample in coll.samples()].count("all_gather")

    def told(said: list[warnings.WarningMessage]) -> list[str]:
        return [str(each.message) for each in said if each.category is RuntimeWarning]

    with Collectives(CollectiveConfig(group=TorchGroup(), transport=transport, pool_bytes=0)) as coll:
        x = torch.full((3,), float(rank), device=device)
        out, single = torch.empty(3 * size, device=device), torch.empty(3, device=device)
        with ZeroGathers(coll, deepspeed) as gathers, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert gather(out, x) is None
            assert out.tolist() == want
            work = gather(out.zero_(), x.view(1, 3), async_op=True)
            assert work.wait()
            assert (out.tolist(), ours(coll), told(said)) == (want, 2, [])
            while not work.is_completed():
                time.sleep(0.001)
            for _ in range(2):
                gather(single.zero_(), x, group=alone, async_op=True).wait()
                assert single.tolist() == x.tolist()
            why = f"group: expected rank {rank} of {size}, as the collectives, got rank 0 of 1"
            assert told(said) == [f"an all-gather of DeepSpeed goes its own way: {why}"]
            assert "not contiguous" in gathers._why_not(out[::2], x, None)
            assert "meta" in gathers._why_not(out, x.to("meta"), None)
            assert gathers._why_not(out, x, dist.GroupMember.NON_GROUP_MEMBER) == "group: this rank is not in it"
            large = x.new_empty(coll.config.staging_bytes // 4 + 1)
            assert gathers._why_not(out, large[1:], None) == ""
            assert f"a shard of {large.nbytes} bytes" in gathers._why_not(out, large, None)
            with pytest.raises(ArgumentError, match="deepspeed: expected its own all-gathers"):
                ZeroGathers(coll, deepspeed)
        gathers.close()
        gather(out.zero_(), x)
        assert (out.tolist(), ours(coll)) == (want, 0)
        coll.barrier()


def compiled(rank: int, size: int, store: Store, transport: str, backend: str, dynamic: bool) -> None:
    """All operations in one function, traced whole; every call is right, beside eager operations."""
    torch._dynamo.reset()
    with Seat(rank, size, store, transport).collectives() as coll:

        def step(x: torch.Tensor, w: torch.Tensor, room: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = coll.all_gather(x).wait()
            pair = coll.all_gather_coalesced([x, x[:1].contiguous()]).wait()
            coll.all_reduce(x)  # nobody reads it
            row = coll.reduce_scatter(whole * 2).wait()
            total = coll.all_reduce(row, out=room).wait()
            ys, _ = coll.all_gather_matmul(x, [w])
            (wide,), _ = coll.all_gather_matmul(x, [torch.cat([w] * size)], dim=-1)
            narrow = coll.matmul_reduce_scatter(x, torch.cat([w] * size, dim=1), dim=1)
            return (
                whole, *pair, row, total + 0, ys[0], coll.matmul_reduce_scatter(whole, w), coll.matmul_all_reduce(x, w),
                wide, narrow,
            )  # fmt: skip

        run = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic or None)
        w = on_device(coll, torch.eye(6))
        for number in range(3):
            rows = 3 + number if dynamic else 3
            xs = everyone(coll, (rows, 6), torch.float32, number)
            room = on_device(coll, torch.empty(rows, 6))
            got = run(on_device(coll, xs[rank]), w, room)
            whole = torch.cat(xs)
            rowed = reference.reduce_scatter([whole * 2] * size)
            total = reference.all_reduce([row for row in rowed if row is not None])[rank]
            same_bits(got[0], whole, "all_gather")
            same_bits(got[1], whole, "coalesced")
            same_bits(got[2], torch.cat([x[:1] for x in xs]), "coalesced")
            same_bits(got[3], rowed[rank], "reduce_scatter")
            same_bits(got[4], total, "all_reduce")
            same_bits(room, total, "out")
            same_bits(got[5], whole, "all_gather_matmul")
            same_bits(got[6], reference.reduce_scatter([whole] * size)[rank], "matmul_reduce_scatter")
            same_bits(got[7], reference.all_reduce(xs)[rank], "matmul_all_reduce")
            torch.testing.assert_close(got[8].cpu(), sum(xs, torch.zeros(rows, 6)))
            same_bits(got[9], reference.all_reduce(xs)[rank], "matmul_reduce_scatter of columns")
            check_all(coll, number, number)
        coll.barrier()
