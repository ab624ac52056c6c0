"""Time to resume: how long clients wait when a worker is killed, and when its successor comes; and when experts move.

    python -m benchmarks.resume [--out DIR] [--kills N] [--stops N]        (make bench-resume)

Four workers of this host on the `cpu` transport serve a small random model; one client asks without a pause, and again
where the answer says that the group re-forms. A worker is killed (kill -9), and the supervisor starts it again. Elastic
groups hold two copies of every expert and go on without it; others wait for it. Where there is a spare, one more worker
waits beside the group and takes the lost one's place, which is the next spare when it is back. Experts are moved, too.
In an elastic group a worker also stands still (SIGSTOP) until the others serve without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from benchmarks import facts
from benchmarks.parts import Parts
from benchmarks.service.model import write_experts
from crossdock.client import Client
from crossdock.common import rpc
from crossdock.common.config import ControlConfig, PlacementConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.protocol.v1.control_pb2 import SERVING, ExpertsRequest, GroupView, RebalanceRequest

WORKERS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 16, 4, 256, 16
DEADLINE_S = 300.0
SPARE_ASKS_S = 1.0
"""How often a spare asks for a place, at least."""


@dataclass(frozen=True, slots=True)
class Row:
    """One disturbance.

    Attributes:
        elastic: whether the group goes on without a lost rank.
        spare: whether one more worker waits.
        what: "kill", "stop" or "move".
        typical_ms: median time of a request while nothing happened.
        resume_s: longest request from the disturbance until the group served again (without the lost worker where it is
            elastic).
        whole_s: until all ranks served, or all layers were switched (move).
        taken_in_s: longest request of those begun after that, until the successor was taken in; elastic groups only.
        answered: requests answered from the disturbance until the group was whole.
    """

    elastic: bool
    spare: bool
    what: str
    typical_ms: float
    resume_s: float
    whole_s: float
    taken_in_s: float
    answered: int


class Asking:
    """A client that asks without a pause, and remembers when each request began and what it took."""

    def __init__(self, target: str) -> None:
        self._client, self.took = Client(target), list[tuple[float, float]]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._client.close()

    def longest(self, start: float, end: float, begun_after: float = 0.0) -> float:
        """Of the requests that were under way between the two times; 0 for none."""
        took = [
            (begun, took) for begun, took in list(self.took) if begun + took >= start and begun_after <= begun <= end
        ]
        return max((seconds for _, seconds in took), default=0.0)

    def typical(self) -> float:
        """Median of the last hundred."""
        took = sorted(seconds for _, seconds in self.took[-100:])
        return took[len(took) // 2]

    def _run(self) -> None:
        x, weights = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, TOPK)
        while not self._stop.is_set():
            ids = torch.rand(TOKENS, EXPERTS).pow(3).topk(TOPK).indices
            begun = time.monotonic()
            self._client.forward(0, x, ids, weights, timeout_s=DEADLINE_S)
            self.took.append((begun, time.monotonic() - begun))


class Scene:
    """A group, and what is asked of its control plane."""

    def __init__(self, supervisor: Supervisor, *, elastic: bool, spare: bool) -> None:
        self.supervisor, self.elastic, self.spare = supervisor, elastic, spare

    def view(self) -> GroupView:
        """As it is now."""
        with rpc.channel(self.supervisor.control_address) as channel:
            return current_view(channel, DEADLINE_S)

    def until(self, wanted: Callable[[], bool]) -> float:
        """When `wanted` is true, at last."""
        deadline = time.monotonic() + DEADLINE_S
        while not wanted():
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected another state within {DEADLINE_S:g} s, got {self.view()}")
            time.sleep(0.01)
        return time.monotonic()

    def serves(self, epoch: int, *, whole: bool) -> bool:
        """Whether it serves at a later epoch than this, with all ranks where it is to be `whole`."""
        view = self.view()
        return view.state == SERVING and view.epoch > epoch and not (whole and view.active_ranks)

    def lose(self, what: str, rank: int, asking: Asking) -> Row:
        """Kill a worker, or let it stand still until the others serve without it; then wait until all is as before."""
        self.until(lambda: self.serves(0, whole=True) and self._all_listen())
        time.sleep(2 * SPARE_ASKS_S if self.spare else 0)
        number = next(int(m.worker.uid.removeprefix("w")) for m in self.view().members if m.rank == rank)
        epoch, typical = self.view().epoch, asking.typical()
        begun, asked = time.monotonic(), len(asking.took)
        pid = self.supervisor.worker_pids()[number]
        os.kill(pid, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        resumed = self.until(lambda: self.serves(epoch, whole=False))
        if what == "stop":
            os.kill(pid, signal.SIGCONT)
        whole = self.until(lambda: self.serves(epoch, whole=True))
        time.sleep(1)
        answered = sum(begun <= at <= whole for at, _ in asking.took[asked:])
        taken_in = asking.longest(resumed, whole + 0.5, begun_after=resumed) if self.elastic else 0.0
        waited = asking.longest(begun, resumed)
        return self.row(what, (1e3 * typical, waited, whole - begun, taken_in), answered)

    def move(self, asking: Asking) -> Row:
        """Move experts, and wait until they are there."""
        with rpc.channel(self.supervisor.control_address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)

            def moved() -> bool:
                return str(rpc.call_sync(stub.Experts, ExpertsRequest(), timeout_s=60).last_change).startswith("moved")

            typical, asked, begun = asking.typical(), len(asking.took), time.monotonic()
            started = rpc.call_sync(stub.Rebalance, RebalanceRequest(), timeout_s=60)
            end = self.until(lambda: not started.moves or moved())
        answered = len(asking.took) - asked
        return self.row("move", (1e3 * typical, asking.longest(begun, end), end - begun, 0.0), answered)

    def row(self, what: str, figures: tuple[float, float, float, float], answered: int) -> Row:
        """With figures that are fit to print."""
        typical_ms, resume_s, whole_s, taken_in_s = (round(one, 3) for one in figures)
        return Row(self.elastic, self.spare, what, typical_ms, resume_s, whole_s, taken_in_s, answered)

    def _all_listen(self) -> bool:
        return len(self.supervisor.addresses()) == len(self.supervisor.children)


def measure(folder: Path, losses: Sequence[str], *, elastic: bool, spare: bool) -> Iterator[Row]:
    """All rows of one kind of group; `losses`: "kill" or "stop", one after the other."""
    placement = PlacementConfig(redundant_experts=EXPERTS, min_copies=2) if elastic else PlacementConfig()
    anywhere = "127.0.0.1:0"
    control = ControlConfig(
        listen=anywhere, http_listen=anywhere, world_size=WORKERS, elastic=elastic, placement=placement
    )
    model, number = str(folder / "model"), WORKERS + spare
    workers = [WorkerConfig(model=model, local_rank=i, uid=f"w{i}") for i in range(number)]
    with Supervisor(control, workers, folder / f"logs-{elastic}-{spare}") as supervisor:
        supervisor.wait_serving(DEADLINE_S)
        scene = Scene(supervisor, elastic=elastic, spare=spare)
        with Asking(supervisor.control_address) as asking:
            scene.until(lambda: len(asking.took) > 200)
            if not spare:
                yield scene.move(asking)
            for number, what in enumerate(losses):
                yield scene.lose(what, number % WORKERS, asking)


def main(words: Sequence[str] | None = None) -> int:
    """Measure both kinds; print each row as it is done; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Measure the time to resume.")
    parser.add_argument("--out", type=Path, help="folder for resume.csv and run.json; none: print only")
    parser.add_argument("--commit", help="where the tree has no history of its own")
    parser.add_argument("--kills", type=int, default=3, help="kills per kind of group")
    parser.add_argument(
        "--stops", type=int, default=3, help="of elastic groups without a spare: workers that stand still"
    )
    parser.add_argument("--inner", type=int, default=512, help="I: an expert takes 1.5 KiB times that; there are 32")
    arguments = parser.parse_args(words)
    config: dict[str, object] = {"kills": arguments.kills, "stops": arguments.stops, "inner": arguments.inner}
    about = facts.of_this_run(config, arguments.commit, "benchmarks.resume")
    table = Parts(arguments.out, "resume", Row, lambda: about, partial(print, flush=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_experts(folder / "model", HIDDEN, arguments.inner, EXPERTS, TOPK, layers=2)
        kinds = [(elastic, spare) for elastic in (True, False) for spare in (False, True)]
        kills, stops = ["kill"] * arguments.kills, ["stop"] * arguments.stops
        for elastic, spare in kinds:
            losses = kills + (stops if elastic and not spare else [])
            if losses:
                what = f"elastic {elastic}, spare {spare}"
                table.measure(what, partial(measure, folder, losses, elastic=elastic, spare=spare))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
