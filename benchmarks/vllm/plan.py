"""What is run of whole engines, and what their times mean. Pure: no vLLM here, no GPU.

One engine at a time, a process per data-parallel rank, experts spread over all ranks. `LLM.generate` gets prompts that
are new each time; the ranks begin together:

* decode: wall time between two tokens of a sequence, by the engine's own clock, median of the batch's sequences;
* prefill: wall time of prompts of PROMPT tokens that generate one token each, whole;
* graph: time of one decode step's graph on the GPU, by torch's profiler (`trace.py`), median of its replays. It
  includes waits for the other ranks, and the profiler puts hosts out of step: the rank that waits least counts.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm import QWEN3, Model, Refused, aligned

SHORT, LONG = 16, 272
"""New tokens of a decode batch that warms up or is profiled, and of one that is timed."""
START = 32
"""Tokens of its prompts."""
PROMPT = 512
MOST_SEQUENCES, MOST_LENGTH, VOCABULARY = 32, 1024, QWEN3.vocabulary
CACHE_BYTES = 6 << 30
"""Of a rank's keys and values: all sequences of 48 layers at their longest take half. vLLM would take what is
free otherwise, and find it out wrong while other engines load."""
FREE_AT_START = 0.1
"""Of each GPU's memory; vLLM looks, and with a given cache takes what it needs."""
SAID_LINES, SAID_CHARACTERS = 3, 600
HALVED_FROM = 4
"""Tokens of a rank from which dual-batch overlap cuts a step in two (vLLM: 32 in decode, 512 in prefill)."""
OVERLAPPED = ("deepep_low_latency", "deepep_high_throughput")
"""Slots that vLLM lets do so."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One of vLLM's, and who stands behind it.

    Attributes:
        slot: as `--all2all-backend` names it.
        tier: "built in", or what CROSSDOCK_VLLM is: "native", "deep_ep".
        manager: class that vLLM's log must name; otherwise another backend was measured.
        graphs: whether vLLM runs it in CUDA graphs.
    """

    slot: str
    tier: str
    manager: str
    graphs: bool = True

    @property
    def plugin(self) -> str:
        """CROSSDOCK_VLLM."""
        return "off" if self.tier == "built in" else self.tier


BACKENDS = {
    "ag": Backend("allgather_reducescatter", "built in", "AgRsAll2AllManager"),
    "deepep_v2": Backend("deepep_v2", "native", "GraphManager"),
    "ll": Backend("deepep_low_latency", "native", "LowLatencyManager"),
    "ht": Backend("deepep_high_throughput", "native", "HighThroughputManager", graphs=False),
    "ll1": Backend("deepep_low_latency", "deep_ep", "DeepEPLLAll2AllManager"),
    "ht1": Backend("deepep_high_throughput", "deep_ep", "DeepEPHTAll2AllManager", graphs=False),
}
"""By their names on the command line."""
USUAL = "ag,deepep_v2,ll,ht,ag+eager"


@dataclass(frozen=True, slots=True)
class Run:
    """A backend in one mode: eager or graphs, and +dbo with dual-batch overlap."""

    backend: Backend
    mode: str

    @property
    def eager(self) -> bool:
        """No CUDA graphs."""
        return self.mode.startswith("eager")

    @property
    def halved(self) -> bool:
        """Dual-batch overlap."""
        return self.mode.endswith("+dbo")

    @property
    def signs(self) -> dict[str, str]:
        """What the log of a rank must say at least once, and what it means if none does."""
        sign = f"{self.backend.manager} all2all manager"
        found = {sign: f"something else was measured: no rank's log says that it uses {self.backend.manager}"}
        if self.halved:
            found["should_ubatch: True"] = "no rank's log says that a step was cut in two"
        return found

    def unsaid(self, logs: Collection[str]) -> str:
        """What it means that none of these logs has one of the signs; "": all are there."""
        signs = self.signs.items()
        return next((otherwise for sign, otherwise in signs if not any(sign in log for log in logs)), "")

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.backend.slot}-{self.backend.tier}-{self.mode}".replace(" ", "-")


def runs_of(names: str, *, eager: bool) -> list[Run]:
    """As the command line asks: names with commas, behind a name `+eager` for no graphs and `+dbo` for dual-batch
    overlap. Raises Refused."""
    found = []
    for name in filter(None, names.split(",")):
        known, *modes = name.split("+")
        if known not in BACKENDS or not {*modes} <= {"eager", "dbo"}:
            some = ",".join(BACKENDS)
            raise Refused(f"--backends: expected some of {some}, each with +eager, +dbo or neither, got {name!r}")
        backend, halved = BACKENDS[known], "dbo" in modes
        if halved and backend.slot not in OVERLAPPED:
            raise Refused(f"--backends: expected +dbo behind one of {','.join(OVERLAPPED)}, got {name!r}")
        mode = "eager" if eager or "eager" in modes or not backend.graphs else "graphs"
        found.append(Run(backend, mode + "+dbo" * halved))
    return list(dict.fromkeys(found))


def config_json(model: Model) -> dict[str, Any]:
    """A checkpoint's config.json: attention as in Qwen3-30B-A3B."""
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "num_hidden_layers": model.layers, "hidden_size": model.hidden, "moe_intermediate_size": model.inner,
        "num_experts": model.experts, "num_experts_per_tok": model.topk, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 3 * model.hidden,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": model.positions,
        "vocab_size": model.vocabulary, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        **({"quantization_config": blocks} if model.weights == "fp8" else {}),
    }  # fmt: skip


def engine_arguments(run: Run, model_folder: str, most_tokens: int, weights: str) -> dict[str, Any]:
    """Of vLLM's `LLM`. `most_tokens`: of a rank in one step; 0 leaves it to vLLM, which takes 256 for low latency.
    `weights`: "dummy", or "auto" for those of the folder."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    how: dict[str, Any] = {"enforce_eager": True} if run.eager else {"compilation_config": graphs}
    if run.halved:
        how |= dict.fromkeys(("dbo_decode_token_threshold", "dbo_prefill_token_threshold"), HALVED_FROM)
        how |= {"enable_dbo": True}
    return {
        "model": model_folder, "load_format": weights, "skip_tokenizer_init": True, "generation_config": "vllm",
        "enable_expert_parallel": True, "all2all_backend": run.backend.slot, "enable_prefix_caching": False,
        "max_model_len": MOST_LENGTH, "max_num_seqs": MOST_SEQUENCES, "disable_log_stats": False,
        "gpu_memory_utilization": FREE_AT_START, "kv_cache_memory_bytes": CACHE_BYTES, "seed": 0, **how,
        **({"max_num_batched_tokens": most_tokens} if most_tokens else {}),
    }  # fmt: skip


def environment(run: Run, rank: int, ranks: int, port: int) -> dict[str, str]:
    """What is set for a rank's process, beside what it inherits: by these vLLM knows a rank of an offline engine."""
    return {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_LOGGING_LEVEL": "DEBUG" if run.halved else "INFO",
        "CROSSDOCK_VLLM": run.backend.plugin,
    }  # fmt: skip


def step_ms(first_s: Sequence[float], last_s: Sequence[float], new: int) -> float:
    """Milliseconds between two tokens, from the times of each sequence's first and last of `new` tokens."""
    return 1e3 * statistics.median(b - a for a, b in zip(first_s, last_s, strict=True)) / (new - 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one engine: what each rank wrote, or why there is nothing; `rank` is the one that failed, if one did."""

    results: Sequence[Mapping[str, Any]] = ()
    fault: str = ""
    rank: int | None = None


STEPS = ("decode", "prefill", "graph")


@dataclass(frozen=True, slots=True)
class Row:
    """One time of one rank; or, with a fault and no time, a backend that gave none.

    Attributes:
        sorted_run: its place among the rank's times.
        most_tokens: of a rank in one step (`max_num_batched_tokens`).
    """

    backend: str
    tier: str
    mode: str
    rank: int | None
    step: str
    sorted_run: int | None
    ms: float | None
    ranks: int
    most_tokens: int | None
    vllm: str
    torch: str
    gpu: str
    fault: str


def rows_of(run: Run, ranks: int, outcome: Outcome, versions: tuple[str, str, str]) -> list[Row]:
    """All times of an engine, each rank's fastest first."""
    backend = run.backend
    if outcome.fault:
        failed = (outcome.rank, "", None, None, ranks, None, *versions, outcome.fault)
        return [Row(backend.slot, backend.tier, run.mode, *failed)]
    return [
        Row(
            backend.slot, backend.tier, run.mode, rank, step, place, round(ms, 3), ranks, result["most_tokens"],
            *versions, "",
        )
        for rank, result in enumerate(outcome.results)
        for step in STEPS
        for place, ms in enumerate(sorted(result.get(step, ())))
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel of a rank's decode step, in graphs: means over its replays."""

    backend: str
    tier: str
    rank: int
    kernel: str
    count: float
    us: float


def kernel_rows(run: Run, outcome: Outcome) -> list[KernelRow]:
    """Of all ranks."""
    return [
        KernelRow(run.backend.slot, run.backend.tier, rank, *kernel)
        for rank, result in enumerate(outcome.results)
        for kernel in result.get("kernels", ())
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each engine: the median time of its slowest rank, of graphs the fastest."""
    lines = []
    for key in dict.fromkeys((row.backend, row.tier, row.mode) for row in rows):
        mine = [row for row in rows if (row.backend, row.tier, row.mode) == key]
        most = mine[0].most_tokens
        lines.append([*key, str(most or ""), *(_median(mine, step) for step in STEPS), mine[0].fault])
    return aligned(["backend", "tier", "mode", "most_tokens", *(f"{step}_ms" for step in STEPS), "fault"], lines)


def _median(rows: Sequence[Row], step: str) -> str:
    times: dict[int | None, list[float]] = {}
    for row in rows:
        if row.step == step and row.ms is not None:
            times.setdefault(row.rank, []).append(row.ms)
    chosen = min if step == "graph" else max
    return f"{chosen(map(statistics.median, times.values())):.2f}" if times else ""


_ERROR = re.compile(r"(Error|Timeout|Exception)\b.*:")


def said(log: str) -> str:
    """What a log says of its process's end: the first error, for others follow from it, and the last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    first = next((line for line in lines if _ERROR.search(line)), None)
    kept = dict.fromkeys([*([first] if first else []), *lines[-SAID_LINES:]])
    return " | ".join(kept)[:SAID_CHARACTERS] or "its log is empty"
