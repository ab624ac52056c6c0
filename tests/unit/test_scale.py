"""The forecast of large clusters: its rows are those of drawn routings, and it is as far off as its page says."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import facts, scale
from benchmarks.scale import BF16, POD, SIZES, TOKENS, WAYS, Step, rows_between_hosts, rows_over_links, time_us

DRAWN = 4000


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 2), (16, 8), (32, 8), (8, 8), (64, 4)])
def test_rows_are_those_of_drawn_routings(ranks: int, gpus: int) -> None:
    """Mean over tokens of rank 0, and for NVLink what the rails of a host send on, by symmetry as many."""
    generator = torch.Generator().manual_seed(ranks)
    ids = torch.rand(DRAWN, scale.EXPERTS, generator=generator).argsort(1)[:, : scale.TOPK]
    owner = ids // (scale.EXPERTS // ranks)
    on_rank = (owner[:, :, None] == torch.arange(ranks)).any(1)
    on_host = (owner[:, :, None] // gpus == torch.arange(ranks // gpus)).any(1)
    away, own = on_rank[:, gpus:].sum(), on_rank[:, 1:gpus].sum()
    passed_on = away - on_rank[:, gpus::gpus].sum()  # all but the copies that stay with the rail
    drawn = {
        "per expert": ((owner >= gpus).sum(), ((owner > 0) & (owner < gpus)).sum()),
        "direct": (away, own),
        "two hops": (on_host[:, 1:].sum(), own + passed_on),
    }
    for way, (between, over) in drawn.items():
        assert rows_between_hosts(way, ranks, gpus) == pytest.approx(float(between) / DRAWN, abs=0.05)
        assert rows_over_links(way, ranks, gpus) == pytest.approx(float(over) / DRAWN, abs=0.1)


def test_what_more_tokens_hosts_and_hops_cost() -> None:
    for ranks in SIZES:
        rows = [rows_between_hosts(way, ranks, POD.gpus) for way in WAYS]
        assert rows[0] >= rows[1] >= rows[2]
        assert (rows[2] == 0) == (ranks == POD.gpus)
        for way in WAYS:
            times = [time_us(POD, Step(ranks, tokens, BF16), way) for tokens in TOKENS]
            assert times == sorted(times)
            assert times[0] >= POD.fixed_us
    assert scale.crossover(POD, 8, BF16) is None
    wins = [scale.crossover(POD, ranks, BF16) for ranks in SIZES[1:]]
    assert all(least is not None and least <= 128 for least in wins)


def test_the_forecast_and_how_far_it_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--out", str(tmp_path)]) == 0
    assert "two hops win" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} >= {"scale.csv", "check.csv", "run.json", "scale.svg", "gain.svg"}
    assert POD.name in facts.read(tmp_path)["config"]
    off = [abs(one.off - 1) for one in scale.checks()]
    assert statistics.median(off) < 0.2
    assert max(off) < 0.4
