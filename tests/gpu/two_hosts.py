"""Times of two hosts on one or two GPUs: ranks of a process share its GPU, in one launch; proxies (one for each rank),
sockets and pinned memory between the hosts are real.

    torchrun --nproc-per-node 2 -m tests.gpu.two_hosts --ranks 4        # a GPU for each host of two ranks
    python -m tests.gpu.two_hosts                                       # both hosts on one GPU
    ... --other NAME:ll/combine_recv.cuh=FILE                           # other texts of kernels, in turns with today's

Dispatch, combine and the provider's own loop of the same messages take turns; medians of the slowest process, us. Each
operation begins at once on all GPUs, which were at work just before, as are proxies. Alike: the loop of memory that the
GPU has read and written, in places that take turns as slots do. Results are compared with the reference up to T = 128,
and between the texts always.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import pickle
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import network
from benchmarks.cases import Case
from benchmarks.gpu.measure import Stopwatch, events
from benchmarks.gpu.nodes_network import LEAST_BYTES, PLACES, hosts_of, remote_of, rows_by_rail, sizes_of
from ep_kernels import Layout, Mode, jit, reference
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Network
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.network.boxes import PinnedBoxes, pin, unpin
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.types import LatencySample
from tests.cases import RoutingCase
from tests.compare import expert, same_bits
from tests.gpu.loopback import Bytes, packed
from tests.gpu.loopback_group import LoopGroup
from tests.gpu.rank_engine import RankEngine

HOSTS, TOPK, EXPERTS, HIDDEN = 2, 8, 256, 7168
CONNECT_S, WARM, MOST_CHECKED = 30.0, 3, 128
SPIN_US = 100_000
"""Proxies do not sleep between rounds."""
Texts = Mapping[str, str]


class Store:
    """Through it processes exchange.

    Attributes:
        rank, size: of this process.
        device: its GPU, which no other process has.
    """

    def __init__(self) -> None:
        self.rank, self.size, self._number, self._store = 0, 1, 0, None
        if dist.is_torchelastic_launched():
            self._store, self.rank, self.size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        met = self._store or dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=met, rank=self.rank, world_size=self.size, device_id=self.device)

    def gather(self, mine: Any) -> list[Any]:
        """What each process gives, by its rank."""
        if self._store is None:
            return [mine]
        self._number += 1
        self._store.set(f"{self._number}/{self.rank}", pickle.dumps(mine))
        return [pickle.loads(self._store.get(f"{self._number}/{r}")) for r in range(self.size)]


def network_of(rank: int) -> NetworkConfig:
    """Of this rank alone: so each has a proxy."""
    return NetworkConfig(listen="127.0.0.1:0", advertise="127.0.0.1", spin_us=SPIN_US, domain=f"rank {rank}")


class Group:
    """The ranks of this process.

    Attributes:
        ranks: their numbers.
        case, mode: of their steps.
        configs, engines, memory: of each; the memory that kernels of its host reach.

    Args:
        blocks: of a launch for one rank, at most.
    """

    def __init__(self, case: RoutingCase, store: Store, mode: Mode, layout: Layout, blocks: int) -> None:
        each = case.num_ranks // store.size
        self.ranks = range(store.rank * each, (store.rank + 1) * each)
        self.case, self.mode, self._store = case, mode, store
        device = torch.device("cuda", torch.cuda.current_device())
        blocks = min(blocks, torch.cuda.get_device_properties(device).multi_processor_count // each)
        fields: dict[str, Any] = {"mode": mode, "layout": layout, "timeout_s": 30.0}
        self.configs = [case.config(LoopGroup(r, case.num_ranks), network=network_of(r), **fields) for r in self.ranks]
        self.engines = [RankEngine(config, device, blocks) for config in self.configs]
        self.memory = [Bytes(e.region_bytes, e.blank_bytes, device) for e in self.engines]
        for rank, engine, memory in zip(self.ranks, self.engines, self.memory, strict=True):
            engine.attach(memory, [self._address(rank, other) for other in range(case.num_ranks)])
        self._remotes = [
            RemoteRanks(network_of(r), r, case.num_ranks, e.sizes.shape, e.tables.host, PinnedBoxes(pin, unpin), 30.0)
            for r, e in zip(self.ranks, self.engines, strict=True)
        ]
        tickets = [t for one in store.gather([far.ticket() for far in self._remotes]) for t in one]
        with ThreadPoolExecutor(each) as pool:
            list(pool.map(lambda i: self._connect(i, tickets), range(each)))

    def _address(self, rank: int, other: int) -> int:
        far = other in remote_of(rank, self.case.num_ranks, HOSTS)
        return 0 if far else self.memory[other - self.ranks[0]].data.data_ptr()

    def _connect(self, i: int, tickets: Sequence[Any]) -> None:
        rank, size = self.ranks[i], self.case.num_ranks
        far, hosts = remote_of(rank, size, HOSTS), hosts_of(size, HOSTS)
        for other, near in zip(self.ranks, self._remotes, strict=True):
            if other != rank and other not in far and near.landing is not None:
                self._remotes[i].share(other, near.landing.fd)
        self._remotes[i].connect({r: tickets[r] for r in far}, hosts, hosts, CONNECT_S)
        self.engines[i].tables.set_network(self._remotes[i].record())

    def samples(self) -> list[list[LatencySample]]:
        """Of each rank, since the last call. Raises what its kernels met."""
        for engine in self.engines:
            if (found := engine.tables.host.fault() or engine.tables.host.finding()) is not None:
                raise found
        return [engine.tables.samples() for engine in self.engines]

    def stages(self, samples: Sequence[Sequence[LatencySample]], op: str) -> tuple[float, float, float]:
        """Us until all is staged; from the first look until all of the other host has come; until the end. Means over
        ranks."""
        staged, here, ended = [], [], []
        for rank, ones in zip(self.ranks, samples, strict=True):
            last = [one for one in ones if one.op == op][-1]
            staged.append(last.send_ns / 1e3)
            here.append(max(last.peer_wait_ns[p] for p in remote_of(rank, self.case.num_ranks, HOSTS)) / 1e3)
            ended.append(last.total_ns / 1e3)
        return statistics.mean(staged), statistics.mean(here), statistics.mean(ended)

    def close(self) -> None:
        """Part."""
        self._store.gather(None)
        for far in self._remotes:
            far.close()


@functools.cache
def _cubin(variant: jit.Variant, text: str) -> bytes:
    return jit.compile_source(text, variant.name, driver.architecture(torch.cuda.current_device())).cubin


def launcher(calls: Sequence[Call], texts: Texts) -> Callable[[], None]:
    """Launches the calls of all ranks of this process by the kernel with those texts."""
    call, variant = calls[0], replace(calls[0].variant, loopback=True)
    blocks, on_host, each = packed(calls)
    records = on_host.cuda()
    function = driver.Function(_cubin(variant, jit.source(variant, texts)), variant.kernel, call.launch.shared_bytes)
    return lambda: function.launch(
        blocks, variant.num_threads, torch.cuda.current_stream().cuda_stream, ctypes.c_uint64(records.data_ptr()),
        ctypes.c_int32(each), cooperative=True,
    )  # fmt: skip


def graph_of(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What it launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@dataclass
class Times:
    """Of one text, a value for each round: us of dispatch and combine, and their stages."""

    took: list[tuple[float, float]] = field(default_factory=list)
    stages: list[tuple[float, ...]] = field(default_factory=list)
    bits: set[str] = field(default_factory=set)


class Steps:
    """Dispatch, experts and combine of a group, captured for each of some texts.

    Attributes:
        zs: results of the last combine, of each rank.
    """

    def __init__(self, group: Group, texts: Mapping[str, Texts]) -> None:
        self._group, case, bf16 = group, group.case, torch.bfloat16
        inputs = [(case.x(r, bf16).cuda(), case.topk_ids(r).cuda(), case.topk_weights(r).cuda()) for r in group.ranks]
        steps = [
            engine.dispatch(DispatchArgs(x, None, ids, weights, group.mode, None))
            for engine, (x, ids, weights) in zip(group.engines, inputs, strict=True)
        ]
        sends = {name: launcher([step.call for step in steps], text) for name, text in texts.items()}
        for send in sends.values():  # loads it
            send()
        torch.cuda.synchronize()
        group.samples()
        outs = [e.finish(step, step.known, 0) for e, step in zip(group.engines, steps, strict=True)]
        ys = [torch.zeros_like(out.tokens) for out, _ in outs]
        made = [
            engine.combine(CombineArgs(y, handle, None, True))
            for engine, y, (_, handle) in zip(group.engines, ys, outs, strict=True)
        ]
        self.zs = [receive(None)[0] for _, receive in made]

        def experts() -> None:
            for (out, _), y in zip(outs, ys, strict=True):
                y.copy_(expert(out, bf16))

        self._between = graph_of(experts)
        combines = {name: launcher([call for call, _ in made], text) for name, text in texts.items()}
        self._graphs = {name: (graph_of(sends[name]), graph_of(combines[name])) for name in texts}
        self._keep = inputs, steps, outs, made, ys, sends, combines  # graphs hold addresses alone
        self._watch = Stopwatch(torch.device("cuda"))

    def _timed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Us of what begins on all GPUs at once."""
        begin, end = events(2)
        self._watch.align()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def round(self, name: str, times: Times, store: Store, keep: bool) -> None:
        """One step by those texts."""
        for z in self.zs:
            z.fill_(float("nan"))
        self._group.samples()
        torch.cuda.synchronize()
        store.gather(None)
        dispatch, combine = self._graphs[name]
        took = self._timed(dispatch)
        self._between.replay()
        mine = took, self._timed(combine)
        samples = self._group.samples()
        dispatched, combined = zip(*store.gather(mine), strict=True)
        if keep:
            times.took.append((max(dispatched), max(combined)))
            times.stages.append((*self._group.stages(samples, "dispatch"), *self._group.stages(samples, "combine")))
        else:
            times.bits.add(hashlib.sha256(torch.cat(self.zs).view(torch.uint8).cpu().numpy().tobytes()).hexdigest())

    def check(self) -> None:
        """Results are the reference's."""
        case, config = self._group.case, self._group.configs[0]
        xs, ids, weights = (
            [of(r) for r in range(case.num_ranks)]
            for of in (lambda r: case.x(r, torch.bfloat16), case.topk_ids, case.topk_weights)
        )
        wanted, step = reference.dispatch(config, xs, ids, weights)
        want = reference.combine(step, [expert(out, torch.bfloat16) for out in wanted])[0]
        for rank, z in zip(self._group.ranks, self.zs, strict=True):
            same_bits(z, want[rank], f"z of rank {rank}")


class Loops:
    """The provider's own loop of the ranks of this process, in memory that their GPU reaches.

    Args:
        most: bytes that a rank sends, at most.
    """

    def __init__(self, store: Store, ranks: int, most: int) -> None:
        each = ranks // store.size
        self._store, self._size, self._ranks = store, ranks, range(store.rank * each, (store.rank + 1) * each)
        self._most = most
        size = max(PLACES * most, LEAST_BYTES)
        self._ends = [network.End(Network(network_of(r)), r, ranks, size) for r in self._ranks]
        self._memory = [[torch.frombuffer(one, dtype=torch.uint8) for one in end.memory] for end in self._ends]
        for one in [one for both in self._memory for one in both]:
            pin(one.data_ptr(), one.numel())
        self._gpu = torch.zeros(most, dtype=torch.uint8, device="cuda")
        tickets = [t for one in store.gather([end.channel.ticket() for end in self._ends]) for t in one]
        self._pool = ThreadPoolExecutor(each)

        def connect(i: int) -> None:
            far = remote_of(self._ranks[i], ranks, HOSTS)
            self._ends[i].write(1)
            self._ends[i].channel.connect({p: tickets[p] for p in far}, CONNECT_S)

        list(self._pool.map(connect, range(each)))

    def sends(self, case: RoutingCase, mode: Mode, layout: Layout, op: str) -> list[list[tuple[int, int]]]:
        """(rank, bytes) of each message of each rank."""
        of, size = Case(mode, layout, self._size, case.tokens[0]), self._size
        on = [case.topk_ids(source) // (EXPERTS // size) for source in range(size)]
        rows = [[int((on[source] == rank).any(1).sum()) for rank in range(size)] for source in range(size)]
        carried = [rows_by_rail(of, case.topk_ids(source), source, HOSTS).tolist() for source in range(size)]
        return [
            [(p, n) for p in remote_of(r, size, HOSTS)
             for n in sizes_of(of, op, *((rows[r][p], carried[r][p]) if op == "dispatch" else (rows[p][r],)))]
            for r in range(size)
        ]  # fmt: skip

    def touch(self, sends: Sequence[Sequence[tuple[int, int]]], place: int) -> None:
        """The GPU reads what came, and writes what goes, as in an operation."""
        for rank, (own, landing) in zip(self._ranks, self._memory, strict=True):
            first, num_bytes = place * self._most, sum(n for _, n in sends[rank])
            for peer in remote_of(rank, self._size, HOSTS):
                self._gpu[:num_bytes].copy_(landing[peer * len(own) + first :][:num_bytes])
            own[first:][:num_bytes].copy_(self._gpu[:num_bytes])
        torch.cuda.synchronize()

    def us(self, sends: Sequence[Sequence[tuple[int, int]]], place: int = 0) -> float:
        """Of the slowest rank, once, in one of PLACES."""

        def one(i: int) -> float:
            rank, peers = self._ranks[i], remote_of(self._ranks[i], self._size, HOSTS)
            self._ends[i].stream([(peer, 0) for peer in peers], len(peers), 0)  # all are here
            expected, offset = sum(p == rank for s in sends for p, _ in s), place * self._most
            return self._ends[i].stream(sends[rank], expected, 0, offset) / 1e3

        slowest = max(self._pool.map(one, range(len(self._ranks))))
        return float(max(self._store.gather(slowest)))


def measure(options: argparse.Namespace, store: Store, loops: Loops, texts: Mapping[str, Texts], tokens: int) -> None:
    """Of T tokens."""
    mode, layout = Mode.LL if tokens <= 512 else Mode.HT, Layout(options.layout)
    case = RoutingCase(EXPERTS, TOPK, HIDDEN, (tokens,) * options.ranks, "uniform", 20 + tokens)
    group = Group(case, store, mode, layout, options.blocks)
    steps, times = Steps(group, texts), {name: Times() for name in texts}
    sends = [loops.sends(case, mode, layout, op) for op in ("dispatch", "combine")]
    streams = []
    rounds = max(8, min(options.rounds, 512 * options.rounds // tokens))
    for number in range(-WARM, rounds):
        for name in list(texts)[:: 1 if number % 2 else -1]:
            steps.round(name, times[name], store, number >= 0)
        hot = [loops.us(one) for one in sends]
        place = [(2 * number + op) % PLACES for op in (0, 1)]
        for messages, at in zip(sends, place, strict=True):
            loops.touch(messages, at)
        streams.append([*hot, *(loops.us(one, at) for one, at in zip(sends, place, strict=True))])
    bits = set().union(*(one.bits for one in times.values()))
    assert len(bits) == 1, f"results differ between texts or rounds: {times}"
    if tokens <= MOST_CHECKED:
        steps.check()
    group.close()
    of = [statistics.median(one) for one in zip(*streams[WARM:], strict=True)]
    for name, one in times.items():
        took = [statistics.median(each) for each in zip(*one.took, strict=True)]
        stages = [statistics.median(each) for each in zip(*one.stages, strict=True)]
        line = [
            f"{op} {took[i]:8.1f} us, {of[i] / took[i]:.2f} of the loop's {of[i]:8.1f}, alike "
            f"{of[2 + i] / took[i]:.2f} of {of[2 + i]:8.1f} "
            f"(staged {stages[3 * i]:6.1f}, here {stages[3 * i + 1]:8.1f}, ended {stages[3 * i + 2]:8.1f})"
            for i, op in enumerate(("dispatch", "combine"))
        ]
        if store.rank == 0:
            print(f"{HOSTS} x {options.ranks // HOSTS} {mode.value} T={tokens:5} {name:8}", *line, flush=True)


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.two_hosts")
    parser.add_argument("--tokens", default="128,512,1024", help="per rank, comma-separated")
    parser.add_argument("--ranks", type=int, default=4, help="R, of both hosts")
    parser.add_argument("--rounds", type=int, default=30, help="of T up to 512; fewer of more")
    parser.add_argument("--blocks", type=int, default=1 << 10, help="of a rank, at most")
    parser.add_argument("--layout", default=Layout.RANK_MAJOR.value)
    parser.add_argument("--other", action="append", default=[], help="NAME:FILE=PATH; a name may have several files")
    options = parser.parse_args()
    store, texts = Store(), {"today": dict[str, str]()}
    for one in options.other:
        name, _, rest = one.partition(":")
        file, _, path = rest.partition("=")
        texts.setdefault(name, {})[file] = Path(path).read_text()
    tokens = [int(t) for t in options.tokens.split(",")]
    loops = Loops(store, options.ranks, options.ranks // HOSTS * max(tokens) * (HIDDEN * 2 + 2048))
    for t in tokens:
        measure(options, store, loops, texts, t)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
