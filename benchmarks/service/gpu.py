"""Quantised experts in a worker process on one GPU: fp8 as stored beside bf16, served one after the other.

    python -m benchmarks.service.gpu [--out DIR] [--commit HASH] [--seconds S] [--experts 32]

The shape is a DeepSeek-V3 rank's of 8: 32 experts of 7168 x 2048, eight of them for each token. Clients of this host
call `forward` in closed loop. `experts_ms` is the mean time of a step's experts by the GPU's clock, from the worker's
metrics, and `expert_rows_per_s` the rows of a step over it; `rows_per_s` is what clients get: tokens, through two
copies over PCIe and the clients' own. `ratio` is that of `expert_rows_per_s` to bf16's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import facts
from benchmarks.parts import Parts
from benchmarks.service.counters import Counters
from benchmarks.service.load import Job, LoadProcesses, Sizes
from benchmarks.service.model import write_experts
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.host.supervisor import Supervisor

HIDDEN, INNER, TOPK = 7168, 2048, 8
MOST_TOKENS, QUEUED_BYTES, FORM_S = 2048, 1 << 30, 180.0
CASES = ((1, 32), (1, 64), (1, 128), (16, 512))
"""Clients, tokens of a call: 256, 512, 1024 rows in a step, and up to 16,384."""
PROCESSES = 8
"""Of the clients: two could not fill such steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; see the head of this page. `step_tokens`: mean tokens of a step."""

    format: str
    clients: int
    tokens: int
    step_tokens: float
    dispatch_ms: float
    experts_ms: float
    combine_ms: float
    expert_rows_per_s: int
    ratio: float
    p50_ms: float
    rows_per_s: int


def serve(format: str, folder: Path, experts: int, load: LoadProcesses, seconds: float) -> Iterator[Row]:
    """All cases of one format, without the ratio."""
    model = write_experts(folder / format, HIDDEN, INNER, experts, TOPK, fp8=format == "fp8")
    anywhere = "127.0.0.1:0"
    control = ControlConfig(listen=anywhere, http_listen=anywhere, world_size=1)
    worker = WorkerConfig(
        model=str(model), transport="nvlink", max_tokens_per_step=MOST_TOKENS, max_queued_bytes=QUEUED_BYTES,
        max_queued_bytes_per_client=QUEUED_BYTES,
    )  # fmt: skip
    with Supervisor(control, [worker], folder / f"{format}-logs") as supervisor:
        pages = [member.http_address for member in supervisor.wait_serving(FORM_S).members]
        for clients, tokens in CASES:
            job = Job(supervisor.control_address, Sizes(HIDDEN, experts, TOPK), tokens, 0, clients, seconds)
            load.run(job)  # compiles, connects
            before = Counters(pages)
            got = load.run(job)
            parts = Counters(pages).means_since(before)
            per_s = round(1e3 * parts["tokens"] * TOPK / parts["experts"])
            p50, rate = 1e3 * statistics.median(got.took), round(tokens * len(got.took) / got.elapsed)
            dispatch, mlps, combine = (round(parts[name], 4) for name in ("dispatch", "experts", "combine"))
            mean = round(parts["tokens"], 1)
            yield Row(format, clients, tokens, mean, dispatch, mlps, combine, per_s, 1.0, round(p50, 3), rate)


def main(words: Sequence[str] | None = None) -> int:
    """Measure; print each row as it is done; 1 where a format failed."""
    parser = argparse.ArgumentParser(description="Measure a worker process with fp8 experts on one GPU.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree has no history of its own")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--experts", type=int, default=32)
    arguments = parser.parse_args(words)
    config: dict[str, object] = {"seconds": arguments.seconds, "experts": arguments.experts}
    about = facts.of_this_run(config, arguments.commit, "benchmarks.service.gpu") | facts.of_gpus(1)
    table = Parts(arguments.out, "service_gpu", Row, lambda: about, _show)
    with tempfile.TemporaryDirectory() as name, LoadProcesses(PROCESSES) as load:

        def of_format(format: str) -> Iterator[Row]:
            plain = {(row.clients, row.tokens): row for row in table.rows}  # bf16 is first
            for row in serve(format, Path(name), arguments.experts, load, arguments.seconds):
                base = row if format == "bf16" else plain[row.clients, row.tokens]
                yield replace(row, ratio=round(row.expert_rows_per_s / base.expert_rows_per_s, 3))

        for format in ("bf16", "fp8"):
            table.measure(format, partial(of_format, format))
    return table.status


def _show(row: Row) -> None:
    print("  ".join(f"{name} {value}" for name, value in asdict(row).items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
