"""Programs of `benchmarks/gpu` as the ranks of a group, on pretended GPUs, with cases so small that nothing takes long.

Each function is run by `World.run`, and returns the program's exit status and what it printed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import cases, network
from benchmarks import run as program
from benchmarks.gpu import crossdock, floor, layer, measure, nodes, nodes_network, overlap, run, tables
from ep_kernels import Mode, MoEConfig, jit
from ep_kernels.collectives import CollectiveConfig
from ep_kernels.transports.nvlink.network import boxes
from tests.emulator.cuda import Graph, pretended

FEW = {"SETS": 2, "PAIRS": 1, "WARMUP": 1, "NODES": 2, "PER_GRAPH": 2, "FLUSH_BYTES": 1 << 10}
"""Repetitions, by the names that modules have them under."""
HIDDEN, EXPERTS = 256, 16
Ended = tuple[int, str]


def few(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Few repetitions in each; graphs that run anew."""
    for module in modules:
        for name, value in {**FEW, "captured": Graph}.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)


def on_processors(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """What these modules configure for GPUs is of the transport `cpu`."""
    for module in modules:
        for name, kind in (("MoEConfig", MoEConfig), ("CollectiveConfig", CollectiveConfig)):
            if hasattr(module, name):
                patch.setattr(module, name, lambda kind=kind, **given: kind(**{**given, "transport": "cpu"}))


@contextlib.contextmanager
def small(rank: int, size: int, store: Any) -> Iterator[tuple[pytest.MonkeyPatch, io.StringIO]]:
    """A pretended GPU and small loops; what is printed."""
    printed = io.StringIO()
    with pretended(rank, size, store) as patch, contextlib.redirect_stdout(printed):
        few(patch, measure, overlap, layer, floor)
        on_processors(patch, crossdock)
        yield patch, printed


def of_case(case: cases.Case) -> cases.Case:
    """The same with few tokens and experts."""
    return replace(case, tokens=min(8, case.tokens), hidden=HIDDEN, experts=EXPERTS, topk=4)


def first_of(table: Callable[..., Any]) -> Callable[..., Iterator[tables.Measured]]:
    """The first line of a table."""

    def lines(ranks: int, extent: str) -> Iterator[tables.Measured]:
        for measured in islice(table(ranks, extent), 1):
            yield replace(measured, case=of_case(measured.case))

    return lines


def moe(rank: int, size: int, store: Any, words: list[str]) -> Ended:
    """`benchmarks.run --device cuda`."""
    with small(rank, size, store) as (patch, printed):
        patch.setattr(jit, "NUM_THREADS", 32)  # of the kernels of the floor
        patch.setattr(run, "QUICK_ITERATIONS", 2)
        patch.setattr(overlap, "GEMM", (8, 16, 8))
        patch.setattr(layer, "LAYER_SHAPES", {(HIDDEN, EXPERTS): 32})
        patch.setattr(run.Session, "_picture", lambda self: None)  # tests/unit/test_bench.py draws
        for name, table in tables.TABLES.items():
            patch.setitem(tables.TABLES, name, first_of(table))
        return program.main(["--device", "cuda", "--quick", *words]), printed.getvalue()


def hosts(rank: int, size: int, store: Any, words: list[str], harm: bool = False) -> Ended:
    """`benchmarks.gpu.nodes`. harm: results of HT are wrong on the last rank."""
    with small(rank, size, store) as (patch, printed):
        few(patch, nodes)
        for name, value in {"STREAM_ROUNDS": 2, "LEAST_BYTES": 1 << 16}.items():
            patch.setattr(nodes_network, name, value)
        for name, value in {"SMALL_MESSAGES": 20, "IDLE_S": 0.01}.items():
            patch.setattr(nodes, name, value)
        patch.setattr(nodes, "iterations_of", lambda case, most: 2)
        patch.setattr(nodes, "Case", lambda *given, **fields: of_case(cases.Case(*given, **fields)))
        ring = network.ring
        patch.setattr(network, "ring", lambda rounds: ring(rounds // 100))
        patch.setattr(network, "messages", lambda rounds: [])
        for name in ("pin", "unpin"):
            patch.setattr(boxes, name, lambda *_: None)
        if harm and rank == size - 1:
            verify = measure.Bench.verify

            def harmed(self: measure.Bench, out: torch.Tensor, *rest: Any, **how: Any) -> None:
                verify(self, out + (self.case.mode is Mode.HT), *rest, **how)

            patch.setattr(measure.Bench, "verify", harmed)
        return nodes.main(["--nodes", "2", *words]), printed.getvalue()


def collectives(rank: int, size: int, store: Any, words: list[str], harm: bool = False) -> Ended:
    """`benchmarks.gpu.collective_tables`, a few cases of each kind. harm: our sums are wrong on the last rank."""
    from benchmarks.gpu import (
        collective_backends,
        collective_cases,
        collective_products,
        collective_steps,
        collective_tables,
        fsdp,
    )  # fmt: skip

    with small(rank, size, store) as (patch, printed):
        few(patch, collective_tables)
        on_processors(patch, collective_backends, collective_products)
        shrunk = {
            "MIB": 1 << 12, "REDUCE_BYTES": (1 << 10, 1 << 14), "SHAPES": ((16, 32),), "ROWS": (8,), "SQUARE": 16,
        }  # fmt: skip
        for name, value in shrunk.items():
            patch.setattr(collective_cases, name, value)
        few_cases = collective_cases.cases
        patch.setattr(collective_tables, "cases", lambda ranks, quick: few_cases(ranks, quick=True))
        patch.setattr(collective_tables, "kernels_of", lambda run: 1)
        for module in (collective_backends, collective_products):
            patch.setattr(module, "nccl_group", lambda *_: dist.group.WORLD)
        window = SimpleNamespace(
            mem_allocator=None, register_mem_pool=lambda pool, symm: None, deregister_mem_pool=lambda pool: None
        )
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: window)
        patch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
        patch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
        trained = fsdp.Trained([2.0, 3.0], 0.5, [7.0, 6.0])  # tests/collectives trains
        patch.setattr(fsdp, "gathering", lambda name, shape: fsdp.Gathering(name, None, 0, 0, lambda: None))
        patch.setattr(fsdp, "in_turns", lambda gathers, *_: {used.name: [trained] * 2 for used in gathers})
        patch.setattr(fsdp, "trained", lambda *_: trained)
        patch.setattr(collective_steps, "BATCHES", (1,))
        if harm and rank == size - 1:
            patch.setattr(collective_tables, "_term", lambda case, *_: torch.zeros(case.shape_in(size)))
        return collective_tables.main(words), printed.getvalue()


@contextlib.contextmanager
def joining(rank: int, size: int, store: Any) -> Iterator[tuple[pytest.MonkeyPatch, io.StringIO]]:
    """A program that begins a process group of its own begins this one; what is printed."""
    begin, printed = dist.init_process_group, io.StringIO()

    def joined(*kind: Any, **how: Any) -> None:
        begin(*kind, store=store, rank=rank, world_size=size, **how)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(dist, "init_process_group", joined)
        yield patch, printed


def training(rank: int, size: int, store: Any, words: list[str]) -> Ended:
    """`benchmarks.gpu.fsdp`, which knows machines without a GPU; tests/collectives trains."""
    from benchmarks.gpu import fsdp

    with joining(rank, size, store) as (patch, printed):
        patch.setattr(fsdp, "trained", lambda gather, shape, steps, *_: fsdp.Trained([2.0], 0.5, [7.0] * steps))
        return fsdp.main(words), printed.getvalue()


def zero(rank: int, size: int, store: Any, words: list[str], last: float) -> Ended:
    """`benchmarks.gpu.zero`, without DeepSpeed, which tests/deepspeed runs. last: the last loss with our gathers."""
    from benchmarks.gpu import fsdp
    from benchmarks.gpu import zero as steps

    with joining(rank, size, store) as (patch, printed):
        stand_in: Any = SimpleNamespace(init_distributed=lambda *_, **__: None, __version__="0")
        patch.setitem(sys.modules, "deepspeed", stand_in)
        found = fsdp.Trained([2.0], 0.5, [7.0, last])
        patch.setattr(steps, "in_turns", lambda names, *_: dict.fromkeys(names, found))
        patch.setattr(steps, "alone", lambda *_: [7.0, 6.0])
        return steps.main(words), printed.getvalue()
