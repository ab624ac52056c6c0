"""Ranks of one process that believe to be on several hosts: real proxies and TCP between their kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.calls.engine import SEND
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase, draw_seed
from tests.gpu import loopback_left_out
from tests.gpu.loopback import Loopback, Machine
from tests.gpu.loopback_check import check, combine_of, hear

TCP = NetworkConfig(listen="127.0.0.1:0", advertise="127.0.0.1")
SHUFFLED = NetworkConfig(listen="127.0.0.1:0", advertise="127.0.0.1", provider="shuffle(tcp)", lanes=2)
Join = Callable[..., Loopback]


class Joined:
    """Makes loop-back groups over the network, and parts them at the end."""

    def __init__(self, machine: Machine | None = None, blocks: int | None = None) -> None:
        self._machine, self._blocks = machine, blocks
        self._made: list[Loopback] = []

    def __call__(self, case: RoutingCase, nodes: int = 2, blocks: int | None = None, **fields: Any) -> Loopback:
        fields = {"network": TCP, "timeout_s": 20.0, **fields}
        made = Loopback(
            lambda group: case.config(group, **fields), case.num_ranks, blocks or self._blocks, self._machine, nodes
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        for loop in self._made:
            loop.close()


def four(layout: Layout, mode: Mode, join: Join, **fields: Any) -> tuple[Loopback, RoutingCase]:
    """Two hosts of two ranks."""
    case = RoutingCase(9, 3, 272, (5, 0, 6, 2), "single_none", draw_seed(), max_tokens=6)
    return join(case, mode=mode, layout=layout, **fields), case


def handles_are_used_again(layout: Layout, mode: Mode, join: Join) -> None:
    loop, case = four(layout, mode, join)
    handles = check(loop, case, mode)
    check(loop, replace(case, seed=draw_seed()), mode)
    check(loop, case, mode, again=replace(case, seed=draw_seed()), previous=handles)
    check(loop, case, mode, backward=True)


def exact_rows(layout: Layout, join: Join, **fields: Any) -> Loopback:
    """Combine brings a row for each (token, k): of tokens that name an expert twice, that have holes, that all go to
    one rank, none; in halves, in HT's name; with row weights; of a handle that is used again."""
    plain = RoutingCase(9, 3, 520, (45, 4, 1, 0), "single_none", draw_seed(), max_tokens=46)
    loop = join(plain, mode=Mode.AUTO, layout=layout, exact_combine=True, **fields)
    handles = check(loop, plain, Mode.LL)
    for kind, tokens in (("repeated", (33, 0, 46, 5)), ("one_expert", (2, 4, 6, 8)), ("none", (1, 1, 1, 1))):
        check(loop, replace(plain, kind=kind, tokens=tokens, seed=draw_seed()), Mode.LL)
    check(loop, plain, Mode.LL, again=replace(plain, seed=draw_seed()), previous=handles)
    check(loop, replace(plain, kind="repeated", seed=draw_seed()), Mode.HT, phases=(1, 2), backward=True)
    return loop


def different_routings_break_nothing(layout: Layout, mode: Mode, join: Join, exact: bool = False) -> None:
    """Ranks of both hosts hear who brought what, and the group goes on."""
    loop, case = four(layout, mode, join, exact_combine=exact)
    mine, theirs = check(loop, case, mode), check(loop, replace(case, seed=draw_seed()), mode)
    xs = [case.x(r, torch.bfloat16) for r in range(loop.size)]
    ids, weights = [case.topk_ids(r) for r in range(loop.size)], [case.topk_weights(r) for r in range(loop.size)]
    loop.launch([s.call for s in loop.begin(xs, ids, weights, mode, previous=[*mine[:-1], theirs[-1]])])
    hear(loop, "dispatch")
    loop.launch(combine_of(loop, [*mine[:-1], theirs[-1]]))
    hear(loop, "combine")
    check(loop, case, mode)


def silence_is_named(op: str, join: Join) -> None:
    """Rank 3, of the other host, does not come; those who wait for it say so, and all go on together later."""
    mode, patience_s = Mode.LL, 0.2
    loop, case = four(Layout.RANK_MAJOR, mode, join, timeout_s=patience_s, max_in_flight=1)
    handles = check(loop, case, mode)
    xs = [case.x(r, torch.bfloat16) for r in range(4)]
    ids, weights = [case.topk_ids(r) for r in range(4)], [case.topk_weights(r) for r in range(4)]
    if op == "dispatch":
        loop.launch([s.call for s in loop.begin(xs, ids, weights, mode)][:3])
    elif op == "combine":
        loop.launch(combine_of(loop, handles)[:3])
    elif op == "barrier":
        loop.launch([engine.barrier() for engine in loop.engines][:3])
    else:
        for _ in range(3):
            loop.launch([s.call for s in loop.begin(xs, ids, weights, mode)][:3], SEND)
    found = loop.engines[0].tables.host.fault()
    assert isinstance(found, PeerTimeout), found
    phase = {"dispatch": "counts", "combine": "payload", "barrier": "barrier", "credit": "credit"}[op]
    assert (found.peer, found.phase, found.gone) == (3, phase, False)
    assert found.waited_s >= patience_s
    loop.preset(50)
    check(loop, replace(case, seed=draw_seed()), mode)


def a_full_ring_is_survived(join: Join) -> None:
    """Kernels that find no room in the ring until their deadline leave places of it empty, which the proxy would wait
    for; the group goes on with an empty ring."""
    loop, case = four(Layout.RANK_MAJOR, Mode.LL, join, timeout_s=0.2)
    handles = check(loop, case, Mode.LL)
    state, tail = loop.engines[0].tables.state, abi.State.network.offset + abi.Network.tail.offset
    state[tail // state.itemsize] += 2 * abi.RING_SIZE  # of others that gave up
    loop.launch(combine_of(loop, handles))
    found = loop.engines[0].tables.host.fault()
    assert isinstance(found, PeerTimeout)
    # The block that sends waits for room, one that sums waits for its own rank's rows: either deadline may pass first.
    assert found.phase == "credit" or (found.phase, found.peer) == ("payload", 0), found
    loop.preset(50)
    for _ in range(2):
        check(loop, replace(case, seed=draw_seed()), Mode.LL)


def ends_of_a_connection(join: Join) -> None:
    """A rank whose connections end counts as dead; one that leaves this rank out says in which epoch it goes on."""
    for way in ("gone", "left out"):
        loop, case = four(Layout.RANK_MAJOR, Mode.LL, join, timeout_s=60.0)
        check(loop, case, Mode.LL)
        if way == "gone":  # a word that no version knows, and the end: as when the process is killed
            loop.remotes[3].channel.leave(0, 0)
        else:
            loop.remotes[3].channel.leave(0, 7)
        words, host = loop.remotes[0].words, loop.engines[0].tables.host
        until = time.monotonic() + 20.0
        while not (host.is_gone(3) or words[6, 3]):
            assert time.monotonic() < until
            time.sleep(0.01)
        xs = [case.x(r, torch.bfloat16) for r in range(4)]
        ids, weights = [case.topk_ids(r) for r in range(4)], [case.topk_weights(r) for r in range(4)]
        loop.launch([s.call for s in loop.begin(xs, ids, weights, Mode.LL)][:1])
        found = host.fault()
        if way == "gone":
            assert isinstance(found, PeerTimeout)
            assert found.gone
        else:
            assert type(found) is TransportError
            assert str(found) == "dispatch: rank 3 has gone on in epoch 7 without this rank"


def a_rank_wakes(op: str, layout: Layout, machine: Machine | None) -> None:
    """Rank 0 is given up before an operation, and launches it when the others, of both hosts, have gone on: nothing of
    it reaches them."""
    loop, case = loopback_left_out.three(layout, Mode.LL, machine, 2, network=TCP)
    try:
        if op == "dispatch":
            loopback_left_out.wakes_in_a_dispatch(loop, case, Mode.LL, 4)
        else:
            loopback_left_out.wakes_in_a_combine(loop, case, Mode.LL)
    finally:
        loop.close()


def bytes_are_those_of_theory(layout: Layout, join: Join, exact: bool = False) -> None:
    """As the table of docs/network-protocol.md: each row goes once to the other host, to the rank of the source's turn
    there; counts and metadata to each rank that holds an expert of its token, and from each a partial back, or (exact)
    a row for each expert. Hosts of three ranks and of two."""
    hosts = ((0, 1, 2), (3, 4))
    case = RoutingCase(10, 3, 272, (5, 0, 6, 2, 4), "single_none", draw_seed(), max_tokens=6)
    loop = join(case, mode=Mode.LL, layout=layout, exact_combine=exact)
    counts = 0 if layout in (Layout.FLAT, Layout.RANK_MAJOR) else 128  # of at most 28 experts on a rank
    before = [{t.peer: t for t in remote.peers()} for remote in loop.remotes]
    check(loop, case, Mode.LL)
    shape, copies = loop.engines[0].sizes.shape, loop.configs[0].resolved_expert_map.replicas
    routed = [
        [[copies[e][0][0] for e in ids if e >= 0] for ids in case.topk_ids(source).tolist()] for source in range(5)
    ]
    for own, far in (hosts, hosts[::-1]):
        for turn, rank in enumerate(own):
            traffic = {t.peer: t for t in loop.remotes[rank].peers()}
            assert sorted(traffic) == list(far)
            for peer in far:
                rail = peer == far[turn % len(far)]
                out = sum(peer in ranks for ranks in routed[rank])
                rows = sum(bool({*ranks} & {*far}) for ranks in routed[rank]) if rail else 0
                back = sum(ranks.count(rank) if exact else rank in ranks for ranks in routed[peer])
                sent = traffic[peer].sent_bytes - before[rank][peer].sent_bytes
                dispatch = 16 + counts + out * shape.metadata_lines * 128 + rows * shape.row_packets * 1024
                assert sent == dispatch + 16 + back * shape.combine_packets * 1024
                messages = traffic[peer].sent_messages - before[rank][peer].sent_messages
                least = 1 + 1 + (counts > 0) + (out > 0) + rail + 1 + 1 + (back > 0)
                assert messages == least or (messages > least and any(loop.remotes[rank].record().slice_rows))
