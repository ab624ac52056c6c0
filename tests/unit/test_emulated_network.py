"""Kernels whose ranks are on two hosts, run on the CPU, with the real proxy and TCP between them, against the
reference."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from ep_kernels import jit
from ep_kernels.errors import PeerTimeout
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.engine import RECEIVE, SEND
from ep_kernels.transports.nvlink.network import remote
from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import RoutingCase, draw_seed
from tests.emulator.build import build
from tests.emulator.machine import Emulated, without_driver
from tests.gpu import loopback_network as network
from tests.gpu.loopback_check import check
from tests.gpu.loopback_network import SHUFFLED, TCP, Joined
from tests.tools import needs
from tests.unit.test_network_providers import needs_libfabric

pytestmark = [
    needs("g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64"),
    pytest.mark.timeout(300),
]
LAYOUTS = [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR]
WAYS = [(Layout.RANK_MAJOR, False), (Layout.EXPERT_MAJOR, True)]
"""Layouts, and whether combine is exact."""
SPLIT, BOTH = (1, 2), (3,)


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled side by side, before the clock of any test runs."""
    wanted = [v for v in jit.network_variants() if _is_wanted(dict(v.constants))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in wanted)))


def _is_wanted(of: dict[str, str]) -> bool:
    plain = of.get("X", "u8") == "u8" and (of.get("Y", "bf16"), of.get("C", "bf16")) == ("bf16", "bf16")
    return plain and of.get("LAYOUT", "0") in ("0", "2")


@pytest.fixture
def join() -> Iterator[Joined]:
    joined = Joined(Emulated(), 2)
    yield joined
    joined.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", [TCP, SHUFFLED], ids=["tcp", "shuffled"])
def test_steps_over_two_hosts(provider: NetworkConfig, layout: Layout, join: Joined) -> None:
    """Uneven tokens, none, one without experts; several packets in a row; launches in halves, in HT's name."""
    case = RoutingCase(9, 3, 520, (5, 0, 6, 2), "single_none", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.AUTO, layout=layout, network=provider)
    check(loop, case, Mode.LL)
    check(loop, replace(case, seed=draw_seed()), Mode.HT, phases=SPLIT, backward=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("provider", "lag"),
    [(TCP, None), (TCP, 0), (SHUFFLED, 3), (msgspec.structs.replace(TCP, lanes=3), 0)],
    ids=["tcp", "at-once", "shuffled-lag", "lanes"],
)
def test_rows_in_slices(
    provider: NetworkConfig, lag: int | None, layout: Layout, join: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two or three rows; ranks that end within a slice, at its end, with less than one, with no row; read when all
    are here, as they are few, at once, or when some later ones are."""
    monkeypatch.setattr(plan, "SLICE_BYTES", 4096)
    if lag is not None:
        monkeypatch.setattr(remote, "slice_lag", lambda *_: lag)
    case = RoutingCase(9, 3, 520, (33, 4, 1, 0), "uniform", draw_seed(), max_tokens=34)
    loop = join(case, mode=Mode.AUTO, layout=layout, network=provider)
    record = loop.remotes[0].record()
    assert (list(record.slice_rows), record.slice_lag) == ([2, 2], (2 << 20) // 4096 if lag is None else lag)
    check(loop, case, Mode.LL)
    check(loop, replace(case, seed=draw_seed()), Mode.HT, phases=SPLIT, backward=True)
    check(loop, replace(case, tokens=(2, 0, 34, 3), seed=draw_seed()), Mode.LL)


@pytest.mark.parametrize(
    ("provider", "slice_bytes", "rows"), [(TCP, 256 << 10, [0, 0]), (SHUFFLED, 4096, [2, 5])], ids=["whole", "slices"]
)
def test_an_exact_combine(
    provider: NetworkConfig, slice_bytes: int, rows: list[int], join: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SLICE_BYTES", slice_bytes)
    loop = network.exact_rows(Layout.EXPERT_MAJOR, join, network=provider)
    assert list(loop.remotes[0].record().slice_rows) == rows


def test_an_exact_combine_of_dropped_rows(join: Joined) -> None:
    network.exact_rows(Layout.EXPERT_MAJOR, join, overflow=Overflow.DROP, max_recv_rows=4)


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_the_caller(layout: Layout, mode: Mode, join: Joined) -> None:
    """Rows and scales have memory of their own, whatever the mode: no HT kernel lays them into the region."""
    case = RoutingCase(6, 6, 16, (7, 2), "uniform", draw_seed())
    loop = join(case, mode=mode, layout=layout, dtype=torch.float8_e4m3fn, scale_columns=1)
    for algorithm in (Mode.LL, Mode.HT) if mode is Mode.AUTO else (mode,):
        check(loop, replace(case, seed=draw_seed()), algorithm)


@pytest.mark.parametrize("to", jit.FORMATS)
def test_rows_that_are_quantised_in_front(to: str, join: Joined) -> None:
    case = RoutingCase(6, 6, 160, (7, 2), "uniform", draw_seed())
    loop = join(case, mode=Mode.AUTO, layout=Layout.RANK_MAJOR, quantize=to, network=SHUFFLED)
    for algorithm in (Mode.LL, Mode.HT):
        check(loop, replace(case, seed=draw_seed()), algorithm)


@pytest.mark.parametrize(("mode", "said"), [(Mode.LL, "ll"), (Mode.HT, "ht"), (Mode.AUTO, "ll")])
def test_records_name_the_mode_that_was_asked_for(mode: Mode, said: str, join: Joined) -> None:
    """Of AUTO, that of the kernels."""
    case = RoutingCase(6, 2, 16, (7, 2), "uniform", draw_seed())
    loop = join(case, mode=mode, layout=Layout.RANK_MAJOR)
    check(loop, case, Mode.LL if mode is Mode.AUTO else mode)
    assert [sample.mode for sample in loop.engines[0].tables.samples()] == [said, said]


@needs_libfabric
def test_steps_by_a_provider_that_registers_memory(join: Joined) -> None:
    network = msgspec.structs.replace(TCP, provider="libfabric(tcp;ofi_rxm)")
    case = RoutingCase(9, 3, 520, (5, 0, 6, 2), "single_none", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.AUTO, layout=Layout.EXPERT_MAJOR, network=network)
    check(loop, case, Mode.LL)
    check(loop, replace(case, seed=draw_seed()), Mode.HT, phases=SPLIT, backward=True)


def test_hosts_of_unlike_size(join: Joined) -> None:
    case = RoutingCase(7, 3, 64, (4, 1, 3), "one_expert", draw_seed(), max_tokens=4)
    loop = join(case, mode=Mode.LL, layout=Layout.RANK_MAJOR)
    check(loop, case, Mode.LL)


def test_handles_are_used_again(join: Joined) -> None:
    network.handles_are_used_again(Layout.EXPERT_MAJOR, Mode.LL, join)


@pytest.mark.parametrize(("layout", "exact"), WAYS)
def test_different_routings_break_nothing(layout: Layout, exact: bool, join: Joined) -> None:
    network.different_routings_break_nothing(layout, Mode.LL, join, exact)


HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64)


FIRST_SLICE = len(abi.FLAGS) << 28


class Without:
    """The library of boxes, to which some of what the network brings does not come.

    Args:
        drops: (rank that sends it, immediate, but for the number of parts) -> whether it does not.
    """

    def __init__(self, drops: Callable[[int, int], bool]) -> None:
        self._library, self._drops = remote.launch.library(), drops
        self._handler = HANDLER(self._library.cd_boxes_handler())
        self._filter = HANDLER(self._come)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def cd_boxes_handler(self) -> int | None:
        return ctypes.cast(self._filter, ctypes.c_void_p).value

    def _come(self, *event: int) -> None:
        if event[2] != 0 or not self._drops(event[1], event[3] & ~(31 << 18)):
            self._handler(*event)


def dispatched(
    loop: Any, case: RoutingCase, previous: list[Any] | None = None, ranks: list[int] | None = None
) -> list[Any]:
    """A dispatch of all ranks that begins, of which those of `ranks` wait; what each of these met."""
    xs = [case.x(r, torch.bfloat16) for r in range(loop.size)]
    ids, weights = [case.topk_ids(r) for r in range(loop.size)], [case.topk_weights(r) for r in range(loop.size)]
    calls = [s.call for s in loop.begin(xs, ids, weights, Mode.LL, previous=previous)]
    loop.launch(calls, SEND)
    loop.launch([calls[rank] for rank in ranks or range(loop.size)], RECEIVE)
    return [loop.engines[rank].tables.host.fault() for rank in ranks or range(loop.size)]


def test_different_routings_are_heard_when_all_rows_have_come(join: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later would land on those of the dispatch that takes the slot next."""
    monkeypatch.setattr(plan, "SLICE_BYTES", 4096)
    boxes = Without(lambda _, what: what == FIRST_SLICE | 3)
    monkeypatch.setattr(remote.launch, "library", lambda: boxes)
    case = RoutingCase(9, 3, 520, (33, 4, 20, 9), "uniform", draw_seed(), max_tokens=34)
    loop = join(case, blocks=16, mode=Mode.LL, layout=Layout.RANK_MAJOR, timeout_s=0.4)
    handles = [check(loop, each, Mode.LL) for each in (case, replace(case, seed=draw_seed()))]
    found = dispatched(loop, case, [*handles[0][:-1], handles[1][-1]])[2:]  # rank 0 has 33 rows for them
    assert all(isinstance(fault, PeerTimeout) and fault.phase == "counts" for fault in found), found


@pytest.mark.parametrize("gone", [None, "rail", "source"])
@pytest.mark.parametrize("mismatch", [False, True])
def test_a_rail_that_brings_no_rows_is_named(
    mismatch: bool, gone: str | None, join: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of rank 0 come to rank 2, where rank 3 waits for them; the head comes to both. Rank 2 knows better."""
    boxes = Without(lambda rank, what: rank == 0 and what == abi.FLAGS.index("PAYLOAD") << 28 | 3)
    monkeypatch.setattr(remote.launch, "library", lambda: boxes)
    case = RoutingCase(9, 3, 520, (6, 4, 5, 3), "uniform", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, timeout_s=20.0 if gone else 0.4)
    handles = [check(loop, each, Mode.LL) for each in (case, replace(case, seed=draw_seed()))]
    if gone:
        loop.engines[3].tables.host.mark_gone(2 if gone == "rail" else 0)
    previous = [*handles[0][:-1], handles[1][-1]] if mismatch else None
    *own, found = dispatched(loop, case, previous, [3] if gone else [2, 3])
    assert isinstance(found, PeerTimeout)
    assert (found.peer, found.gone) == (0 if gone == "source" else 2, gone is not None)
    assert found.phase == ("counts" if mismatch else "payload")
    assert [fault.peer for fault in own] == ([] if gone else [0]), "whose rows come to rank 2 itself"


def test_who_was_left_out_returns_no_rows_of_others_inboxes(join: Joined) -> None:
    """All are here, and a survivor of its host says, before others come there, that it goes on without this rank."""
    case = RoutingCase(9, 3, 520, (6, 4, 5, 3), "uniform", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=Layout.EXPERT_MAJOR)
    check(loop, case, Mode.LL)
    flags = loop.memory[3].data[: loop.engines[3].tables.world.map.counts].view(torch.int64).view(-1, 4)
    flags[abi.FLAGS.index("LEFT_OUT"), 2] = 7
    found = dispatched(loop, case)
    assert found[:3] == [None] * 3
    assert str(found[3]) == "dispatch: rank 2 has gone on in epoch 7 without this rank"


@pytest.mark.parametrize("op", ["dispatch", "combine", "barrier", "credit"])
def test_silence_is_named(op: str, join: Joined) -> None:
    network.silence_is_named(op, join)


def test_a_full_ring_is_survived(join: Joined) -> None:
    network.a_full_ring_is_survived(join)


def test_ends_of_a_connection(join: Joined) -> None:
    network.ends_of_a_connection(join)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_wakes(op: str) -> None:
    network.a_rank_wakes(op, Layout.RANK_MAJOR, Emulated())


@pytest.mark.parametrize(("layout", "exact"), [(Layout.EXPERT_MAJOR, False), *WAYS])
def test_bytes_are_those_of_theory(layout: Layout, exact: bool, join: Joined) -> None:
    network.bytes_are_those_of_theory(layout, join, exact)
