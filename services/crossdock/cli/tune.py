"""The command `crossdock tune`; see `cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from crossdock.cli.console import KNOWN, Json, console, show_json

Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="By default every GPU here, or 4.")]
Layouts = Annotated[list[str] | None, typer.Option("--layout", help="Repeatable; by default grouped and flat.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="bfloat16, float16, float32; fp8: sent as fp8; fp8-rows: come as fp8.")
]
Largest = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Largest step; by default 4096, cpu: 512.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Of each step and algorithm; the median counts.")]
Folder = Annotated[
    str | None, typer.Option("--cache-dir", help="`kernel_cache_dir` of the processes that will use it.")
]


def tune(
    transport: Annotated[str, typer.Option("--transport", help=f"auto, {KNOWN}.")] = "auto",
    ranks: Ranks = None,
    num_experts: Annotated[int, typer.Option("--num-experts", help="E.")] = 256,
    hidden_size: Annotated[int, typer.Option("--hidden-size", help="H.")] = 7168,
    topk: Annotated[int, typer.Option("--topk", help="K.")] = 8,
    layout: Layouts = None,
    dtype: Dtype = "bfloat16",
    fp8_combine: Annotated[bool, typer.Option("--fp8-combine", help="Combine moves partials as fp8.")] = False,
    num_sms: Annotated[int | None, typer.Option("--num-sms", min=1, help="Multiprocessors, if AUTO has few.")] = None,
    max_tokens: Largest = None,
    runs: Runs = 15,
    cache_dir: Folder = None,
    as_json: Json = False,
) -> None:
    """Measure LL against HT here, and keep from which step on AUTO is to run HT.

    By itself it starts a process for each rank; under torchrun it is one.
    """
    from crossdock.tune import run
    from crossdock.tune.request import TuneRequest

    transport, num_ranks = run.chosen(transport, ranks)
    request = TuneRequest(
        transport=transport, num_experts=num_experts, hidden_size=hidden_size, topk=topk, dtype=dtype,
        fp8_combine=fp8_combine, num_sms=num_sms, max_tokens=max_tokens or run.largest_step(transport), runs=runs,
        cache_dir=cache_dir, layouts=tuple(layout or run.LAYOUTS),
    )  # fmt: skip
    printer = console()
    records = run.watch(request, num_ranks, printer)
    if records and as_json:
        show_json(run.as_dict(request, records))
    elif records:
        printer.print(run.as_tables(request, records))
