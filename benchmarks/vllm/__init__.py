"""vLLM's MoE backends, measured in vLLM itself: a step of the whole engine, its tokens, its expert kernels alone.

    python -m benchmarks.vllm --out DIR [--backends ag,deepep_v2,ll] [--ranks N]     (make bench-vllm; two or more GPUs)
    python -m benchmarks.vllm --tokens qwen3_moe,deepseek_v2,mixtral --out DIR       (the same)
    python -m benchmarks.vllm --serve --out DIR                                      (the same)
    python -m benchmarks.vllm --experts --out DIR                                    (one GPU)

The layers that are timed have the shapes of Qwen3-30B-A3B, and weights that nobody trained. Needs vLLM >= 0.26 beside
Crossdock. `plan.py` says what is run, `launch.py` starts an engine's ranks, `engine.py` is one of them; `tokens.py`
compares what they say, of the checkpoints of `models.py`; `serving.py` says what servers are asked, `serve.py` starts
them and the load generator, `child.py` is either; `cases.py` and `kernels.py` are the experts. Only `engine.py`,
`child.py` and `kernels.py` import vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """As Qwen3-30B-A3B, but for layers and vocabulary.

    Attributes:
        hidden, experts, topk: H, E, K.
        inner: columns between an expert's two products.
        weights: "bf16", or "fp8" in blocks of 128 x 128, rows quantised by 128.
        positions: longest sequence.
    """

    layers: int = 16
    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    topk: int = 8
    weights: str = "bf16"
    vocabulary: int = 4096
    positions: int = 4096


QWEN3 = Model()


class Refused(Exception):
    """What is asked for cannot be measured here; the text says why."""


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows below their headings, words to the left and figures to the right."""
    table = [list(columns), *map(list, rows)]
    widths = [max(len(row[n]) for row in table) for n in range(len(columns))]
    right = [all(_is_figure(row[n]) for row in rows) for n in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if far else cell.ljust(width) for cell, width, far in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    )


def _is_figure(cell: str) -> bool:
    return not cell or cell.replace(".", "").replace("-", "").isdigit()


def cells(row: object, columns: Sequence[str]) -> list[str]:
    """These fields of a row, as text."""
    values = asdict(row)  # type: ignore[call-overload]
    return [str(values[name]) for name in columns]
