"""T7 of the table of collectives: steps of FSDP2, by who gathers the parameters of its blocks (`fsdp.py`)."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu import fsdp
from benchmarks.gpu.collective_targets import Line
from ep_kernels.telemetry import quantile

BATCHES = (1, 2, 4)
"""Sequences of a rank."""
SEED = 1


class Steps:
    """Runs of every backend and batch.

    Attributes:
        told: of each run, what `fsdp.line_of` says, for run.json.

    Args:
        steps: of a run.
        failures, absent: of the session; losses that differ are failures, and have no line.
        say: prints a line, on rank 0.
    """

    def __init__(self, steps: int, failures: list[str], absent: dict[str, None], say: Callable[[str], None]) -> None:
        self._steps, self._failures, self._absent, self._say = steps, failures, absent, say
        self._taken: dict[tuple[str, int], list[list[float]]] = {}
        self._losses: dict[int, list[float]] = {}  # by batch, of the first run
        self.told: list[dict[str, object]] = []

    def run(self, backends: Sequence[str]) -> None:
        """Each once, and the first of them again at the first batch: does it repeat its own losses? Collective."""
        listed = [name for name in fsdp.GATHERS if name in backends]
        for batch in BATCHES:
            size = replace(fsdp.SIZES["dense"], batch=batch)
            for name in listed + listed[:1] * (batch == BATCHES[0]):
                self._train(name, size)

    def _train(self, name: str, size: fsdp.Size) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            found = fsdp.trained(name, size, self._steps, SEED, device)
        except Exception as error:
            self._failures.append(f"{name} fsdp_step batch {size.batch}: {type(error).__name__}: {error}")
            self._say(traceback.format_exc())
            return
        finally:
            gc.collect()  # modules and their hooks hold each other
            torch.cuda.empty_cache()
        step = found.first_other(self._losses.setdefault(size.batch, found.losses))
        line = fsdp.line_of(name, "dense", size, found) | {"first_other_loss": step}
        self.told.append(line)
        if step is not None:
            first = next(one["all_gather"] for one in self.told if one["batch"] == size.batch)
            self._failures.append(f"{name} fsdp_step batch {size.batch}: from step {step} other losses than {first}")
        else:
            self._taken.setdefault((name, size.batch), []).append([1e3 * ms for ms in found.ms])
        self._say(f"{name:10} fsdp_step batch {size.batch}: {line['p50_ms']} ms, {line['peak_gib']} GiB")

    def lines(self, ranks: int) -> list[Line]:
        """Rows of the csv: m is sequences of a rank, n and k the length and width of one."""
        made = []
        for (name, batch), runs in self._taken.items():
            flat, medians = [us for run in runs for us in run], [quantile(run, 0.5) for run in runs]
            size = fsdp.SIZES["dense"]
            made.append(
                Line(
                    t="7", backend=name, op="fsdp_step", algorithm="dense", ranks=ranks, bytes_per_rank=0, m=batch,
                    n=size.sequence, k=size.hidden, dtype="bfloat16", sms="auto", timing="eager",
                    p50_us=round(quantile(flat, 0.5), 2), p99_us=round(quantile(flat, 0.99), 2), bound_us="", gbps="",
                    iterations=len(flat), runs=len(runs),
                    spread_pct=round(100 * (max(medians) / min(medians) - 1), 1) if len(runs) > 1 else "",
                )
            )  # fmt: skip
        return made
