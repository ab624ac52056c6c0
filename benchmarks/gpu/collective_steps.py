"""T7 of the table of collectives: steps of FSDP2, by who gathers the parameters of its blocks (`fsdp.py`)."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu import Unavailable, fsdp
from benchmarks.gpu.collective_targets import Line
from benchmarks.gpu.fsdp_model import SIZES, Size
from ep_kernels.telemetry import quantile

BATCHES = (1, 2, 4)
"""Sequences of a rank."""
SEED, TURNS = 1, 3


class Steps:
    """Runs of every batch: backends take turns in one model, whose losses must be those of one that NCCL alone served.

    Attributes:
        told: of each backend and batch, what `fsdp.line_of` says, for run.json.

    Args:
        steps: of a model, about.
        failures, absent: of the session; losses that differ are failures, and have no line.
        say: prints a line, on rank 0.
    """

    def __init__(self, steps: int, failures: list[str], absent: dict[str, None], say: Callable[[str], None]) -> None:
        self._steps, self._failures, self._absent, self._say = steps, failures, absent, say
        self._taken: dict[tuple[str, int], list[list[float]]] = {}
        self.told: list[dict[str, object]] = []

    def run(self, backends: Sequence[str], is_late: Callable[[], bool]) -> None:
        """Those that there are, at every batch that is not late. Collective."""
        for batch in BATCHES:
            if is_late():
                return
            size = replace(SIZES["dense"], batch=batch)
            try:
                self._train([name for name in fsdp.GATHERS if name.removesuffix("_staged") in backends], size)
            except Exception as error:
                self._failures.append(f"fsdp_step batch {batch}: {type(error).__name__}: {error}")
                self._say(traceback.format_exc())
                return
            finally:
                gc.collect()  # modules and their hooks hold each other
                torch.cuda.empty_cache()

    def _train(self, names: Sequence[str], size: Size) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        gathers = [found for name in names if (found := self._gathering(name, size)) is not None]
        each = max(1, self._steps // (TURNS * len(gathers)) - fsdp.SETTLE)
        taken = fsdp.in_turns(gathers, size, TURNS, each, SEED, device)
        for used in gathers:
            used.close()
        del gathers
        gc.collect()
        torch.cuda.empty_cache()
        first = next(iter(taken.values()))[0]
        want = fsdp.trained("nccl", size, len(first.losses), SEED, device).losses
        step = first.first_other(want)
        if step is not None:
            self._failures.append(f"fsdp_step batch {size.batch}: from step {step} other losses than nccl alone")
        for name, turns in taken.items():
            whole = fsdp.Trained([ms for turn in turns for ms in turn.ms], max(t.peak_gib for t in turns), first.losses)
            line = fsdp.line_of(name, "dense", size, whole) | {"first_other_loss": step}
            self.told.append(line)
            if step is None:
                self._taken[name, size.batch] = [[1e3 * ms for ms in turn.ms] for turn in turns]
            medians = ", ".join(f"{quantile(turn.ms, 0.5):.1f}" for turn in turns)
            self._say(f"{name:10} fsdp_step batch {size.batch}: {medians} ms by turn, {line['peak_gib']} GiB")

    def _gathering(self, name: str, size: Size) -> fsdp.Gathering | None:
        try:
            return fsdp.gathering(name, size)
        except Unavailable as error:
            self._absent[str(error)] = None
            return None

    def lines(self, ranks: int) -> list[Line]:
        """Rows of the csv: m is sequences of a rank, n and k the length and width of one."""
        made = []
        for (name, batch), runs in self._taken.items():
            flat, medians = [us for run in runs for us in run], [quantile(run, 0.5) for run in runs]
            size = SIZES["dense"]
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
