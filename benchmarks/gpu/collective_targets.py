"""What the table of collectives says of itself: ratios, and what is wanted of each row T1 to T8. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu.collective_cases import KIB, MIB, ROWS, SHAPES

EFFICIENCY = {
    (1792, 4096): {4096: 0.60, 8192: 0.74, 16384: 0.82},
    (3584, 8192): {4096: 0.84, 8192: 0.91, 16384: 0.95},
    (6656, 16384): {4096: 0.86, 8192: 0.90, 16384: 0.92},
}
"""T4, of (N, K), by M: max(matmul, all-gather) over the fused time."""


@dataclass(frozen=True)
class Line:
    """One row of the csv: the columns are its fields.

    Attributes:
        ratio: the time of `ratio_to` over that of our line, in our lines (a yardstick: what it would take alone); that
            of this line over our best, which `ratio_to` names, in the lines of others.
    """

    t: str
    backend: str
    op: str
    algorithm: str
    ranks: int
    bytes_per_rank: int
    m: int
    n: int
    k: int
    dtype: str
    sms: int | str
    timing: str
    p50_us: float
    p99_us: float
    bound_us: float | str
    gbps: float | str
    iterations: int
    runs: int
    spread_pct: float | str = ""
    ratio: float | str = ""
    ratio_to: str = ""


@dataclass(frozen=True)
class Target:
    """What is wanted of one figure: `value` `sign` `target`.

    Attributes:
        met: "yes", "no", or "void: " and why the figure says nothing: the peer does not do what the row is about.
    """

    t: str
    what: str
    value: float
    sign: str
    target: float
    met: str


OVERLAPPED = 0.8
"""Most of its own sequence that a peer's overlap may take, to be compared with ours as an overlap."""
ALONE = {
    "matmul_beside_gather": ("matmul", "all_gather"),
    "all_gather_matmul": ("matmul", "all_gather"),
    "matmul_all_reduce": ("matmul",),
}
"""Of which lines our own time is a multiple: the longest."""


class Table:
    """The lines, by what they are."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    def find(self, **wanted: object) -> list[Line]:
        """Lines with these fields, the fastest first."""
        found = [line for line in self.lines if all(getattr(line, name) == value for name, value in wanted.items())]
        return sorted(found, key=lambda line: line.p50_us)

    def alike(self, line: Line, **wanted: object) -> list[Line]:
        """Lines that do the same, of any backend."""
        names = ("t", "op", "bytes_per_rank", "m", "n", "k", "timing")
        return self.find(**{name: getattr(line, name) for name in names}, **wanted)

    def alone(self, line: Line) -> Line | None:
        """The yardstick of one of our lines: the longest of its parts, each as fast as anybody does it."""
        found = []
        for op in ALONE.get(line.op, ()):
            shape = (
                {"m": line.m, "n": line.n, "k": line.k} if op == "matmul" else {"bytes_per_rank": line.bytes_per_rank}
            )
            found += self.find(t=line.t, op=op, **shape)[:1]
        return max(found, key=lambda part: part.p50_us, default=None)


def named(line: Line) -> str:
    """A line among those of its row and size."""
    return f"{line.backend} {line.op} sms={line.sms}"


def with_ratios(lines: Sequence[Line]) -> list[Line]:
    """The same with `ratio` and `ratio_to`."""
    table, made = Table(lines), []
    for line in lines:
        if line.backend == "crossdock":
            part = table.alone(line)
            known = {} if part is None else {"ratio": round(part.p50_us / line.p50_us, 3), "ratio_to": named(part)}
        else:
            ours = table.alike(line, backend="crossdock")[:1]
            known = {"ratio": round(line.p50_us / ours[0].p50_us, 3), "ratio_to": named(ours[0])} if ours else {}
        made.append(replace(line, **known))  # type: ignore[arg-type]
    return made


Judged = tuple[str, str, float | None, str, float] | tuple[str, str, float | None, str, float, str]
"""(row, what, value, sign, target) and, where it is void, why; no value: not measured."""


def judged(lines: Sequence[Line], ranks: int) -> list[Target]:
    """Every figure that has a target and was measured. With fewer ranks than 8 the targets are those of 4."""
    table, eight, made = Table(lines), ranks == 8, []
    for row in ROWS_OF_TABLE:
        for t, what, value, sign, target, *void in row(table, eight):
            if value is not None:
                met = value >= target if sign == ">=" else value <= target
                words = next((f"void: {why}" for why in void if why), "yes" if met else "no")
                made.append(Target(t, what, round(value, 3), sign, round(target, 3), words))
    return made


def _void(overlapped: Sequence[Line], sequential: Sequence[Line]) -> str:
    """Why a peer's overlapped time says nothing of overlap; "": it does."""
    if not overlapped or not sequential:
        return ""
    share = overlapped[0].p50_us / sequential[0].p50_us
    return "" if share <= OVERLAPPED else f"its overlap takes {share:.2f} of its own sequence"


def _to_part(mine: Sequence[Line], part: Line | None) -> float | None:
    """Time of ours over that of the longer part alone; None where one is missing."""
    return mine[0].p50_us / part.p50_us if mine and part else None


def _over(others: Sequence[Line], ours: Sequence[Line]) -> float | None:
    return others[0].p50_us / ours[0].p50_us if others and ours else None


def _gathers(table: Table, eight: bool) -> Iterator[Judged]:
    for mib, least in zip((16, 128, 512), (1.05, 1.05, 1.0) if eight else (1.10, 1.08, 1.08), strict=True):
        kind = {"t": "1, 2", "op": "all_gather", "bytes_per_rank": mib * MIB}
        mine = [line for line in table.find(**kind, backend="crossdock") if line.sms not in (0, "auto")]
        yield "1", f"all-gather {mib} MiB, to nccl", _over(table.find(**kind, backend="nccl"), mine), ">=", least
        few = table.find(**kind, backend="crossdock", sms=8)
        share = float(few[0].bound_us) / few[0].p50_us if few else None
        yield "1", f"all-gather {mib} MiB on 8 SMs, share of the bound", share, ">=", 0.93
        with_8 = table.find(**kind, backend="nccl", sms=8)
        yield "1", f"all-gather {mib} MiB on 8 SMs, to nccl with 8 CTAs", _over(with_8, few), ">=", 1.25


def _copies(table: Table, eight: bool) -> Iterator[Judged]:
    for mib, least in ((16, 1.15), (128, 1.0), (512, 1.0)):
        kind = {"t": "1, 2", "op": "all_gather", "bytes_per_rank": mib * MIB}
        mine = table.find(**kind, backend="crossdock", sms=0)
        theirs = table.find(**kind, backend="nccl_ce")
        yield "2", f"all-gather {mib} MiB by copy engines, to nccl_ce", _over(theirs, mine), ">=", least
        if mib >= 128:
            yield (
                "2",
                f"all-gather {mib} MiB by copy engines, to nccl",
                _over(table.find(**kind, backend="nccl"), mine),
                ">=",
                0.97,
            )


def _beside(table: Table, eight: bool) -> Iterator[Judged]:
    sizes = sorted({line.bytes_per_rank for line in table.find(t="3", op="matmul_beside_gather")})
    for size in sizes:
        kind = {"t": "3", "op": "matmul_beside_gather", "bytes_per_rank": size}

        def together(backend: str, kind: dict[str, object] = kind) -> list[Line]:
            return [line for line in table.find(**kind, backend=backend) if line.algorithm != "sequential"]

        def apart(backend: str, kind: dict[str, object] = kind) -> list[Line]:
            return table.find(**kind, backend=backend, algorithm="sequential")

        mine, what = together("crossdock"), f"matmul beside a gather of {size // MIB} MiB"
        yield "3", f"{what}, share of the gather that is hidden", _hidden(table, mine), ">=", 0.95
        if size == sizes[-1]:
            part = table.alone(mine[0]) if mine else None
            yield "3", f"{what}, over the longer alone", _to_part(mine, part), "<=", 1.08
            yield "3", f"{what}, one after the other, to ours", _over(apart("crossdock"), mine), ">=", 1.70
        for backend, least in (("nccl", 1.14 if eight else 1.10), ("nccl_ce", 1.0), ("torch", 1.0)):
            theirs = together(backend)
            yield "3", f"{what}, {backend} to ours", _over(theirs, mine), ">=", least, _void(theirs, apart(backend))


def _hidden(table: Table, together: Sequence[Line]) -> float | None:
    """The share of a gather, as long as it takes the same backend alone, that a product beside it hides."""
    if not together:
        return None
    line = together[0]
    product = table.find(t=line.t, op="matmul", m=line.m, n=line.n, k=line.k)
    gather = table.find(t=line.t, op="all_gather", bytes_per_rank=line.bytes_per_rank, backend=line.backend)
    if not product or not gather:
        return None
    shorter = min(product[0].p50_us, gather[0].p50_us)
    return (product[0].p50_us + gather[0].p50_us - line.p50_us) / shorter


def _gather_matmuls(table: Table, eight: bool) -> Iterator[Judged]:
    to_nccl = {4096: (1.05, 1.29, 1.15), 8192: (1.34, 1.42, 1.22), 16384: (1.54, 1.47, 1.20)}
    for column, (n, k) in enumerate(SHAPES):
        for m in ROWS:
            kind = {"t": "4", "op": "all_gather_matmul", "m": m, "n": n, "k": k}
            mine, what = table.find(**kind, backend="crossdock"), f"all-gather and matmul {m} x {n} x {k}"
            part = table.alone(mine[0]) if mine else None
            longer = _to_part(mine, part)
            yield "4", f"{what}, efficiency", longer and 1 / longer, ">=", EFFICIENCY[n, k][m]
            least, ratio = to_nccl[m][column], _over(table.find(**kind, backend="nccl"), mine)
            if not eight and mine:
                gather = table.find(t="4", op="all_gather", bytes_per_rank=mine[0].bytes_per_rank, backend="nccl")
                parts = [line[0].p50_us for line in (gather, table.find(t="4", op="matmul", m=m, n=n, k=k)) if line]
                least, ratio = (0.9 * sum(parts) / max(parts), ratio) if len(parts) == 2 else (least, None)
            yield "4", f"{what}, to cublas and nccl", ratio, ">=", least
            if m >= 8192:
                yield "4", f"{what}, to torch's fused", _over(table.find(**kind, backend="torch"), mine), ">=", 1.05


def _scatters(table: Table, eight: bool) -> Iterator[Judged]:
    for n, k in SHAPES:
        for m in ROWS[1:]:
            kind = {"t": "4", "op": "matmul_reduce_scatter", "m": m, "n": k, "k": n}
            ratio = _over(table.find(**kind, backend="torch"), table.find(**kind, backend="crossdock"))
            yield "4", f"matmul and reduce-scatter {m} x {k} x {n}, to torch's fused", ratio, ">=", 1.05


def _reductions(table: Table, eight: bool) -> Iterator[Judged]:
    most_us = (6.0, 8.0, 11.0, 15.0) if eight else (4.5, 6.0, 8.5, 13.0)
    for size, most in zip((8 * KIB, 64 * KIB, 256 * KIB, MIB), most_us, strict=True):
        found = table.find(t="5", op="all_reduce", bytes_per_rank=size)
        mine, what = [line for line in found if line.backend == "crossdock"], f"all-reduce {size // KIB} KiB in a graph"
        yield "5", f"{what}, us", mine[0].p50_us if mine else None, "<=", most
        others = [line for line in found if line.backend != "crossdock"]
        yield "5", f"{what}, to the best of others", _over(others, mine), ">=", 1.10
    for op, sizes in (("all_reduce", (8, 64)), ("reduce_scatter", (16, 128))):
        for mib in sizes:
            kind = {"t": "5", "op": op, "bytes_per_rank": mib * MIB}
            ratio = _over(table.find(**kind, backend="nccl"), table.find(**kind, backend="crossdock"))
            yield "5", f"{op.replace('_', '-')} {mib} MiB, to nccl", ratio, ">=", 0.98


def _all_reduces(table: Table, eight: bool) -> Iterator[Judged]:
    kind = {"t": "6", "op": "matmul_all_reduce"}
    mine = table.find(**kind, backend="crossdock")
    part = table.alone(mine[0]) if mine else None
    yield "6", "matmul and all-reduce, over the matmul alone", _to_part(mine, part), "<=", 1.06
    for backend in ("nccl", "nccl_symm"):
        theirs, after = (table.find(**kind, backend=backend, algorithm=how) for how in ("two_streams", "sequential"))
        slower = (
            "its two streams take longer than one" if theirs and after and theirs[0].p50_us > after[0].p50_us else ""
        )
        yield "6", f"{backend} in 4 chunks on 2 streams, to ours", _over(theirs, mine), ">=", 1.03, slower


def _steps(table: Table, eight: bool) -> Iterator[Judged]:
    def ratios(backend: str) -> list[float]:
        theirs = table.find(t="7", op="fsdp_step", backend=backend)
        found = [_over([line], table.alike(line, backend="crossdock")) for line in theirs]
        return [ratio for ratio in found if ratio is not None]

    nccl, copies = ratios("nccl"), ratios("nccl_ce")
    yield "7", "step of FSDP2, nccl to ours, worst batch", min(nccl, default=None), ">=", 0.99
    yield "7", "step of FSDP2, nccl to ours, best batch", max(nccl, default=None), ">=", 1.03
    yield "7", "step of FSDP2, nccl_ce to ours, worst batch", min(copies, default=None), ">=", 1.0


ROWS_OF_TABLE: tuple[Callable[[Table, bool], Iterator[Judged]], ...] = (
    _gathers, _copies, _beside, _gather_matmuls, _scatters, _reductions, _all_reduces, _steps,
)  # fmt: skip
"""By row, T1 first."""
