"""What ranks do that tune: measure, then build communicators that find, or do not find, what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from crossdock.tune.rank import measured
from crossdock.tune.request import TuneRequest
from ep_kernels import MoECommunicator, tuning
from ep_kernels.types import Layout, Mode
from tests.cases import RoutingCase
from tests.transports.steps import Place, Store, check_step, next_case


def measured_and_used(
    rank: int, size: int, store: Store, transport: str, case: RoutingCase, folder: str, layout: Layout
) -> tuple[tuning.Record, list[tuple[str, int]]]:
    """Tune; then AUTO communicators, of which one rank alone has the file: (the record, steps that were said)."""
    place = Place(rank, size, store, transport)
    base = place.config(case, "sizes")
    request = TuneRequest(
        transport=base.transport, layouts=(layout.value,), num_experts=base.num_experts, hidden_size=base.hidden_size,
        topk=base.topk, max_tokens=8, runs=2, cache_dir=folder,
    )  # fmt: skip
    said: list[tuple[str, int]] = []
    (record,) = measured(request, place.group, lambda layout, tokens, ll, ht: said.append((layout, tokens)))
    for knowing in range(size):  # one rank alone knows
        cache = folder if rank == knowing else str(Path(folder) / "nothing")
        config = place.config(
            case, f"known-to-{knowing}", mode=Mode.AUTO, layout=layout, dtype=torch.bfloat16, kernel_cache_dir=cache
        )
        with MoECommunicator(config) as comm:
            assert comm.ll_max_tokens == record.ll_max_tokens
            for turn, step in enumerate((record.ll_max_tokens, record.ll_max_tokens + 1)):
                small = replace(next_case(case, turn), tokens=(record.ll_max_tokens,) * size)
                handle = check_step(comm, small, step_tokens=step)
                assert handle.mode is (Mode.LL, Mode.HT)[turn]
    with place.communicator(
        case, "known-to-none", mode=Mode.AUTO, layout=layout, dtype=torch.bfloat16,
        kernel_cache_dir=str(Path(folder) / "nothing"),
    ) as comm:  # fmt: skip
        assert comm.ll_max_tokens > 8, "the transport's own"
    return record, said
