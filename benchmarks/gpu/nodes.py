"""GPUs of one machine as several hosts, with the network between: `make bench-gpu NODES=2`.

    torchrun --nproc-per-node GPUS -m benchmarks.gpu.nodes --nodes 2 --out DIR

Hosts are labels of the ranks, equally many each (`NetworkConfig.domain`): ranks of one host map each other's memory,
all else takes the network, here sockets on the loop-back device and boxes in pinned memory. The times are those of
`measure.py`, results are checked as there.

`nodes.csv`, a line for each case and operation; all but the times are means over ranks:

* `exact_combine`: combine returns a row per (token, k), as `crossdock.deep_ep` does in low-latency mode.
* `rows_per_token`: rows that cross, by what was sent; `theory_rows`: by the routing, once to each rank of another host;
  of an exact combine once for each (token, k) there.
* `wire_bytes`, `theory_bytes`: of one operation, counted by the network and by the table of docs/network-protocol.md.
* `gbps`: wire bytes over the time. `stream_us`, `stream_gbps`: the provider's own loop, which is the same messages,
  both ways, by proxies alone: no kernel, no copy, memory that caches may hold. `of_stream`: the quotient. Of few tokens
  it says little; there `p50_us` beside `stream_us` does. `of_gpu_stream`: of a loop before each round of which the GPU
  reads what has come and writes what is to go, in four places that take turns as an operation's slots do.
* `staged_us`, `arrived_us`: of the kernels' own records, medians, of a pair both operations together: from the start
  until a rank has pushed all that it sends; until a block has seen that all of the other hosts is here.
* `proxy_us`: processor time of the proxies by messages sent and received; `proxy_cpu`: share of a processor that one
  used meanwhile. A proxy that waits spins for `spin_us`, which both contain.
* `spin_us`: NetworkConfig.spin_us. Half a millisecond and more lies between two operations that are called (`eager`),
  none between those of a graph. Where `spin_us` is less, proxies sleep in between, and p50 of few tokens is theirs.

`proxy.csv`: ring and proxy between threads of one process, as `benchmarks/network.py` measures them, and messages of 8
bytes by all ranks at once.
"""

from __future__ import annotations

import argparse
import datetime
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import bounds, facts, network
from benchmarks.cases import Case
from benchmarks.gpu.crossdock import Crossdock
from benchmarks.gpu.measure import Bench, Stopwatch, Times, gathered
from benchmarks.gpu.nodes_network import (
    DEADLINE_S,
    Proxies,
    Streams,
    most_rows,
    network_of,
    remote_of,
    rows_by_rail,
    sizes_of,
)
from ep_kernels import Layout, Mode, StoreGroup
from ep_kernels.network import NetworkConfig
from ep_kernels.telemetry import quantile

LL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EXACT_TOKENS = (1, 8, 32, 128)
HT_TOKENS = (512, 1024, 2048, 4096, 8192)
SMALL_MESSAGES, IDLE_S = 2000, 1.0
GOAL = 0.9
"""Of the provider's own loop."""


@dataclass(frozen=True)
class Line:
    """One line of nodes.csv; see this module's docstring."""

    mode: str
    layout: str
    exact_combine: bool
    op: str
    timing: str
    tokens: int
    ranks: int
    nodes: int
    provider: str
    spin_us: int
    p50_us: float
    p99_us: float
    rows_per_token: float
    theory_rows: float
    wire_bytes: int
    theory_bytes: int
    gbps: float
    staged_us: float
    arrived_us: float
    stream_us: float
    stream_gbps: float
    of_stream: float
    of_gpu_stream: float
    messages: float
    proxy_us: float
    proxy_cpu: float


@dataclass(frozen=True)
class Wire:
    """What an operation sends from this rank: counted, and by the routing; means over ranks."""

    num_bytes: float
    theory: float
    rows: float
    messages: float


@dataclass(frozen=True)
class Stages:
    """When an operation has come so far, us from its start; means over ranks."""

    staged: float
    arrived: float


class Session:
    """One rank's part of the run; rank 0 prints and writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._store, self._rank, self._ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=self._rank))
        device = torch.device("cuda", torch.cuda.current_device())
        timeout = datetime.timedelta(seconds=DEADLINE_S)
        dist.init_process_group(
            "nccl", store=self._store, rank=self._rank, world_size=self._ranks, timeout=timeout, device_id=device
        )
        if self._ranks % options.nodes or options.nodes < 2:
            raise SystemExit(f"--nodes: expected 2 or more that divide {self._ranks} GPUs, got {options.nodes}")
        self._watch, self._number = Stopwatch(device), 0
        self._lines: list[Line] = []
        self._proxy: list[network.Row] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """All cases; what is measured is written after each. One that fails costs no other."""
        cases = list(cases_of(self._options, self._ranks))
        config = network_of(self._rank, self._ranks, self._options.nodes, self._options.provider, self._options.spin_us)
        most = max(sum(sizes_of(case, op, most_rows(case, op))) for case in cases for op in parts_of("pair"))
        streams = Streams(config, self._rank, self._ranks, self._options.nodes, most * (self._ranks - 1))
        self._alone(streams)
        until = time.monotonic() + self._options.seconds
        for case in cases:
            if self._mean(float(time.monotonic() > until)):  # by any clock
                self._say(f"out of time before {case.mode.value} T={case.tokens}")
                break
            self._attempt(case, config, streams)
            self._write()
        streams.close()

    def _attempt(self, case: Case, config: NetworkConfig, streams: Streams) -> None:
        kept, fault = len(self._lines), ""
        try:
            self._measure(case, config, streams)
        except Exception:
            fault = f"{case.mode.value} {case.layout.value} T={case.tokens}: {traceback.format_exc()}"
        faults: list[str] = [""] * self._ranks
        dist.all_gather_object(faults, fault)
        if any(faults):
            del self._lines[kept:]
            self.failures += dict.fromkeys(filter(None, faults))
            self._say("FAILED " + "\n".join(dict.fromkeys(filter(None, faults))))

    def _alone(self, streams: Streams) -> None:
        """Ring and proxy without a GPU: between threads of rank 0, then small messages of all ranks."""
        peers = remote_of(self._rank, self._ranks, self._options.nodes)
        if self._rank == 0:
            self._proxy = [*network.ring(20_000), *network.messages(10_000)]
        dist.barrier()
        small = [(peer, 8) for _ in range(SMALL_MESSAGES) for peer in peers]
        took = [streams.us(small, len(small), 6) / len(small)]
        self._proxy.append(network.row("messages of 8 bytes, both ways", f"{self._options.nodes} hosts", took, "us"))
        self._say(network.table(self._proxy))

    def _measure(self, case: Case, config: NetworkConfig, streams: Streams) -> None:
        self._number += 1
        group = StoreGroup(self._store, self._rank, self._ranks, name=f"case-{self._number}")
        backend = Crossdock(case, group, network=config)
        try:
            self._loops(case, backend, streams)
            if self._number == 1:
                self._idle()
        finally:
            self._watch.forget()
            backend.close()

    def _loops(self, case: Case, backend: Crossdock, streams: Streams) -> None:
        bench = Bench(backend, case, self._rank, self._options.seed + 100_000 * self._number, self._watch)
        bench.round_trips("before")
        tables = self._tables(case, bench)
        wires = self._wires(bench, tables)
        for timing in ("eager", "graph") if case.mode is Mode.LL else ("eager",):
            loop = bench.graph if timing == "graph" else bench.eager
            counted, proxies = self._messages(backend), Proxies()
            backend.samples()  # of what was before
            found = loop(iterations_of(case, self._options.iterations), flush=case.mode is Mode.HT)
            us, share = proxies.used()
            stages = self._stages(backend)
            per_message = us / max(1.0, self._messages(backend) - counted)
            for op, times in found.items():
                both = [streams.of_operation(case, one, tables[one]) for one in parts_of(op)]
                stream = sum(hot for hot, _ in both), sum(of_gpu for _, of_gpu in both)
                wire = [wires[one] for one in parts_of(op)]
                proxy = self._mean(per_message), self._mean(share)
                self._keep(case, op, timing, times, wire, stream, [stages[one] for one in parts_of(op)], proxy)
        bench.round_trips("after")
        faults: list[Any] = [None] * self._ranks
        dist.all_gather_object(faults, bench.faults)
        if any(faults):
            raise AssertionError("\n".join(fault for one in faults for fault in one))

    def _idle(self) -> None:
        """What a group costs that does nothing."""
        dist.barrier()
        torch.cuda.synchronize()
        proxies = Proxies()
        time.sleep(IDLE_S)
        share = 100 * self._mean(proxies.used()[1])
        self._proxy.append(network.row("processor of an idle rank", "2 proxies", [share], "%"))

    def _tables(self, case: Case, bench: Bench) -> dict[str, torch.Tensor]:
        """int64 [R, R, 2] of each operation: rows from -> to of the first prepared set, and those that go to that rank,
        in a dispatch for all of its host."""
        ids = bench.sets[0].topk_ids
        carried = rows_by_rail(case, ids, self._rank, self._options.nodes)
        mine = torch.stack([bounds.rows_to(case, ids), carried, bounds.rows_back(case, ids)])
        dispatch, by_rail, combine = gathered(mine, self._ranks)
        return {"dispatch": torch.stack([dispatch, by_rail], -1), "combine": torch.stack([combine.T] * 2, -1)}

    def _stages(self, backend: Crossdock) -> dict[str, Stages]:
        torch.cuda.synchronize()
        samples, peers = backend.samples(), remote_of(self._rank, self._ranks, self._options.nodes)
        found = {}
        for op in parts_of("pair"):
            of_op = [one for one in samples if one.op == op]
            staged = quantile([one.send_ns / 1e3 for one in of_op], 0.5)
            arrived = quantile([max(one.peer_wait_ns[peer] for peer in peers) / 1e3 for one in of_op], 0.5)
            found[op] = Stages(self._mean(staged), self._mean(arrived))
        return found

    def _messages(self, backend: Crossdock) -> float:
        torch.cuda.synchronize()
        return float(sum(peer.sent_messages + peer.received_messages for peer in backend.traffic()))

    def _wires(self, bench: Bench, tables: dict[str, torch.Tensor]) -> dict[str, Wire]:
        """Of one dispatch and one combine of the first set, each between two barriers, which send no bytes."""
        backend, case, inputs = bench.backend, bench.case, bench.sets[0]
        assert isinstance(backend, Crossdock)
        counts, received = [backend.settled()], backend.dispatch(inputs)
        counts.append(backend.settled())
        backend.combine(bench.given(received), received, inputs, backend.result(inputs))
        counts.append(backend.settled())
        found = {}
        for number, op in enumerate(parts_of("pair")):
            peers = remote_of(self._rank, self._ranks, self._options.nodes)
            away = [tables[op][self._rank, peer].tolist() for peer in peers]
            theory = sum(sum(sizes_of(case, op, *rows)) for rows in away)
            sent, messages = (after - before for before, after in zip(*counts[number : number + 2], strict=True))
            barriers = len(away)
            carried = sum(rows for _, rows in away)
            found[op] = Wire(*map(self._mean, (sent, theory, carried, messages - barriers)))
        return found

    def _keep(
        self, case: Case, op: str, timing: str, times: Times, wires: Sequence[Wire], stream_us: tuple[float, float],
        stages: Sequence[Stages], proxy: tuple[float, float],
    ) -> None:  # fmt: skip
        p50, num_bytes = quantile(times.gpu_us, 0.5), sum(wire.num_bytes for wire in wires)
        gbps, stream, of_gpu = (num_bytes / us / 1e3 for us in (p50, *stream_us))
        row_bytes = [sum(sizes_of(case, one, 0, 1)) - sum(sizes_of(case, one, 0, 0)) for one in parts_of(op)]
        rows = sum(w.rows + (w.num_bytes - w.theory) / b for w, b in zip(wires, row_bytes, strict=True)) / len(wires)
        options = self._options
        line = Line(
            case.mode.value, case.layout.value, case.exact_combine, op, timing, case.tokens, self._ranks,
            options.nodes, options.provider, options.spin_us,
            round(p50, 2), round(quantile(times.gpu_us, 0.99), 2), round(rows / case.tokens, 4),
            round(sum(wire.rows for wire in wires) / len(wires) / case.tokens, 4), round(num_bytes),
            round(sum(wire.theory for wire in wires)), round(gbps, 3), round(sum(one.staged for one in stages), 2),
            round(sum(one.arrived for one in stages), 2), round(stream_us[0], 2), round(stream, 3),
            round(gbps / stream, 3), round(gbps / of_gpu, 3),
            round(sum(wire.messages for wire in wires), 2), round(proxy[0], 3), round(proxy[1], 3),
        )  # fmt: skip
        self._lines.append(line)
        self._say(
            ", ".join(f"{field.name} {getattr(line, field.name)}" for field in fields(line) if field.name not in SAME)
        )

    def _mean(self, value: float) -> float:
        """Over ranks."""
        values = torch.tensor([value], dtype=torch.float64, device="cuda")
        dist.all_reduce(values)
        return float(values.item() / self._ranks)

    def _write(self) -> None:
        if self._rank:
            return
        folder, options = facts.folder_of_gpus(self._ranks), vars(self._options)
        out = self._options.out or folder.with_name(f"{folder.name}-nodes{self._options.nodes}")
        config: dict[str, object] = {
            name: str(value) for name, value in options.items() if name not in ("out", "commit")
        } | {"failures": self.failures}
        told = facts.of_this_run(config, self._options.commit, "benchmarks.gpu.nodes") | facts.of_gpus(self._ranks)
        facts.keep(out, "nodes", Line, self._lines, told)
        facts.keep(out, "proxy", network.Row, self._proxy, told)

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)


SAME = ("ranks", "nodes", "provider", "spin_us")
"""Columns that the screen leaves out."""


def parts_of(op: str) -> tuple[str, ...]:
    """The operations of a line."""
    return ("dispatch", "combine") if op == "pair" else (op,)


def iterations_of(case: Case, most: int) -> int:
    """Fewer of long ones."""
    return max(10, min(most, 100 * 512 // case.tokens))


def cases_of(options: argparse.Namespace, ranks: int) -> Iterator[Case]:
    """LL by rank and by expert, with an exact combine, then HT."""
    for tokens in options.ll:
        for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR):
            yield Case(Mode.LL, layout, ranks, tokens)
    for tokens in options.exact:
        yield Case(Mode.LL, Layout.EXPERT_MAJOR, ranks, tokens, exact_combine=True)
    for tokens in options.ht:
        yield Case(Mode.HT, Layout.FLAT, ranks, tokens)


def numbers(text: str) -> tuple[int, ...]:
    """Of "1,2,3"."""
    return tuple(int(word) for word in text.split(",") if word)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.nodes", description="GPUs as several hosts.")
    parser.add_argument("--nodes", type=int, default=2, help="hosts; a divisor of the number of GPUs")
    parser.add_argument("--out", type=Path, help="folder for nodes.csv, proxy.csv and run.json")
    parser.add_argument("--ll", type=numbers, default=LL_TOKENS, help="tokens per rank, comma-separated")
    parser.add_argument("--exact", type=numbers, default=EXACT_TOKENS, help="LL with exact_combine: tokens per rank")
    parser.add_argument("--ht", type=numbers, default=HT_TOKENS, help="tokens per rank, comma-separated")
    parser.add_argument("--iterations", type=int, default=100, help="of an operation, at most")
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--spin-us", type=int, default=NetworkConfig().spin_us, help="NetworkConfig.spin_us")
    parser.add_argument("--seconds", type=float, default=600, help="no case begins later")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--commit", help="name of the measured state, where the tree has no history")
    parser.add_argument("--note", default="", help="kept in run.json")
    session = Session(parser.parse_args(arguments))
    try:
        session.run()
    finally:
        dist.destroy_process_group()
    return 1 if session.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
