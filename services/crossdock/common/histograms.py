"""Histograms with bounds close enough for quantiles, that take many values at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

from prometheus_client import Histogram

_DIGITS = ("1", "1.5", "2", "3", "4", "6", "8")


def decades(first: int, last: int) -> tuple[float, ...]:
    """Bounds from 10^first to 10^last, each at most 1.5 times the one before. Parsed, because computed ones print as
    le="4.9999999999999996e-06"."""
    return (*(float(f"{digit}e{power}") for power in range(first, last) for digit in _DIGITS), float(f"1e{last}"))


class BatchedHistogram(Histogram):
    """A histogram that takes many values at once: a batch is sorted into the buckets outside of their locks."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a value. Without an exemplar its bucket is found by halves, not by one comparison a bucket."""
        if exemplar:
            super().observe(amount, exemplar)
            return
        made: Any = self
        made._raise_if_not_observable()
        made._sum.inc(amount)
        made._buckets[bisect_left(made._upper_bounds, amount)].inc(1)

    def observe_many(self, values: Iterable[float]) -> None:
        """Count values."""
        made: Any = self
        made._raise_if_not_observable()
        ordered = sorted(values)
        if not ordered:
            return
        made._sum.inc(sum(ordered))
        first = bisect_left(made._upper_bounds, ordered[0])
        last = bisect_left(made._upper_bounds, ordered[-1], first)
        counted = 0
        for bound, bucket in zip(made._upper_bounds[first : last + 1], made._buckets[first : last + 1], strict=True):
            below = bisect_right(ordered, bound, counted)
            if below > counted:
                bucket.inc(below - counted)
            counted = below
