"""What the network under the `cpu` transport costs, on the loop-back device of this machine.

    python -m benchmarks.network [--out DIR] [--rounds N] [--gb-s RATE ...]        (make bench-network)

Ring: from a push by one thread to the pop by another. Message: from a push to the handler of the peer, beside the same
bytes on the same kind of socket by one thread; rank and peer share a proxy, so two threads run, as the socket pair has
one. The first after a pause: between two proxies, both asleep. Dispatch: rows that leave a rank, over the time of the
slowest rank, beside the provider's own stream of messages of the same sizes (less, too, the time of a dispatch on one
host, whose copies take the same processors) and beside gloo's all_to_all of the same job. The stream sends the same
memory again and again and lands it at the same place, so caches hold both; before a dispatch other programs have run,
as experts do, and then its rows were written. The stream after other work: other memory and then what it sends are
written before, as before a dispatch. Streams and dispatch take turns in the same processes; a share is the median of
the rounds' quotients. Wire: what a dispatch sends, beside what it must. With `--gb-s` only what network_rates.py has.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

from benchmarks import facts, native, network_rates
from benchmarks.backends import Setup
from benchmarks.backends.over_hosts import create, network_of
from benchmarks.cases import Case, Step, make_steps
from benchmarks.measure import DEADLINE_S, measure
from benchmarks.parts import Parts
from crossdock.demo.hosts import become
from ep_kernels import Layout, Mode
from ep_kernels.network import NetworkConfig
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.network.providers import Mark
from ep_kernels.transports.cpu.native import SENT_KINDS, Sent

MESSAGE_BYTES = (8, 7168, 100_000)
RING_US, MESSAGE_US, SHARE, RECORDS_PCT, GLOO = 0.5, 2.0, 0.9, 2.0, 2.0
"""Targets: a push; ring and proxy above the socket; of the provider's stream; beside the rows; gloo's time by ours."""
INSIDE = "--inside"
SEED, WAIT_S, BLOCKS, PAUSE_S, NAP_NS, WARMUP = 20, 30.0, 20, 0.002, 20_000, 6
OTHER_BYTES = 64 << 20
"""Written by each rank, as experts do between two dispatches."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: is measured.
        of: which job or size.
        value, p99: median and 99th percentile, where there are several.
        unit: of both.
        target: and which side of it is good; empty: none.
        met: "yes" or "no".
    """

    what: str
    of: str
    value: float
    p99: float | None
    unit: str
    target: str = ""
    met: str = ""


def row(what: str, of: str, values: Sequence[float], unit: str, *, most: float = 0, least: float = 0) -> Row:
    """With the judgement of the median."""
    ordered = sorted(values)
    value, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    target = f"<= {most:g}" if most else f">= {least:g}" if least else ""
    met = "" if not target else "yes" if (value <= most if most else value >= least) else "no"
    return Row(what, of, round(value, 3), round(p99, 3) if len(ordered) > 1 else None, unit, target, met)


class End:
    """One rank's end of a network, without a rank: memory, a mirror, and a count of what has come."""

    def __init__(self, network: Network, rank: int, ranks: int, size: int) -> None:
        self.mark, self._network = Mark(), network
        self._own, self._landing = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size * ranks)
        own, landing = ctypes.addressof(self._own), ctypes.addressof(self._landing)
        handler, context = network.lib.cn_mark_handler(), ctypes.addressof(self.mark)
        network.in_use += 1
        self._awaited = 0
        memory = ChannelMemory(own, size, landing, size, handler, context)
        self.channel = Channel(network, rank, ranks, memory, WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.channel.free()

    @property
    def memory(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
        """What it sends; where what ranks send lands, as many bytes for each."""
        return self._own, self._landing

    def write(self, number: int) -> None:
        """Other bytes into what it sends."""
        ctypes.memset(self._own, number % 256, len(self._own))

    def stream(self, messages: Sequence[tuple[int, int]], expected: int, nap_ns: int = NAP_NS, offset: int = 0) -> int:
        """Send messages of those (rank, bytes), side by side from `offset` on, while as many as expected come; ns.
        `nap_ns`: between looks whether they have; 0: spins."""
        ranks = (ctypes.c_int32 * len(messages))(*[rank for rank, _ in messages])
        sizes = (ctypes.c_uint32 * len(messages))(*[num_bytes for _, num_bytes in messages])
        self._awaited += expected
        took: int = native.load().cd_bench_stream(
            self.channel.pointer, ctypes.byref(self.mark), ranks, sizes, len(messages), offset, self._awaited, nap_ns
        )
        if took < 0:
            raise TimeoutError("network: the stream stands still")
        return took


def ring(rounds: int) -> list[Row]:
    """Push to pop."""
    took = (ctypes.c_int64 * rounds)()
    if error := native.load().cd_bench_ring(rounds, took):
        raise OSError(error, os.strerror(error))
    return [row("ring: push to pop", "", [ns / 1e3 for ns in took[rounds // 10 :]], "us", most=RING_US)]


def messages(rounds: int) -> list[Row]:
    """Through ring and proxy, and over a socket alone."""
    rows = []
    network = Network(NetworkConfig(listen="127.0.0.1:0", spin_us=100_000))
    size, mail = max(MESSAGE_BYTES), native.load().cd_bench_mail
    with End(network, 0, 2, size) as one, End(network, 1, 2, size) as two:
        meet(one, two)
        for num_bytes in MESSAGE_BYTES:
            took, alone, above = list[float](), list[float](), list[float]()
            for _ in range(BLOCKS):  # taking turns: whatever else the machine does, it does to both
                block, bare = (ctypes.c_int64 * (rounds // BLOCKS))(), (ctypes.c_int64 * (rounds // BLOCKS))()
                mail(one.channel.pointer, ctypes.byref(two.mark), 1, num_bytes, len(block), block)
                _sockets(num_bytes, bare)
                above.append((statistics.median(block) - statistics.median(bare)) / 1e3)
                took += [ns / 1e3 for ns in block]
                alone += [ns / 1e3 for ns in bare]
            typical = statistics.median(above)
            rows += [
                row("message: ring, proxy, tcp", f"{num_bytes} bytes", took, "us"),
                row("message: socket alone", f"{num_bytes} bytes", alone, "us"),
                row("message: above the socket", f"{num_bytes} bytes", [typical], "us", most=MESSAGE_US),
            ]
    network.close()
    return rows


def idle(rounds: int) -> list[Row]:
    """The first message after a pause, in which both proxies went to sleep."""
    networks = [Network(NetworkConfig(listen="127.0.0.1:0")) for _ in range(2)]
    with End(networks[0], 0, 2, 4096) as one, End(networks[1], 1, 2, 4096) as two:
        meet(one, two)
        took, one_ns = list[float](), (ctypes.c_int64 * 1)()
        for _ in range(rounds):
            time.sleep(PAUSE_S)
            native.load().cd_bench_mail(one.channel.pointer, ctypes.byref(two.mark), 1, MESSAGE_BYTES[0], 1, one_ns)
            took.append(one_ns[0] / 1e3)
    for network in networks:
        network.close()
    of = f"{MESSAGE_BYTES[0]} bytes, 2 proxies"
    return [row("message: the first after a pause", of, took[rounds // 10 :], "us")]


def meet(one: End, two: End) -> None:
    """Connect ranks 0 and 1."""
    thread = threading.Thread(target=two.channel.connect, args=({0: one.channel.ticket()}, WAIT_S))
    thread.start()
    one.channel.connect({1: two.channel.ticket()}, WAIT_S)
    thread.join()


def _sockets(num_bytes: int, took: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        there, _ = server.accept()
        out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source, to = ctypes.create_string_buffer(num_bytes), ctypes.create_string_buffer(num_bytes + 16)
        error = native.load().cd_bench_sockets(out.fileno(), there.fileno(), source, to, num_bytes, len(took), took)
        there.close()
    if error:
        raise OSError(error, os.strerror(error))


def runs(case: Case, step: Step, rank: int) -> list[int]:
    """Bytes of the messages with rows of a rank for the other host: a run of tokens each."""
    half = case.ranks // 2
    ranks = step.topk_ids[rank] // (case.experts // case.ranks)
    goes = (ranks // half != rank // half).any(1).tolist()
    found: list[int] = []
    for before, here in zip([False, *goes], goes, strict=False):
        if here and before:
            found[-1] += case.row_bytes
        elif here:
            found.append(case.row_bytes)
    return found


def dispatches(case: Case, rounds: int) -> list[Row]:
    """Over two hosts: ours, gloo, and the provider's stream."""
    of = f"T={case.tokens}, 2 hosts x {case.ranks // 2}"
    result = measure(case, ("over_hosts", "two_hops", "crossdock", "gloo"), rounds, SEED)
    step = make_steps(case, 1, SEED)[0]
    num_bytes = statistics.mean(sum(runs(case, step, rank)) for rank in range(case.ranks))
    slowest = max_of(_in_processes(case, _turns, rounds))
    streamed, alike, ours = ([num_bytes / ns for ns in slowest[kind::3]] for kind in range(3))
    whole, here = (result.p50(name, "dispatch") for name in ("over_hosts", "crossdock"))
    apart = num_bytes / (whole - here) / 1e3 / statistics.median(streamed)
    gloo = result.p50("gloo", "dispatch") / result.p50("over_hosts", "dispatch")
    back = result.p50("gloo", "combine") / result.p50("over_hosts", "combine")
    two_hops = quotients(*(result.slowest_us[name, "combine"] for name in ("two_hops", "over_hosts")))
    return [
        row("dispatch: rows that leave a rank", of, ours, "GB/s"),
        row("stream: messages of the same sizes", of, streamed, "GB/s"),
        row("dispatch: of the stream", of, quotients(ours, streamed), "", least=SHARE),
        row("dispatch: of the stream, placing apart", of, [apart], "", least=SHARE),
        row("stream: after other work, too", of, alike, "GB/s"),
        row("dispatch: of the stream after other work", of, quotients(ours, alike), "", least=SHARE),
        row("dispatch: ours", of, [us / 1e3 for us in result.slowest_us["over_hosts", "dispatch"]], "ms"),
        row("dispatch: ours on one host", of, [us / 1e3 for us in result.slowest_us["crossdock", "dispatch"]], "ms"),
        row("dispatch: gloo", of, [us / 1e3 for us in result.slowest_us["gloo", "dispatch"]], "ms"),
        row("dispatch: gloo by ours", of, [gloo], "", least=GLOO),
        row("combine: ours", of, [us / 1e3 for us in result.slowest_us["over_hosts", "combine"]], "ms"),
        row("combine: ours in two hops", of, [us / 1e3 for us in result.slowest_us["two_hops", "combine"]], "ms"),
        row("combine: two hops by one", of, two_hops, ""),
        row("combine: ours on one host", of, [us / 1e3 for us in result.slowest_us["crossdock", "combine"]], "ms"),
        row("combine: gloo by ours", of, [back], "", least=GLOO),
    ]


def quotients(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each round: whatever else the machine does, it does to both."""
    return [value / other for value, other in zip(values, others, strict=True)]


def max_of(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each round, the slowest rank's."""
    return [max(together) for together in zip(*times, strict=True)]


def wire(case: Case) -> list[Row]:
    """Bytes that one dispatch sends."""
    of = f"T={case.tokens}, 2 hosts x {case.ranks // 2}"
    step = make_steps(case, 1, SEED)[0]
    expected = sum(sum(runs(case, step, rank)) for rank in range(case.ranks))
    sent = _in_processes(case, _sent, 1)
    rows, records, words = (sum(counted[kind] for counted in sent) for kind in range(len(SENT_KINDS)))
    other = 100 * (records + words) / rows
    return [
        row("wire: rows sent by rows that must be", of, [rows / expected], "", most=1.0),
        row("wire: heads and records beside rows", of, [other], "%", most=RECORDS_PCT),
    ]


def at_rate(gb_s: float, rounds: int) -> list[Row]:
    """Two hosts of four ranks over a network of that rate."""
    case = Case(Mode.HT, Layout.FLAT, ranks=8, tokens=512)
    found = network_rates.rates(case, gb_s, rounds, SEED)
    return [row(what, of, values, unit, least=least) for what, of, values, unit, least in found]


Job = Callable[[Case, int, Any, int], list[float]]


def _in_processes(case: Case, job: Job, rounds: int) -> list[list[float]]:
    """What each rank's process gives."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(case.ranks):
            here, there = context.Pipe()
            arguments = (case, job, rank, str(Path(folder) / "store"), rounds, there)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        try:
            return [_received(pipe) for _, pipe in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def _received(pipe: Connection) -> list[float]:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"a rank was silent for {DEADLINE_S} s")
    return pipe.recv()  # type: ignore[no-any-return]


def _run(case: Case, job: Job, rank: int, store: str, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(job(case, rank, dist.FileStore(store, case.ranks), rounds))  # type: ignore[attr-defined]
    pipe.recv()  # until it is killed, when all have answered


def _turns(case: Case, rank: int, store: Any, rounds: int) -> list[float]:
    """ns of each round: a stream that follows another, a stream after other work, a dispatch after the same work. Both
    of them between each rank and one of the other host, or all, at once."""
    peer, step = (rank + case.ranks // 2) % case.ranks, make_steps(case, 1, SEED)[0]
    backend = create(Setup(case, rank, store))
    x, other = torch.ones(case.tokens, case.hidden, dtype=case.dtype), torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    network = Network(network_of(rank, case.ranks))
    with End(network, rank, case.ranks, case.tokens * case.row_bytes) as end:
        _connect(end, store, rank, peer)
        here = [(peer, num_bytes) for num_bytes in runs(case, step, rank)]
        expected = len(runs(case, step, peer))

        def stream() -> float:
            end.stream([(peer, 0)], 1)  # both are here
            return float(end.stream(here, expected))

        took: list[float] = []
        for number in range(WARMUP + rounds):
            stream()
            took.append(stream())
            other.add_(1)
            end.write(number)
            took.append(stream())
            other.add_(1)
            backend.prepare(x, step)
            backend.barrier()
            begun = time.perf_counter_ns()
            backend.dispatch()
            took.append(float(time.perf_counter_ns() - begun))
            backend.experts()
            backend.combine()
        _meet(store, rank, case.ranks, "end")
    network.close()
    return took[3 * WARMUP :]


def _connect(end: End, store: Any, rank: int, peer: int) -> None:
    ticket = end.channel.ticket()
    store.set(f"ticket/{rank}", msgspec.json.encode(ticket))
    there = msgspec.json.decode(store.get(f"ticket/{peer}"), type=type(ticket))
    end.channel.connect({peer: msgspec.structs.replace(there, address="127.0.0.1")}, WAIT_S)


def _sent(case: Case, rank: int, store: Any, rounds: int) -> list[float]:
    """Bytes of one dispatch by kind, bring-up not counted."""
    backend = create(Setup(case, rank, store))
    transport: Any = backend._comm._transport
    before, after = (Sent * len(SENT_KINDS))(), (Sent * len(SENT_KINDS))()
    backend.prepare(torch.ones(case.tokens, case.hidden, dtype=case.dtype), make_steps(case, 1, SEED)[0])
    transport.lib.cd_sent(transport.comm.pointer, before)
    backend.dispatch()
    transport.lib.cd_sent(transport.comm.pointer, after)
    backend.barrier()
    return [float(now.bytes - then.bytes) for now, then in zip(after, before, strict=True)]


def _meet(store: Any, rank: int, ranks: int, name: str) -> None:
    store.set(f"{name}/{rank}", b"1")
    store.wait([f"{name}/{other}" for other in range(ranks)])


def table(rows: Sequence[Row]) -> str:
    """For the screen."""
    names = [field.name for field in fields(Row)]
    cells = [names]
    cells += [["" if (cell := getattr(one, name)) is None else str(cell) for name in names] for one in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main(words: Sequence[str] | None = None) -> int:
    """Measure all, print the table; 1 where a part failed."""
    parser = argparse.ArgumentParser(description="Measure what the network costs.")
    parser.add_argument("--out", type=Path, help="folder for network.csv and run.json; none: print only")
    parser.add_argument("--rounds", type=int, default=40, help="dispatches per job; messages: 500 times as many")
    parser.add_argument("--gb-s", type=float, nargs="+", default=(), help="rates of a network of two hosts x 4 ranks")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:] if words is None else list(words)
    arguments = parser.parse_args(given)
    if any(rate <= 0 for rate in arguments.gb_s):
        parser.error(f"--gb-s: expected rates above 0, got {arguments.gb_s}")
    if arguments.gb_s and not arguments.inside:
        parser.error(f"--gb-s: {become([*given, INSIDE], 'benchmarks.network')}")
    load, many = os.getloadavg()[0], 500 * arguments.rounds
    jobs = [Case(Mode.HT, Layout.FLAT, ranks=ranks, tokens=512) for ranks in (2, 4)]
    config: dict[str, object] = {"rounds": arguments.rounds, "load_before": round(load, 2)}
    about = facts.of_control([word for word in given if word != INSIDE], config, "benchmarks.network")
    found = Parts(arguments.out, "network", Row, lambda: about, lambda _: None)
    for gb_s in arguments.gb_s:
        found.measure(f"a network of {gb_s:g} GB/s", partial(at_rate, gb_s, arguments.rounds))
    if not arguments.gb_s:
        found.measure("ring", partial(ring, many))
        found.measure("messages", partial(messages, many))
        found.measure("idle", partial(idle, 10 * arguments.rounds))
        for job in jobs:
            found.measure(f"dispatches of {job.ranks} ranks", partial(dispatches, job, arguments.rounds))
        for ranks in (2, 4):
            sent = Case(Mode.LL, Layout.RANK_MAJOR, ranks=ranks, tokens=128)
            found.measure(f"bytes of {ranks} ranks", partial(wire, sent))
    print(table(found.rows))
    return found.status


if __name__ == "__main__":
    sys.exit(main())
