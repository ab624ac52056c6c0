"""Every test that needs a GPU, in a few minutes: `make test-gpu`.

    python -m tests.gpu.everything [--nodes 2] [--part I/N] [--out FOLDER] [--stages NAME,...] [--within SECONDS]
                                   [-k NAMES] [-- more for pytest]

Kernels are compiled first, side by side. Then stages of pytest run, those of one wave at once. Left behind are a
summary and the log, by default under docs/results/<date>-<gpu>x<n>/. Exit status 0: everything ran and passed.
With --nodes 2 the ranks of a group act as two hosts, the network between them. `--part 2/3` runs each third
test, where a command may not last as long as all of them.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu import summary

if TYPE_CHECKING:
    from ep_kernels.jit import Variant

ROOT = Path(__file__).resolve().parents[2]
ALL, LAST, FIRST_HALF, SECOND_HALF = "all", "last", "first half", "second half"
NEEDS = "make test-gpu: needs NVIDIA GPUs (one at least; two or more with peer access show most), this machine has none"
GRACE_S = 5.0
"""So long before its deadline a stage begins no other test."""
PARTING_S = 12.0
"""A stage that is interrupted at its deadline has so long to write its report."""
THREADS = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
"""References are computed on processors by many processes at once."""


@dataclass(frozen=True)
class Stage:
    """One run of pytest, or several that share its tests.

    Attributes:
        name: in the summary.
        arguments: what it runs; `-m gpu` is added. "FOLDER?" stands for those files of a folder that name that marker.
        wave: stages of one wave run side by side, waves one after the other.
        devices: which GPUs it sees.
        deadline_s: when it is ended, seconds.
        shards: into how many processes it is divided.
        keyword: pytest's -k; "": all tests.
    """

    name: str
    arguments: tuple[str, ...]
    wave: int
    devices: str
    deadline_s: float
    shards: int = 1
    keyword: str = ""


@dataclass(frozen=True)
class Suite:
    """What one command runs.

    Attributes:
        stages: all of them.
        weights: shares of the time, by wave; what a wave leaves falls to those after it.
        options: for pytest, in each stage.
        suffix: of the folder for results.
    """

    stages: tuple[Stage, ...]
    weights: Mapping[int, float]
    options: tuple[str, ...] = ()
    suffix: str = ""


CONTRACT = ("tests/transports/test_contract.py", "tests/transports/test_contract_faults.py", "tests/transports")
LOOPBACK = (
    "tests/gpu/test_loopback.py",
    "tests/gpu/test_loopback_faults.py",
    "tests/gpu/test_loopback_left_out.py",
    "tests/gpu/test_loopback_collectives.py",
    "tests/gpu/test_loopback_copies.py",
    "tests/gpu/test_loopback_network.py",
    "tests/unit?",
)
COLLECTIVES = (
    "tests/collectives/test_collectives_contract.py",
    "tests/collectives/test_collective_faults.py",
    "tests/collectives/test_collective_fallback.py",
    "tests/collectives/test_collective_training.py",
)
GPUS = ("tests/gpu/test_losses.py", "tests/gpu/test_lives.py", "tests/gpu/test_torchrun.py", "tests/gpu")
SHORT, LONG = "not ten_thousand", "ten_thousand"
"""Ten thousand steps side by side with other groups of ranks take turns on the devices with each of their steps."""
MEMORY_OF_A_GROUP = "test_a_killed_worker_costs_an_epoch_and_nothing_else"
ENDURANCE = ("tests/gpu/test_several_gpus.py", "tests/transports/test_contract_calls.py")
ELSEWHERE = tuple(f"--ignore-glob=*/test_{name}.py" for name in ("loopback*", "compile", "sanitize", "memory"))
ONE_HOST = Suite(
    stages=(
        Stage("contract", CONTRACT, 1, ALL, 300, 4, SHORT),
        # Beside other processes' kernels that wait for their peers a test of half a second took over a minute.
        Stage("loopback", LOOPBACK, 2, ALL, 300, 4),
        Stage("gpus", (*GPUS, *ELSEWHERE), 3, ALL, 240, 4, SHORT),
        Stage("collectives", COLLECTIVES, 4, ALL, 240, 2, SHORT),
        Stage("sanitizer", ("tests/gpu/test_sanitize.py",), 3, LAST, 240),
        Stage("compile", ("tests/gpu/test_compile.py",), 4, SECOND_HALF, 240),
        Stage("services", ("tests/services?",), 4, FIRST_HALF, 240, 1, f"not {MEMORY_OF_A_GROUP}"),
        Stage("endurance", ENDURANCE, 5, ALL, 300, 1, LONG),
        # Alone: they ask how much of a device is free.
        Stage(
            "memory",
            ("tests/gpu/test_memory.py", f"tests/services/test_gpu.py::TestOneGroup::{MEMORY_OF_A_GROUP}"),
            6,
            ALL,
            120,
        ),
    ),
    # As the waves took it on 4 H200: 100, 85, 90, 75, 55 and 38 s. In the last a hundred communicators come and go.
    weights={1: 0.25, 2: 0.2, 3: 0.2, 4: 0.13, 5: 0.12, 6: 0.1},
)
TWO_HOSTS = Suite(
    stages=(
        Stage("contract", ("tests/transports/test_contract.py", "tests/transports"), 1, ALL, 600, 6, SHORT),
        Stage("loopback", ("tests/gpu/test_loopback_network.py",), 2, ALL, 300, 4),
        Stage("gpus", ("tests/gpu/test_several_gpus.py", "tests/gpu/test_domain_over_hosts.py"), 3, ALL, 300, 4, SHORT),
        Stage("endurance", ENDURANCE, 4, ALL, 300, 1, LONG),
    ),
    weights={1: 0.65, 2: 0.12, 3: 0.15, 4: 0.08},
    options=("--over-hosts", "gpus"),
    suffix="-nodes2",
)


def visible_gpus() -> list[str]:
    """The devices that processes started here see."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def share(gpus: Sequence[str], which: str) -> list[str]:
    """The devices of a stage; all of them where there are too few to share."""
    half = len(gpus) // 2
    if which == ALL or half < 2:
        return list(gpus)
    return {LAST: [gpus[-1]], FIRST_HALF: list(gpus[:half]), SECOND_HALF: list(gpus[half:])}[which]


def expanded(arguments: Sequence[str]) -> list[str]:
    """With each "FOLDER?" replaced by its files that have GPU tests: the others need not be imported."""
    found: list[str] = []
    for argument in arguments:
        if not argument.endswith("?"):
            found.append(argument)
            continue
        files = sorted((ROOT / argument[:-1]).glob("test_*.py"))
        found += [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    return found


def _variants() -> Iterator[Variant]:
    """Of groups of one host, and of two."""
    from ep_kernels import jit

    yield from jit.all_variants()
    yield from jit.network_variants()


def compile_one(number: int, arch: str) -> float:
    """Compile variant `number` into the cache; its seconds."""
    from ep_kernels import jit
    from ep_kernels.tuning import cache_dir
    from tests.cases import RoutingCase
    from tests.groups import LonelyGroup

    begin = time.monotonic()
    variant = list(_variants())[number // 2]
    config = RoutingCase(1, 1, 16, (1,)).config(LonelyGroup(), transport="nvlink")
    jit.Compiler(cache_dir(config.kernel_cache_dir)).get(replace(variant, loopback=number % 2 == 1), arch)
    return time.monotonic() - begin


def compile_all(arch: str) -> str:
    """Fill the kernel cache, as itself and for the loop-back harness; a line that says so."""
    begin, count = time.monotonic(), 2 * len(list(_variants()))
    workers = min(48, count, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        spent = sum(pool.map(compile_one, range(count), [arch] * count))
    return f"{count} kernels for {arch} in {time.monotonic() - begin:.0f} s ({spent:.0f} s of {workers} processes)"


def command_of(
    stage: Stage, shard: int, deadline_s: float, folder: Path, more: Sequence[str], part: tuple[int, int] = (1, 1)
) -> list[str]:
    """pytest for one shard of a stage, of `part` (number, of how many) of its tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-m", "gpu", *expanded(stage.arguments)]
    of_all = f"--shard={(part[0] - 1) * stage.shards + shard}/{part[1] * stage.shards}"
    command += ["-p", "tests.gpu.shard", of_all, f"--now={folder / stage.name}-{shard}.now"]
    command += [f"--session-timeout={max(1.0, deadline_s - GRACE_S):.0f}", *more]
    command += ["-k", stage.keyword] * bool(stage.keyword)
    return [*command, f"--junitxml={folder / stage.name}-{shard}.xml", "-o", "junit_family=xunit2"]


def narrowed(stage: Stage, keyword: str) -> Stage:
    """Of its tests, those with these names."""
    return replace(stage, keyword=" and ".join(f"({words})" for words in (stage.keyword, keyword) if words))


def run_wave(
    stages: Sequence[Stage],
    gpus: Sequence[str],
    folder: Path,
    left_s: float,
    more: Sequence[str],
    part: tuple[int, int] = (1, 1),
) -> dict[str, int]:
    """Run stages side by side; each shard leaves <name>-<shard>.xml and .log in `folder`. Exit status by shard."""
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")]))
    begin, running = time.monotonic(), []
    for stage in stages:
        deadline_s = min(stage.deadline_s, left_s)
        for shard in range(1, stage.shards + 1):
            seen = share(gpus, stage.devices)
            turn = (shard - 1) * len(seen) // stage.shards  # small groups of ranks do not all meet on the first GPUs
            devices = ",".join(seen[turn:] + seen[:turn])
            with (folder / f"{stage.name}-{shard}.log").open("w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    command_of(stage, shard, deadline_s, folder, more, part),
                    cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                    env=THREADS | os.environ | {"CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": paths},
                    start_new_session=True,
                )  # fmt: skip
            running.append((f"{stage.name}-{shard}", process, begin + deadline_s))
    return {name: wait_for(process, deadline) for name, process, deadline in running}


def wait_for(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Its exit status; at the deadline it is interrupted, then killed with its ranks."""
    for moment in (deadline, deadline + PARTING_S):
        try:
            return process.wait(max(0.1, moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def default_folder(gpu: str, count: int, suffix: str = "") -> Path:
    """docs/results/<date>-<gpu>x<n><suffix>."""
    name = re.sub("[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "").strip())
    return ROOT / "docs" / "results" / f"{datetime.date.today().isoformat()}-{name}x{count}{suffix}"


def part_of(text: str) -> tuple[int, int]:
    """(2, 3) of "2/3". Raises ValueError for anything else."""
    number, count = (int(word) for word in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="make test-gpu")
    parser.add_argument(
        "--nodes", type=int, choices=(1, 2), default=1, help="as how many hosts the ranks of this machine act"
    )
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="every N-th test, from number I on")
    parser.add_argument("--out", type=Path, help="folder for tests.txt and tests-log.txt")
    parser.add_argument("--stages", help="only these, by name, with commas")
    parser.add_argument("--within", type=float, default=900.0, help="seconds in all; what is not done by then is left")
    parser.add_argument("--commit", help="where the tree has no history of its own")
    parser.add_argument("-k", dest="keyword", default="", help="only tests with these names, as pytest understands it")
    parser.add_argument("more", nargs="*", help="after --: more arguments for pytest")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """See the module's docstring."""
    options = parse(words)
    gpus = visible_gpus()
    if not gpus:
        print(NEEDS, file=sys.stderr)
        return 2
    suite = TWO_HOSTS if options.nodes == 2 else ONE_HOST
    names = options.stages.split(",") if options.stages else [stage.name for stage in suite.stages]
    chosen = [narrowed(stage, options.keyword) for stage in suite.stages if stage.name in names]
    absent = [stage.name for stage in suite.stages if stage.name not in names]
    more = [*suite.options, *options.more]
    facts = summary.environment(len(gpus), options.commit)
    begin = time.monotonic()
    print(compiled := compile_all(facts.arch), flush=True)
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as scratch:
        folder, statuses = Path(scratch), dict[str, int]()
        for wave in sorted({stage.wave for stage in chosen}):
            left_s = options.within - PARTING_S - (time.monotonic() - begin)
            left_s *= suite.weights[wave] / sum(suite.weights[w] for w in {s.wave for s in chosen} if w >= wave)
            together = [stage for stage in chosen if stage.wave == wave]
            done = run_wave(together, gpus, folder, left_s, more, options.part)
            for name in done:
                print(summary.one_line(folder, name), flush=True)
            statuses |= done
        out = options.out or default_folder(facts.gpu, len(gpus), suite.suffix)
        notes = [compiled] + [f"not asked for: {', '.join(absent)}"] * bool(absent)
        notes += ["part {} of {}".format(*options.part)] * (options.part[1] > 1)
        ok = summary.write(out, folder, statuses, facts, notes, time.monotonic() - begin)
    print(f"{'all green' if ok else 'NOT GREEN'}: {out / summary.SUMMARY}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
