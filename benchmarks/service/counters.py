"""Where the time of requests goes, from the workers' own metrics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence

PHASES = ("queue", "dispatch", "experts", "combine")
_HISTOGRAMS = {"queue_duration_seconds": "queue", "request_duration_seconds": "request", "step_tokens": "tokens"}
_SAMPLE = r"^crossdock_(\w+?)_(sum|count)(\{.*?\})? (\S+)$"


class Counters:
    """Sums and counts of the workers' histograms."""

    def __init__(self, pages: Sequence[str]) -> None:
        self.sums = dict.fromkeys((*PHASES, *_HISTOGRAMS.values()), 0.0)
        self.counts = dict(self.sums)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for page in pages:
            with opener.open(f"http://{page}/metrics", timeout=10) as answer:
                self._add(answer.read().decode())

    def _add(self, text: str) -> None:
        for name, kind, labels, value in re.findall(_SAMPLE, text, re.MULTILINE):
            key = _HISTOGRAMS.get(name)
            if name == "step_phase_duration_seconds":
                key = next(phase for phase in PHASES[1:] if f'"{phase}"' in labels)
            if key is not None:
                (self.sums if kind == "sum" else self.counts)[key] += float(value)

    def means_since(self, before: Counters) -> dict[str, float]:
        """ms of a request, by part; tokens of a rank in a step."""
        found = {}
        for key, total in self.sums.items():
            number = self.counts[key] - before.counts[key]
            scale = 1.0 if key == "tokens" else 1e3
            found[key] = scale * (total - before.sums[key]) / number if number else 0.0
        return found
