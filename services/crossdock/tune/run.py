"""`crossdock tune`: checks the request, runs a process for each rank, shows both curves."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from crossdock.common.transports import automatic, installed, names
from crossdock.tune.measure import Progress
from crossdock.tune.rank import under_torchrun
from crossdock.tune.request import PAYLOADS, OptionError, TuneRequest
from ep_kernels import Layout, transports, tuning
from ep_kernels.groups import PaperGroup
from ep_kernels.transports.base import region_map

LAYOUTS = (Layout.GROUPED.value, Layout.FLAT.value)
"""Layouts of workers, and of vLLM."""
SILENCE_S = 300.0
"""Longest silence of all ranks: they first compile kernels that are not in the wheel."""
_MIB = 1 << 20


def chosen(transport: str, ranks: int | None) -> tuple[str, int]:
    """(transport, ranks): "auto" is one on GPUs where there are two; by default all GPUs, or CPU_RANKS processes."""
    known = ("auto", *names())
    if transport not in known:
        raise OptionError(f"--transport: expected one of {', '.join(known)}, got {transport!r}")
    num_gpus = torch.cuda.device_count()
    facts = automatic(num_gpus) if transport == "auto" else installed()[transport]
    num_ranks = facts.default_world(num_gpus) if ranks is None else ranks
    if facts.needs_gpu and not num_gpus:
        raise OptionError(f"--transport {facts.name}: expected a CUDA device for each rank, got none")
    if num_ranks > facts.max_ranks:
        wanted = f"at most {facts.max_ranks}, the most ranks of transport {facts.name}"
        raise OptionError(f"--ranks: expected {wanted}, got {num_ranks}")
    if facts.needs_gpu and not 1 <= num_ranks <= num_gpus:
        raise OptionError(f"--ranks: expected a GPU for each rank, got {num_ranks} ranks and {num_gpus} GPUs")
    return facts.name, num_ranks


def largest_step(transport: str) -> int:
    """Default of the largest step of the ladder."""
    return installed()[transport].largest_step


def check(request: TuneRequest, num_ranks: int) -> None:
    """Raise OptionError or ConfigError for a request that no rank could measure."""
    if request.dtype not in PAYLOADS:
        raise OptionError(f"--dtype: expected one of {', '.join(PAYLOADS)}, got {request.dtype!r}")
    known = [layout.value for layout in Layout]
    for layout in request.layouts:
        if layout not in known:
            raise OptionError(f"--layout: expected one of {', '.join(known)}, got {layout!r}")
        request.config(layout, PaperGroup(0, num_ranks))


def tune(request: TuneRequest, num_ranks: int, progress: Progress) -> list[tuning.Record]:
    """Measure, and write down what was found. Under torchrun this process is one of its ranks, of which rank 0 has the
    records; else there is a process for each rank. Raises what `check` raises; EpError or RuntimeError where it fails.
    """
    check(request, num_ranks)
    if torch.distributed.is_torchelastic_launched():
        rank, records = under_torchrun(request, progress)
        return records if rank == 0 else []
    return run_ranks(request, num_ranks, progress)


def watch(request: TuneRequest, num_ranks: int, console: Console) -> list[tuning.Record]:
    """`tune`, with the step that was measured last on the console."""
    with console.status("starting") as status:

        def progress(layout: str, tokens: int, ll_us: float, ht_us: float) -> None:
            status.update(f"{layout}, {tokens} tokens: LL {ll_us:,.0f} us, HT {ht_us:,.0f} us")

        return tune(request, num_ranks, progress)


def run_ranks(request: TuneRequest, num_ranks: int, progress: Progress) -> list[tuning.Record]:
    """The records of ranks that are processes of this host. Raises RuntimeError naming the rank that failed."""
    with tempfile.TemporaryDirectory(prefix="crossdock-tune-") as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(num_ranks)]
        command = [sys.executable, "-P", "-m", "crossdock.tune.rank", msgspec.json.encode(request).decode()]
        processes = []
        try:
            for rank, log in enumerate(logs):
                place = [str(rank), str(num_ranks), str(Path(folder) / "store")]
                with log.open("wb") as errors:
                    processes.append(subprocess.Popen([*command, *place], stdout=subprocess.PIPE, stderr=errors))
            return _follow(processes, logs, progress)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _follow(
    processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], progress: Progress
) -> list[tuning.Record]:
    """Read the output of the ranks until all are done."""
    said: queue.Queue[tuple[int, bytes]] = queue.Queue()
    for rank, process in enumerate(processes):
        threading.Thread(target=_listen, args=(rank, process, said), daemon=True).start()
    records: dict[int, list[tuning.Record]] = {}
    while len(records) < len(processes):
        try:
            rank, line = said.get(timeout=SILENCE_S)
        except queue.Empty:
            raise RuntimeError(f"expected figures of {len(processes)} ranks, got no word in {SILENCE_S:g} s") from None
        if not line and rank not in records:
            words = logs[rank].read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"rank {rank}: {words[0] if words else f'exit status {processes[rank].wait()}'}")
        if not line.startswith(b"{"):
            continue
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "failed" in answer:
            raise RuntimeError(f"rank {rank}: {answer['failed']}")
        if "records" in answer:
            records[rank] = msgspec.convert(answer["records"], list[tuning.Record])
        else:
            progress(answer["layout"], answer["tokens"], answer["ll_us"], answer["ht_us"])
    return records[0]


def _listen(rank: int, process: subprocess.Popen[bytes], said: queue.Queue[tuple[int, bytes]]) -> None:
    """Pass on each line; b"" at the end."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            said.put((rank, line))
    said.put((rank, b""))


# How it is shown.


def file_of(request: TuneRequest) -> Path | None:
    """File of the records; None: they are not saved."""
    folder = tuning.cache_dir(request.cache_dir)
    return None if folder is None else folder / tuning.FILE_NAME


def as_dict(request: TuneRequest, records: Sequence[tuning.Record]) -> dict[str, Any]:
    path = file_of(request)
    return {"file": str(path) if path else None, "records": msgspec.to_builtins(records)}


def as_tables(request: TuneRequest, records: Sequence[tuning.Record]) -> Group:
    """A table for each layout with what follows from it, and where that was written."""
    path = file_of(request)
    kept = f"written to {path}" if path else "written nowhere: this user has no home directory; see --cache-dir"
    parts: list[Table | Text] = []
    for record in records:
        parts += [Text(_headline(record.key)), _table(record), Text(_verdict(request, record), style="bold"), Text()]
    return Group(*parts, Text(kept, style="dim"))


def _headline(key: tuning.Key) -> str:
    rows = f"{key.dtype} sent as fp8" if key.quantize else key.dtype
    return (
        f"{key.layout}: {key.num_ranks} ranks on {key.device}, rows of {key.hidden_size} x {rows}, combine "
        f"in {key.combine_dtype}, top {key.topk} of {key.num_experts} experts"
    )


def _table(record: tuning.Record) -> Table:
    table = Table()
    for name in ("tokens per rank", "LL us", "HT us", "LL against HT"):
        table.add_column(name, justify="right")
    table.add_column("AUTO runs")
    for tokens, *times in zip(record.tokens, record.ll_us, record.ht_us, strict=True):
        shown = [Text(f"{us:,.1f}", style="bold" if us == min(times) else "") for us in times]
        runs = "LL" if tokens <= record.ll_max_tokens else "HT"
        table.add_row(f"{tokens:,}", *shown, f"{times[0] / times[1] - 1:+.1%}", runs)
    return table


def _verdict(request: TuneRequest, record: tuning.Record) -> str:
    chosen, built_in = record.ll_max_tokens, built_in_crossover(request, record)
    words = f"{record.key.layout}: AUTO runs LL up to {chosen:,} tokens per rank (built in: {built_in:,})"
    if chosen == record.tokens[-1]:
        words += "; LL was ahead to the end: --max-tokens measures larger steps"
    now, before = (_region_mib(request, record, most) for most in (chosen, built_in))
    if now and before:
        words += f"; regions of {request.max_tokens:,} tokens then take {now:,.0f} MiB on each GPU ({before:,.0f})"
    return words


def built_in_crossover(request: TuneRequest, record: tuning.Record) -> int:
    """AUTO's crossover where nothing was measured."""
    transport = transports.create(request.config(record.key.layout, PaperGroup(0, record.key.num_ranks)))
    try:
        return transport.ll_max_tokens()
    finally:
        transport.close()


def _region_mib(request: TuneRequest, record: tuning.Record, ll_max_tokens: int) -> float | None:
    config = request.config(record.key.layout, PaperGroup(0, record.key.num_ranks))
    sized = msgspec.structs.replace(config, max_tokens_per_rank=request.max_tokens, ll_max_tokens=ll_max_tokens)
    found = region_map(sized)
    return None if found is None else found.num_bytes / _MIB
