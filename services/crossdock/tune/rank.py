"""One rank of `crossdock tune`: a process of its own, or one that torchrun has started.

    python -m crossdock.tune.rank REQUEST RANK SIZE STORE

Prints JSON, a line each: what rank 0 has measured so far, then {"records": [...]} or {"failed": why}.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from crossdock.common.transports import needs_gpu
from crossdock.tune.measure import Progress, measure
from crossdock.tune.request import TuneRequest
from ep_kernels import EpError, StoreGroup, tuning


def measured(request: TuneRequest, group_of: Callable[[str], Any], progress: Progress) -> list[tuning.Record]:
    """Measure each layout of the request and, on rank 0, write it down as soon as it is known. Collective.

    Args:
        group_of: a fresh Group of the same ranks, by a name.
        progress: called on rank 0 after each step.

    Raises: EpError; OSError where the file cannot be written.
    """
    records = []
    for layout in request.layouts:
        group = group_of(f"tune-{layout}")
        record = measure(request, layout, group, progress if group.rank == 0 else _silent)
        folder = tuning.cache_dir(request.cache_dir)
        if group.rank == 0 and folder is not None:
            tuning.remember(folder / tuning.FILE_NAME, record)
        records.append(record)
    return records


def under_torchrun(request: TuneRequest, progress: Progress) -> tuple[int, list[tuning.Record]]:
    """This process as one of torchrun's, with the GPU of its local rank: (rank, records). Raises as `measured`."""
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    local = dist.get_node_local_rank(fallback_rank=rank)
    enter(request.transport, local)
    return rank, measured(request, lambda name: StoreGroup(store, rank, size, name=name), progress)


def enter(transport: str, index: int) -> None:
    """Make GPU `index` this process's own, or keep torch from taking the cores of other ranks."""
    if needs_gpu(transport):
        torch.cuda.set_device(index)
    else:
        torch.set_num_threads(1)


def main(words: list[str]) -> int:
    rank, size = int(words[1]), int(words[2])
    try:
        request = msgspec.json.decode(words[0], type=TuneRequest)
        enter(request.transport, rank)
        store = dist.FileStore(words[3], size)  # type: ignore[attr-defined]
        records = measured(request, lambda name: StoreGroup(store, rank, size, name=name), _say_step)
    except (EpError, OSError, RuntimeError) as error:
        _say({"failed": f"{type(error).__name__}: {error}"})
        return 1
    _say({"records": records if rank == 0 else []})
    return 0


def _say_step(layout: str, tokens: int, ll_us: float, ht_us: float) -> None:
    _say({"layout": layout, "tokens": tokens, "ll_us": ll_us, "ht_us": ht_us})


def _say(answer: dict[str, Any]) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def _silent(layout: str, tokens: int, ll_us: float, ht_us: float) -> None:
    """The other ranks have nothing to add."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
