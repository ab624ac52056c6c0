"""Which cases each table has. A table is one csv; `loops` says how its cases are measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.cases import Case
from ep_kernels import Layout, Mode

PAYLOADS = ((False, False), (True, False), (True, True))
"""(quantize, fp8_combine)."""
LL_TOKENS = {"full": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "core": (1, 8, 32, 64, 128), "quick": (1, 32, 128)}
LL_FP8_TOKENS = {"full": (1, 8, 32, 64, 128), "core": (128,), "quick": (1, 32, 128)}
SWEEP_SMS = {"full": (8, 16, 24, 32, 48, 64, 96, 132), "core": (8, 16, 24, 32, 64, 132), "quick": (8, 24, 132)}
LL_SMS = {"full": (8, 16, 24, 32, 48, 64, 96, 132), "core": (8, 24, 64, 132), "quick": (8, 32, 132)}
SWEEP_TOKENS = (512, 4096, 8192)
LAYER_SMS = {"full": (16, 24, 32, 64), "core": (24, 64), "quick": (24,)}
LAYER_SHAPES = {(7168, 256): 2048, (2048, 128): 768}
"""By (H, E): columns between the two products of an expert. DeepSeek-V3's layers, and those of Qwen3-30B-A3B, which
compute less for each byte that travels."""
LAYER_TOKENS = {"full": (1024, 4096), "core": (4096,), "quick": (1024,)}
LL_SMS_TOKENS = (8, 128)
OVERLAP_TOKENS = {Mode.LL: 128, Mode.HT: 1024}
CROSSOVER_TOKENS = {
    "full": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "core": (64, 256, 512, 1024, 2048),
    "quick": (128, 512),
}


@dataclass(frozen=True)
class Loop:
    """One way to time a case.

    Attributes:
        timing: "eager", "graph" (of `measure.py`), "overlap" (of `overlap.py`) or "layer" (of `layer.py`).
        flush: L2 is flushed before each operation.
    """

    timing: str
    flush: bool


@dataclass(frozen=True)
class Measured:
    """A case and its loops."""

    case: Case
    loops: tuple[Loop, ...]
    backends: tuple[str, ...] = ()
    """None named: all of them."""


LL_LOOPS = (Loop("graph", False), Loop("graph", True), Loop("eager", False))
LL_CORE_LOOPS = LL_LOOPS[:2]
EAGER_TOKENS = (1, 128)
"""Of "core": where single calls are measured, too."""
HT_LOOPS = (Loop("eager", True),)


def cases_of(table: str, ranks: int, extent: str) -> list[Measured]:
    """The lines of a table in TABLES. `extent`: "full"; "core", what the targets name, where time is short; "quick", a
    few of each kind."""
    return list(TABLES[table](ranks, extent))


def _ll(ranks: int, extent: str) -> Iterator[Measured]:
    for tokens in LL_TOKENS[extent]:
        for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR):
            for out, back in PAYLOADS if tokens in LL_FP8_TOKENS[extent] else PAYLOADS[:1]:
                alone = extent != "core" or (tokens in EAGER_TOKENS and not out)
                case = Case(Mode.LL, layout, ranks, tokens, quantize=out, fp8_combine=back)
                yield Measured(case, LL_LOOPS if alone else LL_CORE_LOOPS)


def _ll_sms(ranks: int, extent: str) -> Iterator[Measured]:
    for tokens in LL_SMS_TOKENS:
        for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR):
            for num_sms in LL_SMS[extent]:
                case = Case(Mode.LL, layout, ranks, tokens, num_sms=num_sms)
                yield Measured(case, (Loop("graph", False),), ("crossdock",))


def _overlap(ranks: int, extent: str) -> Iterator[Measured]:
    kinds = [(Mode.LL, Layout.EXPERT_MAJOR), (Mode.HT, Layout.FLAT)]
    if extent != "core":
        kinds += [(Mode.LL, Layout.RANK_MAJOR), (Mode.HT, Layout.GROUPED)]
    for mode, layout in kinds:
        yield Measured(Case(mode, layout, ranks, OVERLAP_TOKENS[mode]), (Loop("overlap", False),), ("crossdock",))


def _ht(ranks: int, extent: str) -> Iterator[Measured]:
    flat = Case(Mode.HT, Layout.FLAT, ranks, 4096)
    grouped = replace(flat, layout=Layout.GROUPED)
    full = extent == "full"
    sizes = (4096, 1024, 8192) if full else (4096,)
    cases = [
        replace(case, tokens=tokens, quantize=fp8)
        for tokens in sizes
        for case in (flat, grouped)
        for fp8 in (False, True)
    ]
    cases += [replace(flat, tokens=8192)] if extent == "core" else []
    cases += [replace(flat, routing=routing) for routing in ("zipf", "khot")]
    cases += [replace(flat, form="cached")]
    if extent != "core":
        cases += [replace(flat, form="exact")]
        cases += [replace(flat, routing=routing) for routing in ("holes", "masked")]
    if full:
        cases += [replace(flat, quantize=True, fp8_combine=True)]
        cases += [replace(grouped, form=form) for form in ("cached", "exact")]
    for case in cases:
        yield Measured(case, HT_LOOPS)


def _formats(ranks: int, extent: str) -> Iterator[Measured]:
    """Rows that dispatch quantises, beside each other."""
    for quantize in (True, "mxfp8", "nvfp4"):
        for tokens in (8, 128):
            for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR):
                case = Case(Mode.LL, layout, ranks, tokens, quantize=quantize)
                yield Measured(case, (Loop("graph", False),), ("crossdock",))
        for layout in (Layout.FLAT, Layout.GROUPED):
            yield Measured(Case(Mode.HT, layout, ranks, 4096, quantize=quantize), HT_LOOPS, ("crossdock",))


def _sweep(ranks: int, extent: str) -> Iterator[Measured]:
    for tokens in SWEEP_TOKENS:
        for num_sms in SWEEP_SMS[extent]:
            for layout in (Layout.FLAT, Layout.GROUPED):
                yield Measured(Case(Mode.HT, layout, ranks, tokens, num_sms=num_sms), HT_LOOPS, ("crossdock",))


def _layer(ranks: int, extent: str) -> Iterator[Measured]:
    shapes = [Case(Mode.HT, Layout.GROUPED, ranks, hidden=hidden, experts=experts) for hidden, experts in LAYER_SHAPES]
    for shape, tokens, num_sms in itertools.product(shapes, LAYER_TOKENS[extent], LAYER_SMS[extent]):
        case = replace(shape, tokens=tokens, num_sms=num_sms, form="bounded")
        yield Measured(case, (Loop("layer", True),), ("crossdock",))


def _auto(ranks: int, extent: str) -> Iterator[Measured]:
    for layout in (Layout.GROUPED, Layout.FLAT)[: 1 if extent == "core" else 2]:
        for tokens in CROSSOVER_TOKENS[extent]:
            for mode in (Mode.LL, Mode.HT):
                yield Measured(Case(mode, layout, ranks, tokens), (Loop("graph", False),), ("crossdock",))


TABLES = {
    "ll": _ll, "ll_sms": _ll_sms, "overlap": _overlap, "ht": _ht, "formats": _formats, "sweep": _sweep,
    "layer": _layer, "auto": _auto,
}  # fmt: skip
FLOOR = "floor"
"""The table that has no cases: see `floor.py`."""
WANT_FLOOR = ("ll", "ll_sms")
"""Tables whose lines are compared with it."""
NAMES = (FLOOR, *TABLES)
"""All tables, in the order in which they are measured."""
GROUPS = {"ll": (FLOOR, "ll", "ll_sms", "overlap"), "ht": ("ht", "formats", "sweep", "layer", "auto")}
"""What `--cases` names."""


def chosen(tables: str, cases: str) -> list[str]:
    """Names of the tables to measure: those of a group, or those that `tables` names, comma-separated (none: all);
    the floor first where others need it. Raises ValueError for a name that there is not."""
    wanted = list(GROUPS[cases]) if cases else tables.split(",") if tables else list(NAMES)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"--tables: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
    if FLOOR not in wanted and set(wanted) & set(WANT_FLOOR):
        wanted.insert(0, FLOOR)
    return wanted
