"""One data-parallel rank of an engine: `python -m benchmarks.vllm.engine ORDER`, started by `launch.py`.

ORDER is an `Order` as JSON. What was taken goes to its file `result` as JSON; everything else on stdout and stderr is a
log.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.vllm.plan import LONG, PROMPT, SHORT, START, VOCABULARY, step_ms
from benchmarks.vllm.tokens import NEW, TOP, prompts_of
from crossdock.host.child import die_with
from ep_kernels import StoreGroup

TURN = "turn"
"""The store has this key once an engine that has loaded shall work."""


def loaded(rank: int) -> str:
    """The key that the store has once a rank has loaded."""
    return f"loaded/{rank}"


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is to do.

    Attributes:
        arguments: of vLLM's `LLM`.
        plugin: whether Crossdock stands behind the backend.
        store_port: of the store by which the ranks meet, on this host.
        deadline_s: of each wait for the others.
        turn_s: of the wait for this engine's turn.
        parent: process to die with.
        decode, prefill: sequences of a decode batch, prompts of a prefill.
        runs: times of each.
        tokens: no times, but what this rank says (`tokens.py`).
        result: file.
    """

    arguments: dict[str, Any]
    plugin: bool
    rank: int
    ranks: int
    store_port: int
    deadline_s: float
    turn_s: float
    parent: int
    decode: int
    prefill: int
    runs: int
    tokens: bool
    result: str

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Load, wait for the turn, measure, write."""
    order = Order(**json.loads(text))
    die_with(order.parent)
    if order.plugin and not entry_points(group="vllm.general_plugins", name="crossdock"):
        raise RuntimeError("crossdock: expected the plugin to be installed beside vLLM, found no entry point of it")
    wait = timedelta(seconds=order.deadline_s)
    store = dist.TCPStore("127.0.0.1", order.store_port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
    group = StoreGroup(store, order.rank, order.ranks, name="bench")

    def meet() -> None:
        group.all_gather(b"", order.deadline_s)

    from vllm import LLM

    llm = LLM(**order.arguments)
    store.set(loaded(order.rank), "")
    store.wait([TURN], timedelta(seconds=order.turn_s))
    found = written(llm, order, meet) if order.tokens else taken(llm, order, meet)
    found["most_tokens"] = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    whole = Path(order.result)
    part = whole.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(whole)
    meet()  # an engine that leaves takes its peers' steps with it


def taken(llm: Any, order: Order, meet: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds: "decode" of a step, "prefill" of a batch; one of each per run. Each shape runs once before."""
    from vllm import SamplingParams

    drawn = random.Random(order.rank)

    def seconds(sequences: int, length: int, new: int) -> float:
        prompts = [{"prompt_token_ids": drawn.choices(range(2, VOCABULARY), k=length)} for _ in range(sequences)]
        how = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        meet()
        began = time.perf_counter()
        answers = llm.generate(prompts, how, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(answer.outputs[0].token_ids) != new for answer in answers):
            raise RuntimeError(f"expected {new} tokens of each sequence, got others")
        return took

    for shape in ((order.decode, START, SHORT), (order.prefill, PROMPT, 1)):
        seconds(*shape)
    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    for _ in range(order.runs):
        short_s, long_s = (seconds(order.decode, START, new) for new in (SHORT, LONG))
        found["decode"].append(step_ms(short_s, long_s))
        found["prefill"].append(1e3 * seconds(order.prefill, PROMPT, 1))
    return dict(found)


def written(llm: Any, order: Order, meet: Callable[[], None]) -> dict[str, Any]:
    """The answers to this rank's prompts, as `tokens.Found` has them."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=TOP, ignore_eos=True, detokenize=False)
    meet()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts_of(order.rank)], how, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[{str(t): p.logprob for t, p in step.items()} for step in output.logprobs] for output in outputs],
    }


if __name__ == "__main__":
    main(sys.argv[1])
