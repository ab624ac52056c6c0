"""Groups over hosts in network namespaces, whose lines fail in every way that the machine can make: nothing hangs, the
error names the rank, no row is ever wrong. Skipped with the reason where there can be no namespaces."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import tools
from tests.cases import draw_seed
from tests.chaos.netns import Fabric, Host, NoNamespaces
from tests.hosts import NEEDS, PROVIDERS
from tests.transports import lines
from tests.transports.faults import SLACK_S, silent_case
from tests.transports.lines import LONG_S, PATIENCE_S, Apart, Story
from tests.worlds import RankDied, World

OF_TCP = (
    "test_a_line_that_is_cut_one_way",
    "test_one_side_believes_that_connections_stand",
    "test_a_host_that_comes_back_with_another_address",
    "test_a_ticket_with_a_wrong_secret",
)
"""Tests of the control connections, which are equal whatever carries the bytes."""
HANG_S = 60.0
PROMPT_S = 0.1
"""From the death of a process until its peers are told; on a busy machine the best of some rounds."""


class Site:
    """Ranks 0 and 1 on host a, rank 2 on host b, and the line between them. `over`: transport and provider."""

    def __init__(self, fabric: Fabric, folder: Path, over: str) -> None:
        self.fabric, self.folder = fabric, folder
        self.a, self.b = fabric.host("a", 1), fabric.host("b", 2)
        spaces = (self.a.namespace, self.a.namespace, self.b.namespace)
        transport, _, provider = over.partition("-")
        self.apart = Apart(spaces, ("a", "a", "b"), PROVIDERS[provider], folder, transport)

    def run(self, story: Story, harm: Callable[[], Any] | None = None, mend: Callable[[], Any] | None = None) -> Any:
        """The story; `harm` when the ranks have said that they are "running", `mend` when they ask for it."""
        world, failed = World(3), list[BaseException]()

        def meanwhile() -> None:
            try:
                for asked, deed, answer in (("running", harm, "done"), ("mend", mend, "mended")):
                    if deed is None:
                        return
                    self.apart.await_(asked)
                    deed()
                    self.apart.say(answer)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=meanwhile)
        thread.start()
        dies = (2,) if story is lines.host_is_killed else ()
        try:
            case = silent_case(3, draw_seed())
            results = world.run(lines.there, self.apart, story, case, may_die=dies, timeout_s=HANG_S)
        finally:
            world.close()
        thread.join()
        for error in failed:
            raise error
        return results

    def both_ways(self) -> list[str]:
        """Rules of a whole cut."""
        return [f"from {self.a.address} to {self.b.address}", f"from {self.b.address} to {self.a.address}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`site`: ranks on processors, by every provider; with --over-hosts gpus, on GPUs."""
    if "site" not in metafunc.fixturenames:
        return
    providers = ["tcp"] if metafunc.function.__name__ in OF_TCP else sorted(PROVIDERS)
    over: list[Any] = [
        pytest.param(f"cpu-{provider}", marks=tools.needs(*NEEDS.get(provider, ()))) for provider in providers
    ]
    if metafunc.config.getoption("--over-hosts") == "gpus":
        over = [pytest.param("nvlink-tcp", marks=pytest.mark.gpu(1))]
    metafunc.parametrize("site", over, indirect=True)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    try:
        fabric = Fabric()
    except NoNamespaces as error:
        tools.skip("network namespaces", error)
    try:
        yield Site(fabric, tmp_path, request.param)
    finally:
        fabric.close()


def test_a_killed_host_is_named_at_once(site: Site) -> None:
    best = LONG_S
    for number in range(5):
        site.apart = replace(site.apart, folder=site.folder / str(number))
        site.apart.folder.mkdir()
        results = site.run(lines.host_is_killed)
        assert isinstance(results[2], RankDied)
        for loss, _ in results[:2]:
            assert (loss.peer, loss.gone) == (2, True)
            assert loss.waited_s < SLACK_S
        best = min(best, max(took for _, took in results[:2]))
        if best < PROMPT_S:
            return
    pytest.fail(f"told after {best:.3f} s at best")


def test_a_line_that_is_cut_without_a_word(site: Site) -> None:
    cut = site.fabric.cut(*site.both_ways())
    losses = site.run(lines.line_is_cut, cut.cut, cut.mend)
    assert [loss.peer for loss in losses] == [2, 2, 0] or losses[2].peer == 1
    for loss in losses:
        assert not loss.gone
        assert PATIENCE_S * 0.9 <= loss.waited_s < PATIENCE_S + SLACK_S


def test_a_rank_behind_a_cut_that_is_given_up(site: Site) -> None:
    losses = site.run(lines.cut_rank_is_given_up, site.fabric.cut(*site.both_ways()).cut)
    for loss in losses[:2]:
        assert (loss.peer, loss.gone) == (2, False)
        assert loss.waited_s < SLACK_S, "long before the deadline"


def test_connections_that_are_reset(site: Site) -> None:
    def reset() -> None:
        found = site.fabric.reset(site.a, site.b)
        if not found:
            site.apart.say("cannot")

    try:
        healed = site.run(lines.line_recovers, reset, lambda: None)
    except AssertionError:
        if (site.folder / "cannot").exists():
            pytest.skip("this kernel resets no connections (SOCK_DESTROY)")
        raise
    for loss, epoch in healed:
        assert loss.gone
        assert loss.waited_s < SLACK_S
        assert epoch == 1, "new connections stand at once"


@pytest.mark.parametrize("way", [0, 1])
def test_a_line_that_is_cut_one_way(site: Site, way: int) -> None:
    cut = site.fabric.cut(site.both_ways()[way])
    healed = site.run(lines.line_recovers, cut.cut, cut.mend)
    assert all(loss.peer != rank for rank, (loss, _) in enumerate(healed))


def test_a_cut_that_heals(site: Site) -> None:
    cut = site.fabric.cut(*site.both_ways())
    site.run(lines.line_recovers, cut.cut, cut.mend)


@pytest.mark.parametrize("parting", [(2,), (0, 1)], ids=["dialled", "dials"])
def test_one_side_believes_that_connections_stand(site: Site, parting: tuple[int, ...]) -> None:
    cut = site.fabric.cut(*site.both_ways())
    site.run(partial(lines.one_side_parts, parting=parting), cut.cut, cut.mend)


def test_a_line_that_loses_packets(site: Site) -> None:
    try:
        for host in (site.a, site.b):
            site.fabric.lose(host, 0.01)
    except (NoNamespaces, OSError) as error:
        tools.skip("network namespaces", f"no loss of packets: {error}")
    site.run(lines.line_loses_packets, lambda: None)


def test_a_host_that_comes_back_with_another_address(site: Site) -> None:
    def move() -> None:
        old: Host = site.b
        (site.folder / "moved").write_text(site.fabric.rename(old, 40))
        site.fabric.cut(f"to {old.address}", f"from {old.address}").cut()

    site.run(lines.comes_back_elsewhere, move)


def test_garbage_on_the_data_ports_during_traffic(site: Site) -> None:
    assert min(site.run(lines.garbage_during_traffic)) > 10


def test_a_ticket_with_a_wrong_secret(site: Site) -> None:
    said = site.run(lines.ticket_is_forged)
    assert re.search(r"10\.77\.2\.2:\d+ is not .*data port.*: ", said[0]), said[0]
    assert "rank 2" in said[0]
    assert re.search(r"ranks \[0(, 1)?\] did not connect to the data port of rank 2", said[2]), said[2]
