"""Crossdock under plain torchrun: no services, no control plane, the process group of torch as bootstrap.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.gpu.torchrun_steps --transport nvlink

Each rank compares every step with the reference, bit for bit; rank 0 prints one line per part.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_kernels import MoECommunicator, TorchGroup
from ep_kernels.types import Layout, Mode, Overflow
from tests.cases import KINDS, RoutingCase
from tests.transports.steps import check_step, next_case

Part = Callable[[MoECommunicator, RoutingCase], Any]


def every_kind(comm: MoECommunicator, case: RoutingCase) -> None:
    """Every kind of routing; AUTO alternates between its algorithms."""
    most = comm.config.max_tokens_per_rank
    for number, kind in enumerate(k for k in KINDS if k != "repeated"):
        check_step(comm, replace(next_case(case, number), kind=kind), step_tokens=None if number % 2 else most - 1)
    comm.barrier()


def parts(transport: str) -> list[tuple[str, Part, dict[str, Any]]]:
    """(name, story, configuration) of each part."""
    found: list[tuple[str, Part, dict[str, Any]]] = [
        (f"{mode.value} {layout.value}", every_kind, {"mode": mode, "layout": layout, "ll_max_tokens": 11})
        for mode in Mode
        for layout in Layout
    ]
    if transport == "nvlink":
        from tests.gpu import stories

        found += [
            (f"graph {mode.value}", stories.replayed_graph,
             {"mode": mode, "overflow": Overflow.DROP, "exact_shapes": False})
            for mode in (Mode.LL, Mode.HT)
        ] + [("delays", stories.delayed, {"mode": Mode.AUTO, "ll_max_tokens": 8})]  # fmt: skip
    return found


def run(transport: str, group: Any, seed: int, name: str) -> None:
    """All parts over one process group."""
    where = TorchGroup(group)
    tokens = tuple(9 - 2 * rank % 9 for rank in range(where.size))
    case = RoutingCase(2 * where.size + 1, 3, 64, tokens, "uniform", seed, max_tokens=12)
    for number, (part, story, overrides) in enumerate(parts(transport)):
        config = next_case(case, 1000 * number).config(where, transport=transport, timeout_s=20.0, **overrides)
        with MoECommunicator(config) as comm:
            story(comm, next_case(case, 1000 * number))
        if where.rank == 0:
            print(f"{name} {where.size} ranks: {part}: ok", flush=True)


def main() -> None:
    """What every rank runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", default="nvlink")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    on_gpus = options.transport == "nvlink"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    run(options.transport, None, options.seed, "default group")
    half = dist.new_group(range(0, dist.get_world_size(), 2), backend="gloo")
    if dist.get_rank() % 2 == 0:
        run(options.transport, half, options.seed + 1, "every second rank")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
