"""`crossdock demo`: is a model the same when its experts live in other processes?

For each family a small random model is written to disk and run as plain `transformers`, in float32 and in bfloat16.
Then, for each dtype, a control plane and its workers serve the experts (four on this CPU, or one on each GPU), the same
model is attached to them, and both are compared by the criteria of `compare.py`. Nothing is downloaded, everything is
seeded.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.text import Text

from crossdock.client import ClientError, attach
from crossdock.common.announce import metrics_url
from crossdock.common.settings import SecurityConfig
from crossdock.common.transports import needs_gpu
from crossdock.demo import ALL, FAMILIES, hosts, report
from crossdock.demo.compare import Comparison, judge_bf16, judge_fp32
from crossdock.demo.every import run_every
from crossdock.demo.hosts import HostPlace
from crossdock.demo.models import write_checkpoint
from crossdock.demo.report import Row, as_dict, notes, shorten, table
from crossdock.demo.stage import FORM_TIMEOUT_S, Name, Stage, num_gpus, serving
from crossdock.host.supervisor import SupervisorError


def find_text(num_bytes: int) -> tuple[str, bytes]:
    """(where it is from, text of at least `num_bytes` bytes): the README of this repository or of the installed
    distribution, else a page that is packaged."""
    for text in (_checkout(), _distribution()):
        if len(text) >= num_bytes:
            return "README.md", text
    page = (files("crossdock.demo") / "text.txt").read_bytes()
    return "packaged text", page * -(-num_bytes // len(page))


def token_ids(text: bytes, num_rows: int, num_columns: int) -> torch.Tensor:
    """The first bytes of a text as int64 ids [rows, columns]: a token is a byte, so nothing has to be downloaded."""
    return torch.tensor(list(text[: num_rows * num_columns]), device="cpu").view(num_rows, num_columns)


def _checkout() -> bytes:
    path = Path(__file__).parents[3] / "README.md"
    return path.read_bytes() if path.is_file() else b""


def _distribution() -> bytes:
    try:
        return str(metadata.metadata("crossdock").json.get("description", "")).encode()
    except metadata.PackageNotFoundError:
        return b""


DTYPES: dict[Name, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_PROMPTS, PROMPT_BYTES, NUM_NEW_TOKENS = 4, 64, 32
TEXT_ROWS, TEXT_COLUMNS = 4, 256
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plain:
    """What the plain model says.

    Attributes:
        tokens: int64 [B, G], greedily generated in float32.
        exact: float32 [B, S, V], teacher-forced logits of the float32 run.
        rounded: the same of the bfloat16 run.
    """

    tokens: torch.Tensor
    exact: torch.Tensor
    rounded: torch.Tensor


def run_demo(
    families: Sequence[str] = tuple(FAMILIES),
    console: Console | None = None,
    *,
    transport: str = "cpu",
    num_workers: int | None = None,
    security: SecurityConfig | None = None,
    as_json: bool = False,
    num_hosts: int = 1,
    no_namespaces: str | None = "not asked for",
) -> int:
    """Run the whole comparison and print the table.

    Args:
        families, transport: known ones, see `check_names`. console: where to print.
        num_workers: None: four on a CPU, one per GPU otherwise.
        security: certificates and tokens of every part; None: plain text on loopback.
        as_json: print the rows as JSON on stdout, and all else on stderr.
        num_hosts: 2: half of the workers are another host, which the others reach over the network.
        no_namespaces: why that host is only another domain on loopback; None: it is another network namespace, and this
            process is in one of its own.

    Returns:
        0 if every criterion was met, else 1; the reasons are printed, and logs kept.

    Raises:
        ConfigFileError: too few GPUs.
    """
    where = Stage.of(transport, num_workers, num_gpus() if needs_gpu(transport) else 0)
    where = replace(where, security=security or where.security).on_hosts(num_hosts)
    console = console or Console(stderr=as_json)
    if ALL in families:
        return run_every(where, console, as_json=as_json)
    with hosts.namespaces() if no_namespaces is None else nullcontext(hosts.LOOPBACK) as places:
        if num_hosts > 1:
            apart = f"two domains on loopback ({no_namespaces})" if no_namespaces else "two network namespaces"
            console.print(f"hosts: {apart}; shared memory inside, tcp between", soft_wrap=True, highlight=False)
        return _play(families, where, places, console, as_json=as_json)


def _play(
    families: Sequence[str], where: Stage, places: Sequence[HostPlace], console: Console, *, as_json: bool
) -> int:
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="crossdock-demo-"))
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    source, text = find_text(TEXT_ROWS * TEXT_COLUMNS)
    models = f"random weights, on {where.device}, in {folder}"
    console.print(f"text: {source}, byte by byte; models: {models}", soft_wrap=True)
    rows: list[Row] = []
    problem = ""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small, and the workers want the other cores
    try:
        for family in families:
            for row in _run_family(family, folder / family, text, where, places, console):
                rows.append(row)
    except (SupervisorError, ClientError, OSError, HTTPException) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(num_threads)
    if as_json:
        print(json.dumps(as_dict(rows, problem), indent=1))
    if _report(rows, problem, console):
        console.print(f"[green]every criterion met[/] in {time.monotonic() - started:.0f} s")
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    console.print(f"logs: {folder}", soft_wrap=True)
    return 1


def _report(rows: Sequence[Row], problem: str, console: Console) -> bool:
    """Print the table and what failed; True if nothing did."""
    if rows:
        console.print(table(rows))
        console.print(notes(rows), soft_wrap=True, highlight=False)
    failures = [f"{row.family} {row.dtype}: {reason}" for row in rows for reason in row.verdict.failures]
    for reason in [*failures, *([problem] if problem else [])]:
        console.print(Text.assemble(("failed ", "red"), reason), soft_wrap=True)
    return not (failures or problem)


def _run_family(
    family: str, folder: Path, text: bytes, where: Stage, places: Sequence[HostPlace], console: Console
) -> Iterator[Row]:
    """Write the model, run it plain, then serve it once per dtype."""
    write_checkpoint(family, folder, dtype=torch.bfloat16, **FAMILIES[family])
    plain = functools.cache(lambda: _run_plain(folder, text, where.device))
    for name in DTYPES:
        yield _serve(family, folder, name, plain, text, where, places, console)


def _run_plain(folder: Path, text: bytes, device: torch.device) -> Plain:
    exact, rounded = _load(folder, torch.float32, device), _load(folder, torch.bfloat16, device)
    ids = token_ids(text, TEXT_ROWS, TEXT_COLUMNS)
    return Plain(_generate(exact, text), _logits(exact, ids), _logits(rounded, ids))


def _serve(
    family: str,
    folder: Path,
    name: Name,
    plain: Callable[[], Plain],
    text: bytes,
    where: Stage,
    places: Sequence[HostPlace],
    console: Console,
) -> Row:
    """Start the service, run the plain model meanwhile, attach the model to the service, compare, scrape."""
    started = time.monotonic()
    with serving(folder, name, where, places) as group:
        plain()
        view = group.wait_serving(FORM_TIMEOUT_S)
        urls = [metrics_url(member.http_address, https=member.https) for member in view.members]
        up_s = time.monotonic() - started
        workers_are = f"{where.num_workers} workers ({where.transport}) behind {group.control_address}"
        console.print(f"{family} {name}: {workers_are}, up in {up_s:.1f} s")
        console.print(f"  metrics until it ends: {' '.join(shorten(urls))}", soft_wrap=True, highlight=False)
        model = _load(folder, DTYPES[name], where.device)
        with attach(model, group.control_address, timeout_s=CALL_TIMEOUT_S, security=where.security):
            verdict, tokens_per_s = _compare(model, DTYPES[name], plain(), text)
        phases = report.phases(view.members, group.security)
    return Row(family, name, verdict, phases, tokens_per_s, urls)


def _compare(model: Any, dtype: torch.dtype, plain: Plain, text: bytes) -> tuple[Comparison, float]:
    """The verdict, and teacher-forced tokens per second."""
    ids = token_ids(text, TEXT_ROWS, TEXT_COLUMNS)
    tokens = _generate(model, text) if dtype is torch.float32 else None
    started = time.monotonic()
    logits = _logits(model, ids)
    tokens_per_s = ids.numel() / (time.monotonic() - started)
    if tokens is not None:
        return judge_fp32(plain.tokens, tokens, plain.exact, logits), tokens_per_s
    return judge_bf16(plain.exact, plain.rounded, logits), tokens_per_s


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    automatic: Any = transformers.AutoModelForCausalLM
    return automatic.from_pretrained(folder, dtype=dtype).eval().to(device)


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Teacher-forced logits [B, S, V] in float32, in host memory."""
    return model(ids.to(model.device), use_cache=False).logits.float().cpu()  # type: ignore[no-any-return]


def _generate(model: Any, text: bytes) -> torch.Tensor:
    """Greedily generated ids [B, G], without the prompts, in host memory."""
    prompts = token_ids(text, NUM_PROMPTS, PROMPT_BYTES).to(model.device)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids: torch.Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return ids[:, PROMPT_BYTES:].cpu()
