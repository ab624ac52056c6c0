"""What a program may have set in torch before it uses ours: default device and dtype, inference mode, and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ep_kernels import ArgumentError, Layout, Mode, MoECommunicator, MoEConfig
from ep_kernels.collectives import CollectiveConfig, Collectives
from ep_kernels.routing import delivered
from tests.groups import LonelyGroup

E, H, K, T = 8, 64, 2, 5


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids with -1 among them, weights."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    ids = torch.randint(-1, E, (T, K), dtype=torch.int32, device="cpu")
    return torch.randn(T, H, **like), ids, torch.rand(T, K, **like)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.EXPERT_MAJOR, Layout.FLAT, Layout.RANK_MAJOR])
def test_dispatch_and_combine(setting: str, layout: Layout) -> None:
    """In the setting, outside of it, and again."""

    def pair(comm: MoECommunicator) -> None:
        x, ids, weights = inputs()
        out, handle = comm.dispatch(x, ids, weights)
        z = comm.combine(out.tokens.clone(), handle)
        again, other = comm.dispatch(x, ids, None, previous_handle=handle)
        comm.combine_input(other).copy_(again.tokens)
        assert torch.equal(comm.combine_async(comm.combine_input(other).copy_(again.tokens), other).wait(), z)
        comm.dispatch_input(T).copy_(x)
        if layout.per_expert:
            assert comm.row_weights(handle).dtype is torch.float32
            torch.testing.assert_close(z, x * (weights * (ids >= 0)).sum(1, keepdim=True))
        comm.exchange([1] * 8)
        comm.check()

    config = MoEConfig(
        group=LonelyGroup(), num_experts=E, hidden_size=H, topk=K, max_tokens_per_rank=T, transport="cpu",
        mode=Mode.HT, layout=layout, dtype=torch.float32,
    )  # fmt: skip
    with SETTINGS[setting](), MoECommunicator(config) as comm:
        pair(comm)
    with MoECommunicator(config) as comm:
        for _ in range(2):
            with SETTINGS[setting]():
                pair(comm)
            pair(comm)


def trained(layout: Layout, mode: Mode = Mode.HT) -> MoECommunicator:
    return MoECommunicator(
        MoEConfig(
            group=LonelyGroup(), num_experts=E, hidden_size=H, topk=K, max_tokens_per_rank=T, mode=mode,
            layout=layout, dtype=torch.float32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("layout", [Layout.GROUPED, Layout.EXPERT_MAJOR, Layout.FLAT, Layout.RANK_MAJOR])
def test_rows_of_inference_can_be_trained_on_later(layout: Layout) -> None:
    """A program that validates before it trains: each buffer is first used in inference mode."""
    weight = torch.randn(H, H, requires_grad=True)
    with trained(layout) as comm:
        with torch.inference_mode():
            for _ in range(comm.config.max_in_flight):
                comm.dispatch(*inputs())
        out, _ = comm.dispatch(*inputs())
        (torch.where(delivered(out)[..., None], out.tokens, 0) @ weight).sum().backward()
        assert not out.tokens.is_inference()


def test_where_tensors_have_no_memory_calls_are_refused() -> None:
    """Tools that estimate a model's memory run it so. Native code would write to address 0."""
    x, ids, weights = inputs()
    with trained(Layout.RANK_MAJOR) as comm:
        out, handle = comm.dispatch(x, ids, weights)
        y = out.tokens.clone()
        calls: list[Callable[[], Any]] = [
            lambda: comm.dispatch(x, ids, weights),
            lambda: comm.dispatch(x, None, None, previous_handle=handle),
            lambda: comm.dispatch_async(x, ids, weights),
            lambda: comm.combine(y, handle),
            lambda: comm.combine_async(y, handle),
        ]
        with FakeTensorMode(allow_non_fake_inputs=True):
            for call in calls:
                with pytest.raises(ArgumentError, match=r"under a mode that makes .*FakeTensor"):
                    call()
        again, _ = comm.dispatch(x, ids, weights)
        rows = delivered(again)
        assert torch.equal(again.tokens[rows], y[rows])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.GROUPED])
def test_gradients_of_recycled_rows_are_refused(mode: Callable[[], Any], layout: Layout) -> None:
    """Expert rows that autograd has saved and a later dispatch has overwritten, that of a checkpointed layer say: an
    error, not other gradients."""
    weight = torch.randn(H, H, requires_grad=True)
    with trained(layout) as comm:
        losses = []
        for _ in range(comm.config.max_in_flight):
            out, _ = comm.dispatch(*inputs())
            losses.append((out.tokens @ weight).sum())
        with mode():
            comm.dispatch(*inputs())
        for loss in losses[1:]:
            loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.GROUPED])
@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_of_an_overwritten_out_are_refused(mode: Callable[[], Any], layout: Layout, at_once: bool) -> None:
    """As torch refuses them after an operation of its own with `out`."""
    weight = torch.randn(H, H, requires_grad=True)
    with trained(layout) as comm:
        out, handle = comm.dispatch(*inputs())
        z, y = torch.empty(T, H, dtype=torch.float32), out.tokens.clone()
        loss = (comm.combine(y, handle, out=z) @ weight).sum()
        with mode():
            combined = comm.combine(y, handle, out=z) if at_once else comm.combine_async(y, handle, out=z).wait()
        assert combined is z
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("setting", SETTINGS)
def test_collectives(setting: str) -> None:
    def each(coll: Collectives) -> None:
        x = inputs()[0]
        kept = coll.empty((T, H), torch.float32).copy_(x)
        for given in (x, kept):
            assert torch.equal(coll.all_reduce(given).wait(), x)
            assert torch.equal(coll.all_gather(given).wait(), x)
            assert torch.equal(coll.reduce_scatter(given).wait(), x)
        assert coll.all_gather_matmul(x, [x.T.contiguous()])[1].shape == x.shape

    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        for _ in range(2):
            with SETTINGS[setting]():
                each(coll)
            each(coll)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("repeats", [0, 3])
def test_collectives_where_tensors_have_no_memory(repeats: int) -> None:
    """First calls, and calls like earlier ones."""
    x, weight = inputs()[0], torch.eye(H)
    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        calls: list[Callable[[], Any]] = [
            lambda: coll.all_reduce(x).wait(),
            lambda: coll.all_gather(x).wait(),
            lambda: coll.reduce_scatter(x).wait(),
            lambda: coll.all_gather_matmul(x, [weight]),
            lambda: coll.matmul_reduce_scatter(x, weight),
        ]
        for call in calls:
            for _ in range(repeats):
                call()
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ArgumentError, match="with memory"):
                call()
            call()
