"""The short form of `make attack`, plain and with mTLS; how a run is judged; how `make soak` reads a slope."""

from __future__ import annotations

import pytest

from tests.attack import __main__ as attack
from tests.attack.scene import Meter
from tests.attack.witness import Event, Witness
from tests.services.cluster import TEST_S
from tests.soak.__main__ import Sample, Slope, judge, slope_of

pytestmark = [pytest.mark.timeout(TEST_S), pytest.mark.usefixtures("forked")]


GUARDED = ("garbage", "names", "identities", "roles")
"""Short attacks that certificates change; `make attack` makes every one in both scenes."""


@pytest.mark.parametrize(("scene", "names"), [("plain", ()), ("mtls", GUARDED)], ids=["plain", "mtls"])
def test_a_group_with_default_settings_lives_through_the_short_attacks(
    scene: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = attack.main(["--short", "--scene", scene, *(word for name in names for word in ("--only", name))])
    assert status == 0, capsys.readouterr().out


def test_growth_is_that_of_the_worst_process_and_not_of_a_new_one() -> None:
    before = {1: Meter(100.0, 100.0, 9, 9), 2: Meter(50.0, 60.0, 9, 9)}
    after = {1: Meter(101.0, 103.0, 9, 9), 2: Meter(55.0, 90.0, 9, 9), 3: Meter(500.0, 500.0, 9, 9)}
    assert attack.largest(before, after, peak=True) == pytest.approx(40.0)
    assert attack.largest(before, after, peak=False) == pytest.approx(5.0)


def test_a_gap_is_the_time_between_right_answers_and_failures_do_not_end_it(tmp_path: object) -> None:
    events = [Event(1.0, "right", 0.1, ""), Event(2.0, "failed", 0.1, ""), Event(4.0, "right", 0.1, "")]
    witness = Witness("", None, [], events=events)
    assert witness.longest_gap_s(0.5, 4.5) == pytest.approx(3.0)
    assert witness.longest_gap_s(3.9, 9.0) == pytest.approx(5.0)


def test_every_attack_is_made_somewhere() -> None:
    assert all(each.plain or each.mtls for each in attack.EVERYTHING.values())
    short = {name for name, each in attack.EVERYTHING.items() if each.short}
    assert short >= {"unfinished messages", "false tickets", *GUARDED}


def _rounds(count: int, per_min: float, noise: float) -> list[Sample]:
    """Of `count` rounds of 6 s; `noise` up and down by turns."""
    values = [100.0 + 0.1 * per_min * i + noise * (-1) ** i for i in range(count)]
    return [Sample(6.0 * i, name, v, v, 5.0, 3.0) for name in ("control", "worker-0") for i, v in enumerate(values)]


def test_a_slope_is_per_minute() -> None:
    samples = _rounds(20, 3.0, 0.0)[:20]
    assert slope_of(samples, "rss_mib").per_min == pytest.approx(3.0)
    assert slope_of(samples, "threads") == Slope(0.0, 0.0)
    noisy = slope_of(_rounds(200, 3.0, 2.0)[:200], "fds")
    assert noisy.per_min == pytest.approx(3.0, abs=noisy.scatter)
    assert 0.0 < noisy.scatter < 0.2


@pytest.mark.parametrize(
    ("count", "per_min", "noise", "fault"),
    [
        (200, 0.0, 3.0, ""),
        (200, 1.3, 3.0, "fds +1."),
        (200, 2.0, 0.0, "rss_mib +2.0"),
        (15, 8.0, 1.0, "fds +8"),
        (9, 2.0, 3.0, "too few rounds to tell"),
        (9, 0.0, 3.0, "too few rounds to tell"),
        (2, 0.0, 0.0, "too few rounds to tell"),
    ],
)
def test_a_leak_is_told_from_scatter_and_a_run_too_short_to_tell_fails(
    count: int, per_min: float, noise: float, fault: str
) -> None:
    faults = "; ".join(judge(_rounds(count, per_min, noise))[1])
    assert fault in faults
    assert bool(fault) == bool(faults)
