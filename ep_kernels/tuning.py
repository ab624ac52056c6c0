"""AUTO's crossover as it was measured on this machine: what is kept, the rule, and the file.

    chosen = crossover(tokens, ll_us, ht_us)                  # pure
    remember(cache_dir(config.kernel_cache_dir) / FILE_NAME, Record(key_of(config, machine), chosen, ...))
    recall(cache_dir(config.kernel_cache_dir), key_of(config, machine))       # Record or None

`crossdock tune` measures and writes; `bringup.settle` reads. A key is matched exactly: what it names changes the times
of the two algorithms differently, so a neighbour's crossover says nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pwd
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ep_kernels.config import MoEConfig
from ep_kernels.errors import ArgumentError

FILE_NAME = "tuning.json"
FILE_VERSION = 1
MARGIN = 0.01
"""Share of its time that LL must save in a step, to be worth its buffers."""
MAX_BYTES = 16 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]
Microseconds = Annotated[float, msgspec.Meta(gt=0)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything by which the times of LL and HT shift against each other.

    Attributes:
        device: name of the GPU, or of the CPU and its cores.
        transport, num_ranks, layout, hidden_size, topk, num_experts, quantize, exact_combine: of MoEConfig.
        num_sms: of it where dispatch and combine have the same; else dispatch_sms, combine_sms.
        dtype, combine_dtype: torch's names, defaults resolved.
    """

    device: str
    transport: str
    num_ranks: int
    layout: str
    hidden_size: int
    topk: int
    num_experts: int
    dtype: str
    quantize: bool
    combine_dtype: str
    exact_combine: bool
    num_sms: int | None
    dispatch_sms: int | None = None
    combine_sms: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measurement.

    Attributes:
        key: of what.
        ll_max_tokens: the crossover, tokens per rank.
        tokens: the steps that were measured, tokens per rank, ascending.
        ll_us, ht_us: what a dispatch + combine pair of each took: slowest rank, median of runs.
        measured_at: UTC, ISO 8601.
        crossdock: version that measured.
    """

    key: Key
    ll_max_tokens: Count
    tokens: tuple[Count, ...]
    ll_us: tuple[Microseconds, ...]
    ht_us: tuple[Microseconds, ...]
    measured_at: str
    crossdock: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=FILE_VERSION, le=FILE_VERSION)]
    records: tuple[Record, ...]


def crossover(tokens: Sequence[int], ll_us: Sequence[float], ht_us: Sequence[float]) -> int:
    """Most tokens per rank that should run LL, from both curves: 0, or one of `tokens`.

    The rule: LL's times count MARGIN more than they are. A split of the ladder (LL up to there, HT above) loses, in
    each step that it gives to the slower one, that one's excess as a share of the faster's time. Chosen is the split
    that loses least in all, the smallest of equals. So a step that noise turned round moves nothing unless its
    neighbours agree; a tie costs no memory; LL always faster gives the largest step that was measured, for nothing is
    known of larger ones; LL never faster gives 0.

    Args:
        tokens: ascending, at least one.
        ll_us, ht_us: times of the same steps, above 0.
    """
    steps = [(t, ll * (1 + MARGIN), ht) for t, ll, ht in zip(tokens, ll_us, ht_us, strict=True)]
    if not steps or list(tokens) != sorted(set(tokens)):
        raise ArgumentError("tokens", "at least one, ascending", list(tokens))
    if not all(0 < us < math.inf for _, *both in steps for us in both):
        raise ArgumentError("ll_us, ht_us", "finite times above 0", (list(ll_us), list(ht_us)))
    losses = {
        split: math.fsum((ll if t <= split else ht) / min(ll, ht) - 1 for t, ll, ht in steps) for split in (0, *tokens)
    }
    return min(losses, key=lambda split: losses[split])


def ladder(most: int) -> tuple[int, ...]:
    """Steps to measure: powers of two, from 32 on one between each two, and `most` itself."""
    steps, power = {most}, 1
    while power < most:
        steps |= {power, power * 3 // 2} if power >= 32 else {power}
        power *= 2
    return tuple(sorted(step for step in steps if step <= most))


def key_of(config: MoEConfig, device: str) -> Key:
    """What a configuration is remembered by, on this device."""
    dispatch_sms, combine_sms = config.resolved_dispatch_sms, config.resolved_combine_sms
    same = dispatch_sms == combine_sms
    return Key(
        device=device,
        transport=config.transport,
        num_ranks=config.group.size,
        layout=config.resolved_layout.value,
        hidden_size=config.hidden_size,
        topk=config.topk,
        num_experts=config.num_experts,
        dtype=_name(config.dtype),
        quantize=bool(config.quantize),
        combine_dtype=_name(config.resolved_combine_dtype),
        exact_combine=config.exact_combine,
        num_sms=dispatch_sms if same else None,
        dispatch_sms=None if same else dispatch_sms,
        combine_sms=None if same else combine_sms,
    )


def cache_dir(configured: str | None) -> Path | None:
    """The folder of `MoEConfig.kernel_cache_dir`; None for a user without a home, for whom nothing is kept."""
    if configured is not None:
        return Path(configured)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "crossdock" / "kernels"
    except KeyError:
        return None


def cpu_name() -> str:
    """Name of this machine's CPU and how many cores this process may use."""
    name = os.uname().machine
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def recall(folder: Path | None, key: Key) -> Record | None:
    """What was measured for this very key, if anything was. Never raises: a file that cannot be read is warned of once
    in a process, and counts as absent."""
    if folder is None:
        return None
    return next((record for record in _records(folder / FILE_NAME) if record.key == key), None)


def remember(path: Path, record: Record) -> None:
    """Add a record, or replace the one of its key. Readers see the old file or the new one. A file that cannot be read
    is kept beside, as `tuning.json.unread`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        records = _read(path)
    except ValueError:
        os.replace(path, path.with_name(f"{path.name}.unread"))
        records = ()
    kept = tuple(old for old in records if old.key != record.key)
    text = msgspec.json.format(msgspec.json.encode(_File(version=FILE_VERSION, records=(*kept, record))), indent=1)
    write_whole(path, text + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file. Readers see the old one or the new one. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _records(path: Path) -> tuple[Record, ...]:
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        _warn(path, str(error))
        return ()


def _read(path: Path) -> tuple[Record, ...]:
    """Raises ValueError for what this version does not understand, OSError for what cannot be opened."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    if len(text) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return msgspec.json.decode(text, type=_File).records


@functools.cache
def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"{path}: expected what `crossdock tune` writes, got a file that cannot be read ({why}); AUTO uses its "
        "built-in crossover, until you tune again or remove the file",
        RuntimeWarning,
        stacklevel=2,
    )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
