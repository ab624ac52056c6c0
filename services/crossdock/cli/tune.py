"""The command `crossdock tune`; see `cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from crossdock.cli.console import KNOWN, Json, console, show_json

Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="By default one per GPU of this host, or 4.")]
Layouts = Annotated[list[str] | None, typer.Option("--layout", help="Repeatable; by default grouped and flat.")]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="bfloat16, float16, float32; fp8: dispatch quantises; fp8-rows: x is fp8."),
]
Largest = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Largest T; by default 4096, on cpu 512.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Runs of each size and algorithm; their median is taken.")]
Folder = Annotated[
    str | None, typer.Option("--cache-dir", help="Where to save: `kernel_cache_dir` of the processes that read it.")
]


def tune(
    transport: Annotated[str, typer.Option("--transport", help=f"auto, {KNOWN}.")] = "auto",
    ranks: Ranks = None,
    num_experts: Annotated[int, typer.Option("--num-experts", help="Experts of a layer (E).")] = 256,
    hidden_size: Annotated[int, typer.Option("--hidden-size", help="Hidden size (H).")] = 7168,
    topk: Annotated[int, typer.Option("--topk", help="Experts per token (K).")] = 8,
    layout: Layouts = None,
    dtype: Dtype = "bfloat16",
    fp8_combine: Annotated[bool, typer.Option("--fp8-combine", help="Combine sends fp8.")] = False,
    num_sms: Annotated[int | None, typer.Option("--num-sms", min=1, help="SMs that one operation may use.")] = None,
    dispatch_sms: Annotated[int | None, typer.Option("--dispatch-sms", min=1, help="Those of dispatch alone.")] = None,
    combine_sms: Annotated[int | None, typer.Option("--combine-sms", min=1, help="Those of combine alone.")] = None,
    max_tokens: Largest = None,
    runs: Runs = 15,
    cache_dir: Folder = None,
    as_json: Json = False,
) -> None:
    """Measure LL and HT on this host, and save which of them AUTO runs for how many tokens.

    It starts a process for each rank; under torchrun it runs as one of them.
    """
    from crossdock.tune import run
    from crossdock.tune.request import TuneRequest

    transport, num_ranks = run.chosen(transport, ranks)
    request = TuneRequest(
        transport=transport, num_experts=num_experts, hidden_size=hidden_size, topk=topk, dtype=dtype,
        fp8_combine=fp8_combine, num_sms=num_sms, dispatch_sms=dispatch_sms, combine_sms=combine_sms,
        max_tokens=max_tokens or run.largest_step(transport), runs=runs, cache_dir=cache_dir,
        layouts=tuple(layout or run.LAYOUTS),
    )  # fmt: skip
    printer = console()
    records = run.watch(request, num_ranks, printer)
    if records and as_json:
        show_json(run.as_dict(request, records))
    elif records:
        printer.print(run.as_tables(request, records))
