"""The ranks of one host of a group over several: `python -m tests.vllm.over_hosts FIRST NUM STORE CASE...`.

FIRST is the number of the first of its NUM ranks, STORE the host:port where all ranks meet, which rank 0 serves.
Prints a line of JSON for each rank: whether vLLM sees several hosts, what its plugin says without a network, and for
each CASE ("plugin backend") the name of the class and the largest error.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.vllm.layers import TOKENS, Case, engine, joined, run

WAIT = timedelta(seconds=300)


def rank_of_host(rank: int, address: str, cases: list[str], pipe: Any) -> None:
    """What one rank does; its answer goes into the pipe."""
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), len(TOKENS), is_master=rank == 0, timeout=WAIT, wait_for_workers=False)  # type: ignore[attr-defined]
    answer: dict[str, Any] = {"rank": rank, "cases": {}}
    with joined(rank, len(TOKENS), dist.PrefixStore("look", store)):  # type: ignore[attr-defined]
        from vllm.distributed.parallel_state import in_the_same_node_as

        answer["one_host"] = all(in_the_same_node_as(dist.group.WORLD, source_rank=0))
        answer["without"] = _refusal(rank)
    for case in cases:
        name, error, _ = run(rank, len(TOKENS), dist.PrefixStore(case, store), Case(*case.split()))  # type: ignore[attr-defined]
        answer["cases"][case] = [name, error]
    store.set(f"done/{rank}", b"1")
    store.wait([f"done/{other}" for other in range(len(TOKENS))], WAIT)  # the store ends with rank 0
    pipe.send(answer)


def _refusal(rank: int) -> str:
    """What a manager says where no network is configured."""
    from crossdock.common.config import FrameworkConfig

    case = Case("native", "deepep_low_latency")
    alone = FrameworkConfig(vllm="native")
    try:
        with mock.patch.object(FrameworkConfig, "from_env", return_value=alone), engine(case, rank):
            return ""
    except RuntimeError as error:
        return str(error)


def main(first: int, count: int, address: str, cases: list[str]) -> None:
    """Start the ranks, print what they answer."""
    context = mp.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        context.Process(target=rank_of_host, args=(first + i, address, cases, pipes[i][1]), daemon=True)
        for i in range(count)
    ]
    for process in ranks:
        process.start()
    for _, there in pipes:
        there.close()
    for here, _ in pipes:
        print(json.dumps(here.recv()), flush=True)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
