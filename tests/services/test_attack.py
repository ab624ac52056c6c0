"""The short form of `make attack`, plain and with mTLS; how a run is judged; how `make soak` reads a slope."""

from __future__ import annotations

import pytest

from tests.attack import __main__ as attack
from tests.attack.scene import Meter
from tests.attack.witness import Event, Witness
from tests.services.cluster import TEST_S
from tests.soak.__main__ import Sample, slope_per_min

pytestmark = pytest.mark.timeout(TEST_S)


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


def test_a_slope_is_per_minute() -> None:
    samples = [Sample(6.0 * i, "control", 100.0 + 0.3 * i, 7.0, 5.0, 3.0) for i in range(20)]
    assert slope_per_min(samples, "rss_mib") == pytest.approx(3.0)
    assert slope_per_min(samples, "fds") == pytest.approx(0.0)
    assert slope_per_min(samples[:1], "rss_mib") == 0.0
