"""vLLM's own server under its own load generator: what is asked, and what the answers mean. Pure: no vLLM, no GPU.

All servers run on the same GPUs. Each load runs on one after the other, first with a few requests that do
not count, then in turns, every second one with the servers in reverse order. Answers have the lengths that were asked
for. Prompts are new in each turn, the same for all servers.

* closed: a fixed number of requests is in flight; each that ends is followed by another.
* open: requests arrive at a rate, at random times (Poisson), whether or not earlier ones have ended. Their lengths are
  those of conversations: log-normal, means 161 tokens in and 338 out, as published for ShareGPT.
* prefill: eight requests in flight, prompts of 8,192 tokens, answers of 8.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.vllm import QWEN3, Model, Refused, aligned
from benchmarks.vllm.plan import FREE_AT_START, Run, config_json

WHOLE = replace(QWEN3, layers=48, vocabulary=151_936, positions=40_960)
"""Qwen3-30B-A3B, all of it."""
USUAL = "ag,deepep_v2"
CLOSED, OPEN = (1, 8, 32, 64, 128, 256), (8, 16, 32)
"""Requests in flight; requests a second."""
WAVES, FEWEST, ARRIVALS_S = 4, 8, 10
"""Requests of a closed load for each in flight, at least FEWEST; seconds in which an open load's arrive."""
PROMPT, ANSWER = 256, 128
LONG_PROMPT, SHORT_ANSWER, LONG_REQUESTS, LONG_AT_ONCE = 8192, 8, 64, 8
MEAN_IN, MEAN_OUT, SPREAD, SHORTEST, LONGEST = 161, 338, 0.9, 4, 1024
MOST_SEQUENCES, MOST_LENGTH = 256, LONG_PROMPT + 256
CACHE_BYTES = 16 << 30
"""Of a rank's keys and values: 160,000 tokens."""
WARM = 4
"""Fewest requests of a load that do not count."""
SPECIAL = 2
"""Words of the vocabulary that no prompt has."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server is given.

    Attributes:
        kind: "closed", "open" or "prefill".
        size: requests in flight, or requests a second.
        requests: how many.
    """

    kind: str
    size: int
    requests: int

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.kind}-{self.size}"

    def arguments(self, url: str, folder: str, turn: int) -> list[str]:
        """Of `vllm bench serve`, of this load in that turn; `folder` has the tokenizer and CONVERSATIONS."""
        fixed = {"closed": (PROMPT, ANSWER), "prefill": (LONG_PROMPT, SHORT_ANSWER)}
        if self.kind in fixed:
            lengths = zip(("--random-input-len", "--random-output-len"), map(str, fixed[self.kind]), strict=True)
            asked = ["--dataset-name", "random", *(word for pair in lengths for word in pair)]
            asked += ["--max-concurrency", str(self.size)]
        else:
            asked = ["--dataset-name", "sharegpt", "--dataset-path", f"{folder}/{CONVERSATIONS}"]
            asked += ["--request-rate", str(self.size)]
        return [
            "--backend", "openai", "--base-url", url, "--model", SERVED, "--tokenizer", folder, *asked,
            "--num-prompts", str(self.requests), "--seed", str(turn + 1), "--ignore-eos", "--temperature", "0",
            "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm",
        ]  # fmt: skip


SERVED, CONVERSATIONS = "bench", "conversations.json"


def loads_of(text: str) -> list[Load]:
    """As the command line gives them: "closed-32,open-8,prefill-8"; "" is all. Raises Refused."""
    known = [Load("closed", size, max(FEWEST, WAVES * size)) for size in CLOSED]
    known += [Load("open", size, ARRIVALS_S * size) for size in OPEN]
    known += [Load("prefill", LONG_AT_ONCE, LONG_REQUESTS)]
    by_name = {load.name: load for load in known}
    if missing := [name for name in filter(None, text.split(",")) if name not in by_name]:
        raise Refused(f"--loads: expected some of {','.join(by_name)}, got {missing[0]!r}")
    return [by_name[name] for name in filter(None, text.split(","))] or known


@dataclass(frozen=True, slots=True)
class Job:
    """A load on the server with that index; turn -1 does not count."""

    load: Load
    turn: int
    server: int


def jobs(loads: Sequence[Load], num_servers: int, turns: int) -> list[Job]:
    """In their order."""
    return [
        Job(load if turn >= 0 else replace(load, requests=max(load.size, WARM)), turn, server)
        for turn in range(-1, turns)
        for load in loads
        for server in (reversed(range(num_servers)) if turn % 2 else range(num_servers))
    ]


def files(model: Model) -> dict[str, str]:
    """Of the folder that a server loads, by name: a config, a tokenizer of whole words, conversations. Each word is a
    token, so that text has as many tokens as it should."""
    vocabulary = {_word(number): number for number in range(model.vocabulary)}
    special = [
        {"id": number, "content": _word(number), "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number in range(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _word(0)},
    }  # fmt: skip
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": _word(0), "eos_token": _word(1)}
    return {
        "config.json": json.dumps(config_json(model)),
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps(kind),
        CONVERSATIONS: json.dumps(list(conversations(model.vocabulary))),
    }


def conversations(vocabulary: int, seed: int = 0) -> Iterable[dict[str, Any]]:
    """As ShareGPT's file has them, as many as any open load takes: a prompt, and an answer of which only the length
    counts."""
    drawn = random.Random(seed)

    def text(mean: float) -> dict[str, str]:
        length = round(drawn.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))
        words = drawn.choices(range(SPECIAL, vocabulary), k=min(LONGEST, max(SHORTEST, length)))
        return {"value": " ".join(map(_word, words))}

    for _ in range(ARRIVALS_S * max(OPEN)):
        yield {"conversations": [text(MEAN_IN), text(MEAN_OUT)]}


def _word(number: int) -> str:
    """No special one is part of another. They are the longest, and longer than any other with its space: vLLM refuses a
    prompt with more characters than as many of the longest words as it may have tokens."""
    return f"w{number}" if number >= SPECIAL else f"<special-{number}>"


def server_arguments(run: Run, folder: str, ranks: int, port: int) -> list[str]:
    """Of `vllm serve`: its defaults, but for memory, since other servers load on the same GPUs."""
    return [
        folder, "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port),
        "--load-format", "dummy", "--generation-config", "vllm", "--data-parallel-size", str(ranks),
        "--enable-expert-parallel", "--all2all-backend", run.backend.slot, "--no-enable-prefix-caching",
        "--max-model-len", str(MOST_LENGTH), "--max-num-seqs", str(MOST_SEQUENCES),
        "--gpu-memory-utilization", str(FREE_AT_START), "--kv-cache-memory-bytes", str(CACHE_BYTES),
        "--disable-uvicorn-access-log", *(["--enforce-eager"] if run.eager else []),
    ]  # fmt: skip


FIGURES = {
    "tokens_per_s": "output_throughput", "all_tokens_per_s": "total_token_throughput", "seconds": "duration",
    "ttft_p50_ms": "p50_ttft_ms", "ttft_p99_ms": "p99_ttft_ms", "itl_p50_ms": "p50_itl_ms",
    "itl_p99_ms": "p99_itl_ms", "tpot_p50_ms": "p50_tpot_ms",
}  # fmt: skip
"""Columns, and what vLLM's load generator calls them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load on one server; or, with a fault, a server or a load that gave no figures."""

    backend: str
    tier: str
    mode: str
    load: str
    turn: int | None
    completed: int
    tokens_per_s: float | None
    all_tokens_per_s: float | None
    seconds: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    tpot_p50_ms: float | None
    ranks: int
    layers: int
    weights: str
    vllm: str
    torch: str
    gpu: str
    fault: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all rows."""

    ranks: int
    model: Model
    versions: tuple[str, str, str]


def row_of(run: Run, load: Load | None, turn: int | None, found: Mapping[str, Any], setting: Setting) -> Row:
    """Of vLLM's result, or of {"fault": ...}; a result that lacks answers is a fault."""
    done, asked = int(found.get("completed", 0)), load.requests if load else 0
    fault = str(found.get("fault", ""))
    if not fault and done != asked:
        fault = f"expected {asked} answers, got {done}"
    figures = {name: round(float(found[key]), 3) if key in found else None for name, key in FIGURES.items()}
    vllm, torch, gpu = setting.versions
    return Row(
        run.backend.slot, run.backend.tier, run.mode, load.name if load else "", turn, done, **figures,
        ranks=setting.ranks, layers=setting.model.layers, weights=setting.model.weights, vllm=vllm, torch=torch,
        gpu=gpu, fault=fault,
    )  # fmt: skip


SHOWN = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "all_tokens_per_s")


def table(rows: Sequence[Row]) -> str:
    """A line for each load and server: medians over the turns, and how the two main ones stand to the first server."""
    lines = []
    firsts: dict[str, dict[str, float]] = {}
    for load, *server in dict.fromkeys((row.load, row.backend, row.tier, row.mode) for row in rows):
        mine = [row for row in rows if [row.load, row.backend, row.tier, row.mode] == [load, *server]]
        middle = medians(mine)
        first = firsts.setdefault(load, middle)
        share = [f"{middle[name] / first[name]:.3f}" if middle and first else "" for name in ("itl_p50_ms", SHOWN[-1])]
        figures = [f"{middle[name]:.2f}" if middle else "" for name in SHOWN]
        lines.append([load, *server, *figures, *share, next((row.fault for row in mine if row.fault), "")])
    return aligned(["load", "backend", "tier", "mode", *SHOWN, "itl_to_first", "tokens_to_first", "fault"], lines)


def medians(rows: Iterable[Row]) -> dict[str, float]:
    """Figure by figure; of rows without a fault, {} where there are none."""
    good = [asdict(row) for row in rows if not row.fault]
    return {name: statistics.median(row[name] for row in good) for name in FIGURES} if good else {}
