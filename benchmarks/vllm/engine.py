"""One data-parallel rank of an engine: `python -m benchmarks.vllm.engine ORDER`, started by `launch.py`.

ORDER is an `Order` as JSON. What was taken goes to its file `result` as JSON; everything else on stdout and stderr is a
log.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.vllm import trace
from benchmarks.vllm.plan import LONG, PROMPT, SHORT, START, VOCABULARY, step_ms
from benchmarks.vllm.tokens import NEW, TOP, prompts_of
from crossdock.host.child import die_with
from ep_kernels import StoreGroup

PROFILED = {
    "profiler": "torch", "torch_profiler_with_stack": False, "ignore_frontend": True,
    "delay_iterations": 64, "max_iterations": 32,
}  # fmt: skip
"""Steps behind those in which a batch grows to its size."""
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
        traces: folder for the profiler's traces; "": nothing is profiled.
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
    traces: str

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def need_plugin() -> None:
    """Raises RuntimeError where vLLM would not find it."""
    if not entry_points(group="vllm.general_plugins", name="crossdock"):
        raise RuntimeError("crossdock: expected the plugin to be installed beside vLLM, found no entry point of it")


def main(text: str) -> None:
    """Load, wait for the turn, measure, write."""
    order = Order(**json.loads(text))
    die_with(order.parent)
    if order.plugin:
        need_plugin()
    wait = timedelta(seconds=order.deadline_s)
    store = dist.TCPStore("127.0.0.1", order.store_port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
    group = StoreGroup(store, order.rank, order.ranks, name="bench")

    def meet() -> None:
        group.all_gather(b"", order.deadline_s)

    from vllm import LLM

    profiler = {"profiler_config": PROFILED | {"torch_profiler_dir": order.traces}} if order.traces else {}
    llm = LLM(**order.arguments, **profiler)
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
    """Milliseconds: "decode" of a step, "prefill" of a batch, one of each per run; "graph" and "kernels" of the steps
    that are graphs. Each shape runs once before."""
    from vllm import SamplingParams

    drawn = random.Random(order.rank)

    def generated(sequences: int, length: int, new: int) -> tuple[float, Any]:
        prompts = [{"prompt_token_ids": drawn.choices(range(2, VOCABULARY), k=length)} for _ in range(sequences)]
        how = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        meet()
        began = time.perf_counter()
        answers = llm.generate(prompts, how, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(answer.outputs[0].token_ids) != new for answer in answers):
            raise RuntimeError(f"expected {new} tokens of each sequence, got others")
        return took, [answer.metrics for answer in answers]

    for shape in ((order.decode, START, SHORT), (order.prefill, PROMPT, 1)):
        generated(*shape)
    found: dict[str, Any] = {"decode": [], "prefill": []}
    for _ in range(order.runs):
        _, times = generated(order.decode, START, LONG)
        found["decode"].append(step_ms([t.first_token_ts for t in times], [t.last_token_ts for t in times], LONG))
        found["prefill"].append(1e3 * generated(order.prefill, PROMPT, 1)[0])
    if order.traces:
        llm.start_profile()
        generated(order.decode, START, LONG)
        llm.stop_profile()
        found |= profiled(Path(order.traces))
    return found


def profiled(folder: Path) -> dict[str, Any]:
    """ "graph": milliseconds of each replay; "busy", "operations": their medians; "kernels": see `trace.KernelTime`."""
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in folder.glob("*.json.gz")]
    events = [event for found in traces for event in found["traceEvents"]]
    steps = trace.replays(events)
    if not steps:
        return {}
    each = [trace.replay_of(step) for step in steps]
    middle = trace.median_of(each)
    return {
        "graph": [one.span_us / 1e3 for one in each], "busy_us": middle.busy_us, "operations": middle.operations,
        "kernels": [astuple(kernel) for kernel in trace.kernel_times(steps)],
    }  # fmt: skip


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
