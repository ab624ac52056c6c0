"""Experts from peers: how fast a worker reads them, and how soon a group serves with two more.

    python -m benchmarks.peers [--out DIR] [--rounds N]        (make bench-peers)

rates.csv: all experts of a checkpoint from a holder in another process of this host, over its memory and over TCP,
beside a loop that copies as much in one process, and TCP alone; into memory that was written before, and into new one.
steps.csv: time of a product in the holder's process, alone and while its experts are read.
grow.csv: four workers serve one client that asks without a pause, two wait; `crossdock scale` to six. From peers and
from the checkpoint, whose files are in the page cache, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import torch

from benchmarks import facts
from benchmarks.parts import Parts
from benchmarks.service.model import write_experts
from crossdock.client import Client
from crossdock.common import rpc
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.host.supervisor import Supervisor
from crossdock.protocol import frames
from crossdock.protocol.same_host import host_identity
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.protocol.v1.control_pb2 import SERVING, ExpertsRequest, GroupView, ScaleRequest
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.expert_sources import OneExpert
from crossdock.worker.checkpoints.weight_memory import PIECE_BYTES
from crossdock.worker.checkpoints.weights import allocated
from crossdock.worker.experts.expert_mlps import ExpertMLPs, HeldLayer
from crossdock.worker.experts.placement import Holder
from crossdock.worker.peers.giving import WeightGiver
from crossdock.worker.peers.messages import WeightLine
from crossdock.worker.peers.reading import Peers

HIDDEN, EXPERTS, LAYERS, TOPK, TOKENS = 1024, 24, 4, 4, 16
BEFORE, AFTER = 4, 6
PRODUCTS = 400
EXPERT_BYTES = 3 * HIDDEN * HIDDEN * 2
"""At the default sizes, of which `grow` is."""
WAIT_S, CALM_S = 120.0, 3.0
CPU = torch.device("cpu")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Rate:
    """One way to bring so many bytes; median, slowest and fastest of the rounds."""

    way: str
    num_bytes: int
    gb_s: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Step:
    """A product in the holder's process, ms: median of all turns, and of turns the lowest and highest median."""

    meanwhile: str
    ms: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Grown:
    """One growth from BEFORE to AFTER workers.

    Attributes:
        serves_s: from the command until all serve.
        pause_s: longest gap between two answers meanwhile.
        calm_ms, meanwhile_ms: median time of a request before, and while experts are read.
        peer_bytes, disk_bytes: of experts, that all workers have read.
        theory_bytes: of the experts that ranks have afterwards and had not before.
    """

    source: str
    turn: int
    serves_s: float
    pause_s: float
    calm_ms: float
    meanwhile_ms: float
    peer_bytes: int
    disk_bytes: int
    theory_bytes: int


class Shelf:
    """What the other process holds."""

    device = CPU

    def __init__(self, model: Path) -> None:
        self._checkpoint = Checkpoint.open(model)
        self._experts = ExpertMLPs.load(self._checkpoint, range(EXPERTS), dtype=torch.bfloat16)

    def held_layers(self) -> dict[int, HeldLayer]:
        return self._experts.layers

    def fingerprint_of(self, held: HeldLayer) -> str:
        return self._checkpoint.spec.fingerprint

    def digest_of(self, layer: int, expert: int, held: HeldLayer) -> int:
        return 0


def compute(pipe: Connection) -> None:
    """Of the other process: products, as many as are asked for; their median in ms."""
    x, weight = torch.randn(64, HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)
    while True:
        took = []
        for _ in range(pipe.recv()):
            began = time.perf_counter()
            torch.mm(x, weight.t())
            took.append(1e3 * (time.perf_counter() - began))
        pipe.send(statistics.median(took))


def hold(model: Path, pipe: Connection) -> None:
    """Of the other process: give to whoever connects, bytes for TCP alone too, and compute."""
    torch.set_num_threads(1)
    giver, name = WeightGiver(Shelf(model), WAIT_S), f"crossdock-{secrets.token_hex(8)}"
    near, far = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    near.bind(f"\0{name}")
    near.listen()

    def take(sock: socket.socket) -> None:
        while True:
            line = WeightLine(sock.accept()[0], WAIT_S)
            head = bytearray(frames.HEADER.size)
            line.receive_into(memoryview(head))
            _, count, kind, _, size = frames.HEADER.unpack(head)
            line.receive_into(memoryview(bytearray(count)))
            if kind == frames.FrameKind.READER:
                giver.give(line.sock)
                continue
            data = memoryview(bytes(PIECE_BYTES))
            for begin in range(0, size, PIECE_BYTES):
                line.send_piece(data[: size - begin])

    threading.Thread(target=take, args=(near,), daemon=True).start()
    threading.Thread(target=take, args=(far,), daemon=True).start()
    pipe.send((name, far.getsockname()[1]))
    with contextlib.suppress(EOFError):  # the other end is done
        compute(pipe)


def ways(checkpoint: Checkpoint, name: str, port: int) -> tuple[int, dict[str, Callable[[], None]]]:
    """Bytes of all experts, and ways to bring them into memory that was written before."""
    held = ExpertMLPs.load(checkpoint, range(EXPERTS), dtype=torch.bfloat16).layers
    wanted = {layer: {expert: each.expert(expert) for expert in range(EXPERTS)} for layer, each in held.items()}
    tensors = [tensor for layer in wanted.values() for each in layer.values() for tensor in each.tensors]
    num_bytes, copies = sum(tensor.nbytes for tensor in tensors), [tensor.clone() for tensor in tensors]

    def copy(targets: Iterable[torch.Tensor]) -> None:
        for target, other in zip(targets, copies, strict=True):
            target.copy_(other)

    def fresh() -> Iterator[tuple[int, dict[int, OneExpert]]]:
        for layer in held:
            first, down = allocated(checkpoint.stacks(layer, EXPERTS, torch.bfloat16, "meta"), CPU)
            yield layer, {expert: OneExpert(expert, first[expert], down[expert]) for expert in range(EXPERTS)}

    def read(holder: Holder, targets: Iterable[tuple[int, dict[int, OneExpert]]]) -> None:
        with Peers("own", None, WAIT_S).source([holder], 0, CPU) as source:
            for layer, experts in targets:
                assert len(list(source.read(checkpoint, layer, experts))) == EXPERTS

    def tcp() -> None:
        line, room = WeightLine(socket.create_connection(("127.0.0.1", port)), WAIT_S), bytearray(PIECE_BYTES)
        line.send_piece(memoryview(frames.HEADER.pack(0, 0, frames.FrameKind.PING, 0, num_bytes)))
        for begin in range(0, num_bytes, PIECE_BYTES):
            line.receive_into(memoryview(room)[: num_bytes - begin])
        line.close()

    near, far = Holder("127.0.0.1:1", port, name, host_identity()), Holder("127.0.0.1:1", port, "", "")
    return num_bytes, {
        "copy loop, one process": lambda: copy(tensors),
        "peer, memory of the host": lambda: read(near, wanted.items()),
        "TCP alone, loop-back": tcp,
        "peer, TCP, loop-back": lambda: read(far, wanted.items()),
        "copy loop, new memory": lambda: copy(
            tensor for _, experts in fresh() for each in experts.values() for tensor in each.tensors
        ),
        "peer, memory of the host, new memory": lambda: read(near, fresh()),
    }


def beside(model: Path, measure: Callable[[Path, Connection, int], Iterator[R]], rounds: int) -> Iterator[R]:
    """Rows that are measured with another process, which holds the experts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(model, theirs), daemon=True)
    process.start()
    try:
        yield from measure(model, ours, rounds)
    finally:
        process.kill()


def steps_of(model: Path, ours: Connection, rounds: int) -> Iterator[Step]:
    """In turns: nobody reads, or all experts are read again and again."""
    _, bring = ways(Checkpoint.open(model), *ours.recv())
    reads = {"nobody reads": None, "read from its memory": "peer, memory of the host", "TCP": "peer, TCP, loop-back"}
    took: dict[str, list[float]] = {meanwhile: [] for meanwhile in reads}
    for _ in range(2 * rounds):
        for meanwhile, way in reads.items():
            ours.send(PRODUCTS)
            while not ours.poll(0 if way else None):
                bring[way or ""]()
            took[meanwhile].append(ours.recv())
    for meanwhile, found in took.items():
        yield Step(meanwhile, statistics.median(found), min(found), max(found))


def rates_of(model: Path, ours: Connection, rounds: int) -> Iterator[Rate]:
    """In turns, so that what else the machine does meets all of them."""
    num_bytes, bring = ways(Checkpoint.open(model), *ours.recv())
    took: dict[str, list[float]] = {way: [] for way in bring}
    for turn in range(rounds + 1):
        for way, read in bring.items():
            began = time.perf_counter()
            read()
            if turn:  # the first one warms up
                took[way].append(num_bytes / 1e9 / (time.perf_counter() - began))
    for way, found in took.items():
        yield Rate(way, num_bytes, statistics.median(found), min(found), max(found))


class Asking:
    """A client that asks without a pause: when each request began, and its time."""

    def __init__(self, target: str) -> None:
        self._client, self.took, self._stop = Client(target), list[tuple[float, float]](), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._client.close()

    def median_ms(self, begin: float, end: float) -> float:
        took = [seconds for at, seconds in list(self.took) if begin <= at and at + seconds <= end]
        return 1e3 * statistics.median(took) if took else 0.0

    def longest_gap(self, begin: float, end: float) -> float:
        at = [begun + took for begun, took in list(self.took) if begin <= begun + took <= end]
        return max((after - before for before, after in itertools.pairwise(at)), default=0.0)

    def _run(self) -> None:
        x, weights = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, TOPK)
        while not self._stop.is_set():
            begun = time.monotonic()
            self._client.forward(0, x, torch.rand(TOKENS, EXPERTS).topk(TOPK).indices, weights, timeout_s=WAIT_S)
            self.took.append((begun, time.monotonic() - begun))


def until(supervisor: Supervisor, wanted: Callable[[GroupView], bool]) -> GroupView:
    """The first view that is as wanted. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S
    with rpc.channel(supervisor.control_address) as channel:
        while not wanted(view := current_view(channel, WAIT_S)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected another state within {WAIT_S:g} s, got {view}")
            time.sleep(0.01)
    return view


def read_bytes(view: GroupView) -> dict[str, int]:
    """Bytes of experts that all workers have read, by source."""
    found = {"peer": 0, "disk": 0}
    for member in view.members:
        with urlopen(f"http://{member.http_address}/metrics", timeout=WAIT_S) as page:
            for line in page.read().decode().splitlines():
                if line.startswith("crossdock_expert_read_bytes_total{"):
                    found[line.split('source="')[1].split('"')[0]] += int(float(line.split()[-1]))
    return found


def held_by(supervisor: Supervisor, num_ranks: int) -> list[set[tuple[int, int]]]:
    """(layer, expert) of each rank, as the control plane says."""
    with rpc.channel(supervisor.control_address) as channel:
        layers = control_pb2_grpc.ControlPlaneStub(channel).Experts(ExpertsRequest(), timeout=WAIT_S).layers
    share, more = divmod(EXPERTS, num_ranks)
    firsts = [rank * share + min(rank, more) for rank in range(num_ranks + 1)]
    return [
        {(layer.layer, expert) for layer in layers for expert in layer.slots[first:end]}
        for first, end in itertools.pairwise(firsts)
    ]


def grow(model: Path, source: str, turn: int) -> Iterator[Grown]:
    """One growth, of a fresh group."""
    control = ControlConfig(listen="127.0.0.1:0", http_listen="127.0.0.1:0", world_size=BEFORE, max_workers=AFTER)
    workers = [
        WorkerConfig(
            model=str(model), local_rank=rank, uid=f"w/{rank}", max_tokens_per_step=64, torch_threads=1,
            peer_weights_timeout_s=10.0 if source == "peer" else 0.0,
        )
        for rank in range(AFTER)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Supervisor(control, workers, Path(folder)) as supervisor:
        supervisor.wait_serving(WAIT_S)
        until(supervisor, lambda view: bool(view.members) and bool(view.members[0].stats.weights))
        asking = Asking(supervisor.control_address)
        with contextlib.closing(asking):
            time.sleep(CALM_S)
            before, was = held_by(supervisor, BEFORE), read_bytes(until(supervisor, lambda _: True))
            began = time.monotonic()
            with rpc.channel(supervisor.control_address) as channel:
                control_pb2_grpc.ControlPlaneStub(channel).Scale(ScaleRequest(workers=AFTER), timeout=WAIT_S)
            view = until(supervisor, lambda view: view.state == SERVING and view.world_size == AFTER)
            end = time.monotonic()
            time.sleep(CALM_S)
            after, now = held_by(supervisor, AFTER), read_bytes(view)
            new = sum(len(own - (before[rank] if rank < BEFORE else set())) for rank, own in enumerate(after))
            yield Grown(
                source, turn, end - began, asking.longest_gap(began, end + CALM_S / 2),
                asking.median_ms(began - CALM_S, began), asking.median_ms(began, end),
                now["peer"] - was["peer"], now["disk"] - was["disk"], new * EXPERT_BYTES,
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the tables and run.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="H and I")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config: dict[str, object] = {
        "hidden": args.hidden, "experts": EXPERTS, "layers": LAYERS, "before": BEFORE, "after": AFTER,
    }  # fmt: skip

    def about() -> dict[str, object]:
        return facts.of_this_run(config, module="benchmarks.peers")

    brought, steps = Parts(args.out, "rates", Rate, about), Parts(args.out, "steps", Step, about)
    grown = Parts(args.out, "grow", Grown, about)
    with tempfile.TemporaryDirectory() as folder:
        model = write_experts(Path(folder) / "model", args.hidden, args.hidden, EXPERTS, TOPK, layers=LAYERS)
        brought.measure("rates", lambda: beside(model, rates_of, args.rounds))
        steps.measure("steps", lambda: beside(model, steps_of, args.rounds))
        for turn in range(args.rounds):
            for source in ("peer", "disk") if turn % 2 else ("disk", "peer"):
                grown.measure(f"{source}, {turn}", functools.partial(grow, model, source, turn))
    return brought.status or steps.status or grown.status


if __name__ == "__main__":
    sys.exit(main())
