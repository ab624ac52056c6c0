"""The expert service beside its experts: what a call costs, and where its time goes.

    python -m benchmarks.service [--out DIR] [--seconds S] [--shapes model,path]        (make bench-service)

Two workers of this host on the `cpu` transport serve a generated model; processes of clients call `forward` in closed
and open loop (`load.py`). Beside them, in the same run: the same experts in one process, a bare gRPC echo of the same
bytes, and tokens per second of a `transformers` model with its own experts and through `attach`. Two shapes: `model`
has experts that cost something, `path` wide rows and experts that cost nearly nothing, so that the way to them is what
is measured. Where the time goes is from the workers' own metrics: means of a request. With `far` among `--paths`, the
group and an echo are also put into another network namespace, behind a pair of virtual devices, and reached by frames
over TCP and by gRPC. `unix` is what clients of a worker's host do (with shared memory), `tcp` frames over TCP on one
host, `tls` the same of a group that certificates guard, one client, and `grpc` a client that has nothing of ours but
the messages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import facts
from benchmarks.parts import Parts
from benchmarks.service.beside import EchoProcess, InProcess, tokens_per_s
from benchmarks.service.control import ControlProcess
from benchmarks.service.counters import PHASES, Counters
from benchmarks.service.goals import Goal, goals_of
from benchmarks.service.load import Job, LoadProcesses, Measured, Sizes, Way
from benchmarks.service.model import write_experts
from benchmarks.service.rolling import load_checkpoint
from benchmarks.service.rows import Row
from crossdock.cli import certs
from crossdock.common.config import WorkerConfig
from crossdock.common.security import load_security
from crossdock.common.settings import SecurityConfig
from crossdock.demo.hosts import HostPlace, become, namespaces
from crossdock.host.supervisor import Supervisor, usable_cpus

WORKERS, LAYER, PROCESSES = 2, 0, 2
SHAPES = {"model": (Sizes(1024, 64, 8), 512), "path": (Sizes(7168, 8, 2), 16)}
"""Of the calls, and I."""
TOKENS, CLIENTS = (1, 128, 1024), (1, 64)
"""By default: ten minutes on two cores."""
FOREIGN_CLIENTS = 24
"""By gRPC: the most streams of one host that a worker reads."""
OPEN_SHARE = 0.6
"""Rate of the open loop, of what the closed loop has reached."""
FORM_S = 120.0
Places = tuple[HostPlace, HostPlace]
INSIDE = "--inside"
WAYS: dict[str, Way] = {
    "unix": "auto", "tcp": "tcp", "tls": "tcp", "grpc": "grpc", "far tcp": "auto", "far grpc": "grpc",
}  # fmt: skip
"""Of the clients, by path."""
ROLLING_CLIENTS, ROLLING_TOKENS, ROLLING_S = 4, 8, 5.0


class Bench:
    """All cases of one shape."""

    def __init__(
        self, shape: str, folder: Path, load: LoadProcesses, places: Places | None, arguments: argparse.Namespace
    ) -> None:
        self.shape, self._folder, self._load, self._arguments = shape, folder / shape, load, arguments
        self._places = places
        self.sizes = SHAPES[shape][0]
        self._folder.mkdir()
        self.model = self._write("model", seed=0)

    def _write(self, name: str, seed: int) -> Path:
        """A whole model where one is to be attached; else its experts alone, which needs no transformers."""
        sizes, inner = SHAPES[self.shape]
        if not (self.shape == "model" and self._arguments.attach):
            hidden, experts, topk = sizes.hidden, sizes.experts, sizes.topk
            return write_experts(self._folder / name, hidden, inner, experts, topk, layers=2, seed=seed)
        from crossdock.demo.models import write_checkpoint

        return write_checkpoint(
            "qwen3_moe", self._folder / name, dtype=torch.bfloat16, num_layers=2, hidden_size=sizes.hidden,
            intermediate_size=inner, num_experts=sizes.experts, topk=sizes.topk, seed=seed,
        )  # fmt: skip

    def rows(self) -> Iterator[Row]:
        """As they are measured."""
        seconds = self._arguments.seconds
        if "in-process" in self._arguments.paths:
            yield from self._in_process(seconds)
        if "echo" in self._arguments.paths:
            yield from self._echo("echo", EchoProcess(), seconds)
        paths = [path for path in ("unix", "tcp", "grpc", "rolling") if path in self._arguments.paths.split(",")]
        if paths:
            with self._group("127.0.0.1", HostPlace("127.0.0.1")) as target:
                for path in paths:
                    yield from self._rolling(target) if path == "rolling" else self._service(path, target, seconds)
        if "tls" in self._arguments.paths and self.shape == "path":
            yield from self._guarded(seconds)
        if self._places is not None:
            here, there = self._places
            yield from self._echo("far echo", EchoProcess(there.address, there.namespace), seconds)
            with self._group(here.address, there) as target:
                for path in ("far tcp", "far grpc"):
                    yield from self._service(path, target, seconds)

    @contextlib.contextmanager
    def _group(self, here: str, there: HostPlace, security: SecurityConfig = SecurityConfig()) -> Iterator[str]:
        """A control plane at an address of this host, and workers at a place; its address."""
        anywhere = f"{there.address}:0"
        with ControlProcess(WORKERS, here, security) as control:
            workers = [
                WorkerConfig(
                    model=str(self.model), control=control.address, local_rank=i, uid=f"w{i}", listen=anywhere,
                    http_listen=anywhere, security=security,
                )
                for i in range(WORKERS)
            ]  # fmt: skip
            logs = self._folder / f"logs-{control.address}"
            with Supervisor(None, workers, logs, enter=there.enter) as supervisor:
                self._pages = [member.http_address for member in supervisor.wait_serving(FORM_S).members]
                yield control.address

    def _in_process(self, seconds: float) -> Iterator[Row]:
        experts = InProcess(self.model)
        for threads in (1, usable_cpus()):
            torch.set_num_threads(threads)
            for tokens in self._arguments.tokens:
                took = experts.measure(self.sizes, LAYER, tokens, seconds / 2)
                case = Job("", self.sizes, tokens, LAYER, 1, 0)
                yield self._row(f"in-process, threads={threads}", "", case, Measured(took, sum(took)))

    def _echo(self, path: str, process: EchoProcess, seconds: float) -> Iterator[Row]:
        with process as echo:
            for tokens in self._arguments.tokens:
                for clients in self._arguments.clients:
                    job = Job(echo.address, self.sizes, tokens, LAYER, clients, seconds / 2, echo=True)
                    yield self._row(path, "closed", job, self._load.run(job))

    def _service(self, path: str, target: str, seconds: float) -> Iterator[Row]:
        for tokens in self._arguments.tokens:
            for clients in self._arguments.clients:
                job = Job(target, self.sizes, tokens, LAYER, clients, seconds, way=WAYS[path])
                is_foreign = job.way == "grpc"
                if is_foreign and clients > FOREIGN_CLIENTS:
                    continue
                closed = self._measured(path, job)
                yield closed
                if self._arguments.open and not is_foreign:
                    rate = OPEN_SHARE * closed.rows_per_s / tokens
                    yield self._measured(path, replace(job, rate=rate))
        if self.shape == "model" and self._arguments.attach and path == "unix":
            own, attached = tokens_per_s(self.model, target)
            yield Row(self.shape, "own experts, tokens/s", "", 1, 0, 0, 0, round(own, 1))
            yield Row(self.shape, f"attached by {path}, tokens/s", "", 1, 0, 0, 0, round(attached, 1))

    def _guarded(self, seconds: float) -> Iterator[Row]:
        """One client over TCP, behind the certificates that `crossdock certs` makes."""
        certs.make_all(self._folder / "certs")
        host = load_security(self._folder / "certs" / "host.yaml")
        with self._group("127.0.0.1", HostPlace("127.0.0.1"), host) as target:
            for tokens in self._arguments.tokens:
                job = Job(target, self.sizes, tokens, LAYER, 1, seconds, way=WAYS["tls"])
                yield self._measured("tls", replace(job, security=str(self._folder / "certs" / "client.yaml")))

    def _rolling(self, target: str) -> Iterator[Row]:
        """Calls while nothing happens, and while all layers get the weights of another checkpoint."""
        other = self._write("other", seed=1)
        for path, begin in (("rolling: before", None), ("rolling: during", lambda: load_checkpoint(target, other))):
            job = Job(target, self.sizes, ROLLING_TOKENS, LAYER, ROLLING_CLIENTS, ROLLING_S)
            with ThreadPoolExecutor(1) as thread:
                done = thread.submit(begin) if begin is not None else None
                row = self._measured(path, job)
                if done is not None:
                    print(f"all layers have the other checkpoint after {done.result():.2f} s", flush=True)
            yield row

    def _measured(self, path: str, job: Job) -> Row:
        before = Counters(self._pages)
        got = self._load.run(job)
        parts = Counters(self._pages).means_since(before)
        row = self._row(path, "open" if job.rate else "closed", job, got)
        rest = parts["request"] - sum(parts[phase] for phase in PHASES)
        outside = 1e3 * statistics.fmean(got.took) - parts["request"]
        queue, dispatch, experts, combine = (round(parts[phase], 3) for phase in PHASES)
        return replace(
            row,
            queue_ms=queue,
            dispatch_ms=dispatch,
            experts_ms=experts,
            combine_ms=combine,
            agree_ms=round(rest, 3),
            outside_ms=round(outside, 3),
        )

    def _row(self, path: str, loop: str, job: Job, got: Measured) -> Row:
        ordered = sorted(1e3 * seconds for seconds in got.took)
        p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
        rows_per_s = job.tokens * len(ordered) / got.elapsed
        return Row(self.shape, path, loop, job.clients, job.tokens, round(p50, 3), round(p99, 3), round(rows_per_s, 1))


def numbers(text: str) -> tuple[int, ...]:
    """Of "1,8"."""
    return tuple(map(int, text.split(",")))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the expert service beside its experts.")
    parser.add_argument("--out", type=Path, help="folder for service.csv and run.json; none: print only")
    parser.add_argument("--commit", help="where the tree has no history of its own")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each case")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--paths", default="in-process,echo,unix,tcp,tls,grpc,rolling,far")
    parser.add_argument("--tokens", type=numbers, default=TOKENS)
    parser.add_argument("--clients", type=numbers, default=CLIENTS)
    parser.add_argument("--open", type=int, default=1, help="0: no open loop")
    parser.add_argument("--attach", type=int, default=1, help="0: no tokens/s through attach")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@contextlib.contextmanager
def two_hosts(arguments: argparse.Namespace) -> Iterator[Places | None]:
    """This host and one beyond a network; None: not selected, or impossible here; the reason is printed."""
    if "far" not in arguments.paths:
        yield None
    elif arguments.inside:
        with namespaces() as places:
            yield places
    else:
        print(f"no other host: {become([*sys.argv[1:], INSIDE], 'benchmarks.service')}")
        yield None


def main(words: Sequence[str] | None = None) -> int:
    """Measure; print each row as it is done; 1 where a shape failed, whose rows until then are kept."""
    arguments = parsed(sys.argv[1:] if words is None else words)
    config: dict[str, object] = {"seconds": arguments.seconds, "load_before": round(os.getloadavg()[0], 2)}
    about = facts.of_this_run(config, arguments.commit, "benchmarks.service")
    table = Parts(arguments.out, "service", Row, lambda: about, _show)
    with (
        two_hosts(arguments) as places,
        tempfile.TemporaryDirectory() as folder,
        LoadProcesses(PROCESSES) as load,
    ):

        def of_shape(shape: str) -> Iterator[Row]:
            yield from Bench(shape, Path(folder), load, places, arguments).rows()

        print("  ".join(field.name for field in fields(Row)))
        for shape in arguments.shapes.split(","):
            table.measure(shape, partial(of_shape, shape))
    goals = goals_of(table.rows)
    for goal in goals:
        print("  ".join(f"{name} {value}" for name, value in asdict(goal).items()), flush=True)
    if arguments.out:
        facts.write_table(arguments.out, "goals", [field.name for field in fields(Goal)], map(asdict, goals))
    return table.status


def _show(row: Row) -> None:
    print("  ".join("" if cell is None else str(cell) for cell in asdict(row).values()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
