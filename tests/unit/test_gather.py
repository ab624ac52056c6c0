"""The parts of `Mode.AG` that need no peer: what is refused, the byte map, the routing, what errors and records are
called. Bits: tests/transports, beside LL and HT."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from crossdock.common.operation_counts import by_kind, lost
from ep_kernels import quant, reference
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.config import MoEConfig
from ep_kernels.errors import AbortedError, ConfigError, HandleError, PeerTimeout, TransportError
from ep_kernels.gather import gather_memory as memory
from ep_kernels.gather.gather_engine import GatherEngine
from ep_kernels.gather.gather_member import GatherMember, renamed
from ep_kernels.gather.gather_operations import GatherDispatch
from ep_kernels.gather.gather_routing import GatherTables
from ep_kernels.network import NetworkConfig
from ep_kernels.routing import route
from ep_kernels.telemetry import Samples
from ep_kernels.transports.base import DispatchArgs, region_map
from ep_kernels.transports.collective_base import GatherArgs
from ep_kernels.transports.nvlink.signature import signature, tags
from ep_kernels.types import LatencySample, Layout, Mode, ScaleFormat
from tests.cases import KINDS, RoutingCase, draw_seed, replicated
from tests.gpu.loopback_group import LoopGroup

CASE = RoutingCase(7, 3, 64, (4, 0, 5), "single_none", draw_seed(), max_tokens=6)


def sample(op: str, mode: str, seq: int, num_bytes: int) -> LatencySample:
    return LatencySample(op, mode, seq, num_bytes, seq, 1, (0, 1, 1), 3)


def config(case: RoutingCase = CASE, rank: int = 0, **changes: Any) -> MoEConfig:
    return case.config(LoopGroup(rank, case.num_ranks), mode=Mode.AG, **changes)


@pytest.mark.parametrize(
    ("field", "changes", "expected"),
    [
        ("layout", {"layout": Layout.FLAT}, "RANK_MAJOR with mode ag, got 'flat'"),
        ("layout", {"layout": Layout.EXPERT_MAJOR}, "RANK_MAJOR with mode ag, got 'expert_major'"),
        ("combine_dtype", {"combine_dtype": torch.float8_e4m3fn}, "None or torch.bfloat16 with mode ag"),
        ("network", {"network": NetworkConfig()}, "None with mode ag: its ranks share one host"),
        ("max_recv_rows", {"max_recv_rows": 3}, "None with RANK_MAJOR"),
        ("max_in_flight", {"max_in_flight": 6}, "at most 5 with mode ag"),
        ("exact_combine", {"exact_combine": True}, "False with rank-wise layouts"),
    ],
)
def test_what_ag_cannot_do_is_refused_by_name(field: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected {expected}"):
        config(**changes)


def test_every_token_of_every_rank_is_delivered_where_its_place_is() -> None:
    c, ranks = config(), range(3)
    xs, ids = [CASE.x(r, torch.bfloat16) for r in ranks], [CASE.topk_ids(r) for r in ranks]
    outputs, _ = reference.dispatch(c, xs, ids, [CASE.topk_weights(r) for r in ranks])
    for rank, out in enumerate(outputs):
        assert out.counts.tolist() == [4, 0, 5]
        assert out.topk_ids is not None
        for source in ranks:
            assert torch.equal(out.tokens[source, : len(xs[source])].view(torch.int16), xs[source].view(torch.int16))
            here = route(CASE.expert_map, ids[source], source).rank == rank
            assert torch.equal(out.topk_ids[source, : len(xs[source])] >= 0, here)


@pytest.mark.parametrize("transport", ["cpu", "nvlink"])
@pytest.mark.parametrize("payload", [{}, {"quantize": True}, {"dtype": torch.uint8, "scale_columns": 3}])
def test_arrays_lie_behind_each_other(transport: str, payload: dict[str, Any]) -> None:
    c = config(transport=transport, max_in_flight=3, **payload)
    table, total = memory.arrays(c)
    assert ("scales" in table) == bool(payload)
    ends = [array.offset + 3 * array.slot_bytes for array in table.values()]
    assert [array.offset for array in table.values()] == [0, *ends[:-1]]
    assert ends[-1] == total <= memory.collective_config(c).pool_bytes
    found = region_map(c)
    assert found is not None
    for one, other in pairwise(found.arrays):
        assert one.offset + one.num_bytes == other.offset
    assert [array.name for array in found.arrays] == ["collectives", *table]


def test_views_of_a_slot_do_not_meet() -> None:
    c = config(quantize=True, scale_format=ScaleFormat.UE8M0)
    slots = memory.Slots(c, torch.zeros(memory.arrays(c)[1], dtype=torch.uint8))
    for tokens in (0, 1, 5, 6):
        for slot in range(2):
            slots.tokens(slot).view(torch.uint8).fill_(1)
            slots.metadata(slot).fill_(2)
            slots.num_tokens(slot).fill_(tokens)
            slots.places(slot, tokens).fill_(-1)
            slots.weights(slot, tokens).fill_(0.5)
            assert slots.num_tokens(slot).tolist() == [tokens] * 3
            assert (slots.places(slot, tokens) == -1).all()
            assert slots.places(slot, tokens).shape == slots.weights(slot, tokens).shape == (3, tokens, 3)
            assert (slots.tokens(slot).view(torch.uint8) == 1).all()
        moved = memory.metadata_bytes(c, tokens) + tokens * (64 + 4 * quant.scale_columns(64, ScaleFormat.FP32))
        assert memory.step_tokens(c, moved) == tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "repeated"])
@pytest.mark.parametrize("extra", [0, 5])
def test_places_are_those_of_the_reference(kind: str, extra: int) -> None:
    seed = draw_seed()
    case = RoutingCase(7, 3, 64, (6, 3, 5), kind, seed, replicated(3, 7, extra, seed) if extra else None)
    stride = case.expert_map.stride
    for rank in range(3):
        tables = GatherTables(config(case, rank), torch.device("cpu"))
        for mask in ((True, True, True), tuple(r in (rank, 1) for r in range(3)), (True, True, True)):
            tables.set_active(mask)
            want = route(case.expert_map, case.topk_ids(rank), rank, mask)
            places, valid, invalid = tables.route(case.topk_ids(rank))
            assert torch.equal(places, torch.where(want.rank >= 0, want.rank * stride + want.slot, -1).int()), case
            assert valid.tolist() == want.valid.tolist()
            assert invalid.tolist() == [want.num_invalid_ids]
            ids, here = tables.local(places)
            assert torch.equal(here, want.rank == rank)
            assert torch.equal(ids, torch.where(here, want.slot, -1).int())


def test_errors_have_the_names_of_dispatch_and_combine() -> None:
    late = PeerTimeout(peer=2, op="all_gather", phase="payload", expected=5, seen=4, waited_s=1.5, gone=True)
    told = renamed(late)
    assert isinstance(told, PeerTimeout)
    assert (told.op, told.peer, told.gone, told.expected) == ("dispatch", 2, True, 5)
    assert str(renamed(TransportError("reduce_scatter: rank 1 brought x"))) == "combine: rank 1 brought x"
    assert isinstance(renamed(HandleError("reduce_scatter: this rank")), HandleError)
    for same in (TransportError("barrier: rank 1"), AbortedError("all_gather: the operator says so")):
        assert renamed(same) is same


def test_tags_are_found_again_in_signatures() -> None:
    from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp

    def word(num_bytes: int, tag: int) -> int:
        return signature(CollectiveOp.ALL_GATHER, Algorithm.KERNEL_PUSH, torch.uint8, num_bytes, [3], tag)

    assert tags(word(32, 7), word(32, 2050)) == (7, 2)
    assert tags(word(32, 7), word(48, 7)) is None


def test_samples_that_a_ring_has_lost_are_counted_once() -> None:
    """Collectives count on from each other, those by copy engines by themselves; the rest of a combine is no sample."""
    row = 3 * config().hidden_size * 2

    def gathered(seq: int, mode: str = "pull") -> LatencySample:
        return sample("all_gather", mode, seq, 4096)

    def reduced(seq: int, num_bytes: int = 5 * row) -> LatencySample:
        return sample("reduce_scatter", "pull", seq, num_bytes)

    member = GatherMember(config(), cast(Any, None))
    member._step_tokens = lambda num_bytes, alone: 5  # type: ignore[method-assign]
    next_seq: dict[str, int] = {}

    def told(*samples: LatencySample) -> dict[str, int]:
        can = OneRank().capabilities
        fake = SimpleNamespace(samples=lambda: list(samples), set_active=lambda *_: None, capabilities=can)
        member._coll = cast(Any, fake)
        return lost(list(by_kind(Samples.of(member.samples()))), next_seq)

    exchanged = sample("exchange", "host", 900, 0)
    assert told(gathered(1), reduced(2), gathered(3), exchanged, reduced(4), reduced(5, row + 1), gathered(6)) == {}
    assert told(reduced(7), gathered(1, "copy_pull"), reduced(8), gathered(2, "copy_pull"), reduced(9)) == {}
    assert told(gathered(12), reduced(13)) == {"dispatch": 2}
    assert told(reduced(15, row + 1), gathered(4, "copy_pull"), reduced(16)) == {"dispatch": 2}
    member.set_active((True, True, True), 1)
    assert told(gathered(40), reduced(41)) == {}, "another epoch begins anew"


def test_copy_engines_alone_are_for_this_mode() -> None:
    """`num_sms=0`: of dispatch; a reduce-scatter takes as many multiprocessors as it likes."""
    assert config(num_sms=0).num_sms == 0
    with pytest.raises(ConfigError, match="num_sms: expected None or an int in 1"):
        CASE.config(LoopGroup(0, CASE.num_ranks), mode=Mode.LL, num_sms=0)
    asked: list[int | None] = []
    engine = SimpleNamespace(
        config=config(num_sms=0),
        _algorithm=lambda *_: Algorithm.KERNEL_PULL,
        _coll=SimpleNamespace(reduce_scatter=lambda args: asked.append(args.num_sms)),
    )
    GatherEngine.reduce(cast(Any, engine), torch.ones(3, 2), torch.ones(1, 2), 1)
    assert asked == [None]
    engine.config = config(num_sms=0, combine_sms=7)
    GatherEngine.reduce(cast(Any, engine), torch.ones(3, 2), torch.ones(1, 2), 1)
    assert asked == [None, 7]


class OneRank:
    """Collectives of a single rank that has copy engines: a gather is a copy, done when it is waited for."""

    def __init__(self) -> None:
        gathers = {CollectiveOp.ALL_GATHER: (Algorithm.KERNEL_PUSH, Algorithm.COPY_PUSH, Algorithm.COPY_PULL)}
        self.capabilities = CollectiveCapabilities("cpu", False, True, "", gathers, copy_min_bytes=1 << 30)
        self.seen: list[tuple[str, list[int], int | None]] = []

    def all_gather(self, args: GatherArgs) -> Any:
        self.seen.append((args.algorithm.value, [part.x.numel() for part in args.parts], args.num_sms))

        def wait() -> None:
            self.seen.append((f"{args.algorithm.value} done", [], None))
            for part in args.parts:
                part.out[: part.x.numel()] = part.x

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("at_once", [False, True])
def test_rows_go_first_and_come_last_where_copy_engines_alone_move_them(at_once: bool) -> None:
    case = RoutingCase(7, 3, 64, (4,), "single_none", draw_seed(), max_tokens=6)
    x, ids, weights = case.x(0, torch.bfloat16), case.topk_ids(0), case.topk_weights(0)
    args = DispatchArgs(x, None, ids, weights, Mode.AG, None, at_once, 4)
    found = []
    for num_sms in (0, None):
        c, coll = config(case, dispatch_sms=num_sms, combine_sms=3), OneRank()
        engine = GatherEngine(c, cast(Any, coll), torch.zeros(memory.arrays(c)[1], dtype=torch.uint8))
        pending = GatherDispatch(engine, args, 1, 0)
        pending.send()
        out, _ = pending.wait()
        found.append(out)
        metadata, rows = memory.metadata_bytes(c, 4), x.nbytes
        whole = [("kernel_push", [metadata, rows], None), ("kernel_push done", [], None)]
        apart = [
            ("copy_push", [rows], 0), ("kernel_push", [metadata], None),
            ("kernel_push done", [], None), ("copy_push done", [], None),
        ]  # fmt: skip
        assert coll.seen == (apart if num_sms == 0 else whole)
        assert memory.step_tokens(c, rows, alone=True) == memory.step_tokens(c, rows + metadata) == 4
    assert torch.equal(found[0].tokens[0, :4].view(torch.int16), x.view(torch.int16))
    for name in ("tokens", "counts", "topk_ids", "topk_weights", "valid", "num_rows"):
        first, second = (getattr(out, name) for out in found)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name


def test_records_where_rows_go_by_themselves() -> None:
    """Those of copies say how many rows; kernels carried metadata alone, and none of either is missing."""
    member = GatherMember(config(num_sms=0), cast(Any, None))
    member._step_tokens = lambda num_bytes, alone: num_bytes if alone else -1  # type: ignore[method-assign]
    listed = [sample("all_gather", *rest) for rest in (("kernel_push", 1, 99), ("copy_push", 1, 5))]
    listed += [sample("reduce_scatter", "kernel_pull", 2, 0), sample("all_gather", "kernel_push", 3, 99)]
    member._coll = cast(Any, SimpleNamespace(samples=lambda: listed, capabilities=OneRank().capabilities))
    told = member.samples()
    assert [(one.op, one.tokens, one.missing) for one in told] == [("dispatch", 5, 0), ("combine", 0, 0)]
