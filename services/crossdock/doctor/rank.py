"""One rank of the doctor's trial: dispatches and combines random tokens, checks the result, prints times as JSON.

    python -m crossdock.doctor.rank TRANSPORT RANK SIZE FILE
    python -m crossdock.doctor.rank TRANSPORT RANK SIZE HOST:PORT NETWORK WAIT_S

The ranks meet in a file, or, if they are on several hosts, at HOST:PORT, where rank 0 listens; NETWORK is the
`NetworkConfig` of this rank as JSON. Between hosts each rank prints the answers of all.

Experts here return their rows unchanged, so a token must come back as it was sent times the sum of its weights. That is
looked at first; then the same operations are timed, as `crossdock tune` does it.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from crossdock.common.addresses import family_of, reachable_from_here, split_address
from crossdock.common.transports import needs_gpu
from crossdock.tune.measure import prepared
from ep_kernels import EpError, Layout, Mode, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.base import probe

_TOPK, _EXPERTS_PER_RANK, _SEED = 4, 8, 1234
_LATE_S = 60.0
_TOLERANCE = 0.03
"""Relative to the largest value: bf16 rows, rounded once at each rank and once at the source rank."""


@dataclass(frozen=True, slots=True)
class TrialCase:
    """One kind of step: its mode and layout, tokens per rank, columns; what is timed (a dispatch with its combine, or
    alone), so many in a row, in so many rounds."""

    name: str
    mode: Mode
    layout: Layout
    tokens: int
    hidden: int
    combines: bool
    in_a_row: int
    rounds: int


STEPS = {
    False: (
        TrialCase("latency", Mode.LL, Layout.RANK_MAJOR, 1, 2048, True, 3, 20),
        TrialCase("bandwidth", Mode.HT, Layout.FLAT, 512, 2048, False, 2, 8),
    ),
    True: (
        TrialCase("latency", Mode.LL, Layout.RANK_MAJOR, 1, 7168, True, 10, 20),
        TrialCase("bandwidth", Mode.HT, Layout.FLAT, 4096, 7168, False, 5, 10),
    ),
}
"""Steps of the trial, by whether ranks have GPUs."""


def main(transport: str, rank: int, size: int, store_path: str) -> dict[str, Any]:
    """Run the steps of a rank of this host; what is printed."""
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    return {**run_steps(transport, rank, size, store, None), **probe(transport, rank)}


def main_between_hosts(transport: str, rank: int, size: int, meeting: str, network: str, wait_s: float) -> Any:
    """Run the steps of a rank that meets the others at host:port; what is printed: the answers of all, by rank."""
    store = _meet(rank, size, meeting, timedelta(seconds=wait_s))
    try:
        answer = run_steps(transport, rank, size, store, msgspec.json.decode(network, type=NetworkConfig))
    except (EpError, RuntimeError) as failure:
        answer = {"rank": rank, "failed": f"{type(failure).__name__}: {failure}"}
    group = StoreGroup(store, rank, size, name="answers")
    try:
        answers = [json.loads(one) for one in group.all_gather(json.dumps(answer).encode(), _LATE_S)]
        if rank:
            store.set(f"read/{rank}", b"1")  # the store ends with rank 0
        else:
            store.wait([f"read/{other}" for other in range(1, size)], timedelta(seconds=_LATE_S))
    except (EpError, RuntimeError):
        return {
            "answers": [answer, *({"rank": other, "failed": "no answer"} for other in range(size) if other != rank)]
        }
    return {"answers": answers}


def _meet(rank: int, size: int, meeting: str, wait: timedelta) -> Any:
    """The store of all ranks, once all are there. Raises RuntimeError."""
    host, port = split_address(meeting)
    options: dict[str, Any] = {"timeout": wait, "wait_for_workers": False}
    if rank == 0:
        listener = socket.create_server((host, port), family=family_of(host))
        options.update(is_master=True, master_listen_fd=listener.detach())
    reached, _ = split_address(reachable_from_here(meeting))
    try:
        store: Any = dist.TCPStore(reached, port, size, **options)  # type: ignore[attr-defined]
        store.set(f"here/{rank}", b"1")
        store.wait([f"here/{other}" for other in range(size)], wait)
    except RuntimeError:
        raise RuntimeError(f"no doctor of another host came to {meeting} within {wait.total_seconds():g} s") from None
    return store


def run_steps(transport: str, rank: int, size: int, store: Any, network: NetworkConfig | None) -> dict[str, Any]:
    """Run all kinds of steps over a store that the ranks share; `network`: None on one host."""
    on_gpu = needs_gpu(transport)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(device)
    answer: dict[str, Any] = {"rank": rank, "steps": {}}
    for step in STEPS[on_gpu]:
        group = StoreGroup(store, rank, size, name=step.name)
        answer["steps"][step.name] = run_step(step, group, transport, device, network)
    return answer


def run_step(
    step: TrialCase, group: StoreGroup, transport: str, device: torch.device, network: NetworkConfig | None = None
) -> dict[str, Any]:
    """Times of one kind of step, round by round, and how far the answer is off."""
    generator = torch.Generator().manual_seed(_SEED + group.rank)
    num_experts = _EXPERTS_PER_RANK * group.size
    x = torch.randn(step.tokens, step.hidden, generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(torch.bfloat16).to(device)
    scores = torch.rand(step.tokens, num_experts, generator=generator, dtype=torch.float32, device="cpu")
    weights, ids = (part.to(device) for part in scores.topk(_TOPK, dim=-1))
    ids = ids.to(torch.int32)
    config = MoEConfig(
        group=group, num_experts=num_experts, hidden_size=step.hidden, topk=_TOPK, max_tokens_per_rank=step.tokens,
        mode=step.mode, layout=step.layout, transport=transport, network=network, timeout_s=20.0, exact_shapes=False,
    )  # fmt: skip
    with MoECommunicator(config) as comm:
        expected = x.float() * weights.sum(-1, keepdim=True)
        error = float((_answer(comm, x, ids, weights).float() - expected).abs().max() / expected.abs().max())
        run = prepared(partial(_repeat, comm, x, ids, weights, step), device.type)
        times = [run(lambda: None) / step.in_a_row for _ in range(step.rounds)]
        comm.check()
    return {
        "wrong": not error <= _TOLERANCE,
        "error": error,
        "took_us": times[len(times) // 2 :],
        "remote_bytes": _remote_rows(ids, group.rank, group.size) * step.hidden * 2,
    }


def _answer(comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expected result of combine [T, H]."""
    out, handle = comm.dispatch(x, ids, weights)
    assert out.topk_weights is not None
    rows = (out.tokens.float() * out.topk_weights.sum(-1, keepdim=True)).to(torch.bfloat16)
    return comm.combine(rows, handle)


def _repeat(comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: TrialCase) -> None:
    for _ in range(step.in_a_row):
        out, handle = comm.dispatch(x, ids, weights)
        if step.combines:
            comm.combine(out.tokens, handle)


def _remote_rows(ids: torch.Tensor, rank: int, size: int) -> int:
    """Rows that leave this rank: one for each (token, other rank)."""
    owners = ids.cpu() // _EXPERTS_PER_RANK
    return sum(int((owners == other).any(-1).sum()) for other in range(size) if other != rank)


def _run(arguments: list[str]) -> Any:
    transport, rank, size, place, *between = arguments
    if between:
        return main_between_hosts(transport, int(rank), int(size), place, between[0], float(between[1]))
    return main(transport, int(rank), int(size), place)


if __name__ == "__main__":
    try:
        print(json.dumps(_run(sys.argv[1:])))
    except (EpError, RuntimeError, OSError) as failure:
        print(json.dumps({"failed": f"{type(failure).__name__}: {failure}"}))
        sys.exit(1)
