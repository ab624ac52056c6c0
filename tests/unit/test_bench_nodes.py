"""The benchmark of GPUs as several hosts: what it says must travel is what the transport's byte map moves."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bounds
from benchmarks.cases import Case, draw
from benchmarks.gpu import Inputs, check
from benchmarks.gpu.nodes import iterations_of, numbers
from benchmarks.gpu.nodes_network import most_rows, network_of, remote_of, rows_by_rail, sizes_of
from ep_kernels import MoEConfig, reference
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.plan import most_blocks, slice_lag, slice_rows, slices_of
from ep_kernels.types import Layout, Mode
from tests.groups import LonelyGroup

FIELDS = ("x", "topk_ids", "topk_weights")


@pytest.mark.parametrize("layout", [Layout.RANK_MAJOR, Layout.EXPERT_MAJOR, Layout.FLAT])
@pytest.mark.parametrize(("hidden", "topk", "experts"), [(7168, 8, 256), (2056, 6, 60)])
def test_bytes_are_those_of_the_byte_map(layout: Layout, hidden: int, topk: int, experts: int) -> None:
    case, rows = Case(Mode.LL, layout, 4, 16, hidden, experts, topk), 11
    config = MoEConfig(
        group=LonelyGroup(0, 4), num_experts=experts, hidden_size=hidden, topk=topk, max_tokens_per_rank=16,
        mode=Mode.LL, layout=layout, network=network_of(0, 4, 2, "tcp", 20),
    )  # fmt: skip
    shape = plan.sizes_of(config).shape
    counts = [128 * -(-experts // 4 // 28)] if layout is Layout.EXPERT_MAJOR else []
    row = [rows * shape.metadata_lines * 128, rows * shape.row_packets * 1024]
    assert sizes_of(case, "dispatch", rows) == [16, *counts, *row]
    assert sizes_of(case, "combine", rows) == [16, rows * shape.combine_packets * 1024]
    assert sizes_of(case, "dispatch", 0) == [16, *counts]
    assert sizes_of(case, "combine", 0) == [16]


def test_bytes_of_an_exact_combine() -> None:
    """A row for each (token, k), so more of them, and slices at fewer tokens."""
    case = Case(Mode.LL, Layout.EXPERT_MAJOR, 4, 16, 7168, 256, 8, exact_combine=True)
    config = MoEConfig(
        group=LonelyGroup(0, 4), num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=16,
        mode=Mode.LL, layout=case.layout, network=network_of(0, 4, 2, "tcp", 20), exact_combine=True,
    )  # fmt: skip
    shape = plan.sizes_of(config).shape
    row = shape.combine_packets * 1024
    assert slices_of(shape, 1 << 20) == (0, 18)
    assert sizes_of(case, "combine", 40) == [16, 18 * row, 18 * row, 4 * row]
    assert sizes_of(case, "dispatch", 11)[-1] == 11 * shape.row_packets * 1024
    assert (most_rows(case, "dispatch"), most_rows(case, "combine")) == (16, 128)


def test_rows_of_an_exact_combine() -> None:
    ids = torch.tensor([[0, 1, 63], [64, -1, 65], [-1, -1, -1]])
    for exact, back in ((False, [1, 1]), (True, [3, 2])):
        case = Case(Mode.LL, Layout.EXPERT_MAJOR, 2, 3, experts=128, topk=3, exact_combine=exact)
        assert bounds.rows_to(case, ids).tolist() == [1, 1]
        assert bounds.rows_back(case, ids).tolist() == back


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_expected_is_the_reference(exact: bool) -> None:
    """Experts of which each gives another row, holes, of two ranks."""
    case = Case(Mode.LL, Layout.EXPERT_MAJOR, 2, 5, 256, 8, 3, routing="holes", exact_combine=exact)
    config = MoEConfig(
        group=LonelyGroup(0, 2), num_experts=8, hidden_size=256, topk=3, max_tokens_per_rank=5, layout=case.layout,
        exact_combine=exact,
    )  # fmt: skip
    drawn = [draw(case, rank, 7) for rank in range(2)]
    given = [Inputs(torch.randn(5, 256).bfloat16(), *one) for one in drawn]
    outs, step = reference.dispatch(config, *([getattr(g, name) for g in given] for name in FIELDS))
    gain = (1 + torch.arange(4) / 4)[:, None].expand(outs[0].tokens.shape[:-1])
    zs, _ = reference.combine(step, [check.toy_per_expert(out.tokens, gain, case.dtype) for out in outs])
    for inputs, z in zip(given, zs, strict=True):
        assert check.fault(z, check.expected(case, inputs, check.toy(case, inputs)), exact=True) == ""


def test_many_rows_travel_in_slices() -> None:
    row, many = 15 << 10, Case(Mode.LL, Layout.RANK_MAJOR, 2, 128)
    assert sizes_of(many, "combine", 40) == [16, 18 * row, 18 * row, 4 * row]
    assert sizes_of(many, "dispatch", 36) == [16, 36 * 256, 18 * row, 18 * row]
    assert [slice_rows(most, row) for most in (35, 36, 512, 8192)] == [0, 18, 18, 265]
    for most in (36, 511, 8192, 100_000):
        assert -(-most // slice_rows(most, row)) <= abi.MAX_SLICES


def test_rows_go_once_to_another_host() -> None:
    """Of four ranks of 64 experts, on two hosts: what rank 1 has for ranks 2 and 3 goes to rank 3."""
    case = Case(Mode.LL, Layout.RANK_MAJOR, 4, 3, topk=3)
    ids = torch.tensor([[0, 128, 200], [64, -1, 255], [1, 2, 3]])
    assert rows_by_rail(case, ids, 1, 2).tolist() == [0, 0, 0, 2]
    assert rows_by_rail(case, ids, 2, 2).tolist() == [3, 0, 0, 0]
    assert rows_by_rail(case, ids, 1, 4).tolist() == bounds.remote(bounds.rows_to(case, ids).expand(4, 4))[1].tolist()
    assert sizes_of(case, "dispatch", 1, 2)[1:] == [128, 2 * 15 * 1024]
    assert sizes_of(case, "dispatch", 1, 0)[1:] == [128], "by another rank"


def test_who_is_on_another_host() -> None:
    assert remote_of(1, 4, 2) == [2, 3]
    assert remote_of(3, 4, 4) == [0, 1, 2]
    assert {network_of(rank, 8, 2, "tcp", 20).domain for rank in range(4)} == {"host 0"}


def test_long_operations_are_timed_less_often() -> None:
    case = Case(Mode.HT, Layout.FLAT)
    assert [iterations_of(Case(case.mode, case.layout, tokens=t), 100) for t in (1, 512, 2048, 8192)] == [
        100,
        100,
        25,
        10,
    ]
    assert numbers("1,128") == (1, 128)


def test_few_tokens_have_few_blocks_over_a_network() -> None:
    def of(tokens: int, **fields: object) -> MoEConfig:
        shape = {"num_experts": 8, "hidden_size": 64, "topk": 2, "max_tokens_per_rank": tokens}
        return MoEConfig(group=LonelyGroup(0, 2), **shape, **fields)  # type: ignore[arg-type]

    network = network_of(0, 2, 2, "tcp", 20)
    assert [most_blocks(of(t, network=network), None, 132) for t in (1, 32, 128, 8192)] == [4, 8, 32, 132]
    assert most_blocks(of(1, network=network), None, 2) == 2
    assert most_blocks(of(1), None, 132) == 132, "of one domain: as ever"
    assert most_blocks(of(1, network=network), 16, 132) == 16, "as the caller says"


def test_over_sockets_slices_are_read_two_mebibytes_later() -> None:
    wanted = {"tcp": [8, 3, 1], "shuffle(tcp)": [8, 3, 1], "libfabric(tcp;ofi_rxm)": [8, 3, 1], "verbs": [0, 0, 0]}
    for provider, lags in wanted.items():
        network = NetworkConfig(provider=provider)
        assert [slice_lag(network, size) for size in (256 << 10, 1_000_000, 4 << 20)] == lags
        assert slice_lag(network, 0) == 0, "there are none"
