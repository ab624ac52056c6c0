"""`crossdock demo --families all`: each MoE family of the installed `transformers` with its experts in other processes.

A tiny random model of each family is written to disk, served by real workers, and compared token by token with the
plain model; families that are not served are printed with the reason. Half a minute for each on two cores.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from crossdock.client import attach
from crossdock.demo import hosts
from crossdock.demo.stage import FORM_TIMEOUT_S, Stage, serving
from crossdock.demo.tiny import VOCAB_SIZE, known_to_transformers, next_tokens, tiny_model
from crossdock.worker.checkpoints.families import FAMILIES, NOT_SERVED

NUM_PROMPTS, NUM_TOKENS = 4, 64
MAX_DIFFERENCE = 1e-3
"""Largest difference of logits whose standard deviation is between 0.5 and 10."""


@dataclass(frozen=True, slots=True)
class Served:
    """One family.

    Attributes:
        family: model_type.
        tokens: "equal/compared"; empty: not served.
        difference: largest |remote - plain| of any logit.
        reason: why it is not served, or what failed; empty: all tokens are equal.
        failed: served, and not equal.
    """

    family: str
    tokens: str = ""
    difference: float = 0.0
    reason: str = ""
    failed: bool = False


def run_every(where: Stage, console: Console, *, as_json: bool) -> int:
    """Print one row per family; returns 0 if every family is served with equal tokens or listed with a reason."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(tempfile.mkdtemp(prefix="crossdock-demo-"))
    found = []
    for family in known_to_transformers():
        found.append(_run(family, folder / family, where))
        console.print(f"{family}: {found[-1].tokens or 'not served'} {found[-1].reason}", soft_wrap=True)
        if not found[-1].failed:
            shutil.rmtree(folder / family, ignore_errors=True)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    console.print(_table(found))
    failed = [each.family for each in found if each.failed]
    console.print(
        f"failed: {', '.join(failed)}; logs: {folder}" if failed else "[green]every family equal or listed[/]"
    )
    return bool(failed)


def _run(family: str, folder: Path, where: Stage) -> Served:
    if family not in FAMILIES:
        reason = NOT_SERVED.get(family, "unknown: neither served nor listed")
        return Served(family, reason=reason, failed=family not in NOT_SERVED)
    try:
        return _compare(family, folder, where)
    except Exception as error:  # one family must not end the others
        return Served(family, reason=f"{type(error).__name__}: {error}", failed=True)


def _compare(family: str, folder: Path, where: Stage) -> Served:
    model = tiny_model(family)
    model.save_pretrained(folder)
    model = model.to(where.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_PROMPTS, NUM_TOKENS), generator=generator, device="cpu").to(where.device)
    logits, tokens = next_tokens(model, ids)
    with serving(folder, "float32", where, hosts.LOOPBACK) as group:
        group.wait_serving(FORM_TIMEOUT_S)
        with attach(model, group.control_address, security=where.security):
            remote_logits, remote_tokens = next_tokens(model, ids)
    num_equal, difference = int((remote_tokens == tokens).sum()), float((remote_logits - logits).abs().max())
    good = num_equal == tokens.numel() and difference <= MAX_DIFFERENCE
    reason = "" if good else f"logits differ by {difference:.3g}"
    return Served(family, f"{num_equal}/{tokens.numel()}", difference, reason, not good)


def _table(found: Sequence[Served]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption=f"transformers {transformers.__version__}, float32")
    for heading in ("family", "tokens equal", "max logit diff", "reason"):
        made.add_column(heading)
    for each in found:
        colour = "red" if each.failed else "green" if each.tokens else "dim"
        difference = f"{each.difference:.1g}" if each.tokens else ""
        made.add_row(each.family, f"[{colour}]{each.tokens or 'not served'}[/]", difference, each.reason)
    return made
