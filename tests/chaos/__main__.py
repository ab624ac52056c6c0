"""Harm a group at random while clients ask it, and see that no answer is wrong and nothing hangs.

    python -m tests.chaos --seconds 180 --out DIR [--seed N] [--network proxies]        (make chaos)

Every process has a network namespace of its own and lines are really cut, where the machine allows that; proxies stand
in elsewhere. One harm after the other, sometimes two at once: kill -9, SIGSTOP, drains and restarts of control planes
and workers, cut and reset connections, a lease that cannot be reached, is slow, or deleted. After each, the group must
serve again within SETTLE_S. Exit status 1 if anything was wrong. The seed decides the order of harms; moments are the
machine's. Processes load the product as it was when the run began, whatever is edited meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import facts
from crossdock.demo.hosts import become
from tests.chaos.harms import Harms
from tests.chaos.load import GAP_S, Load, Tally
from tests.chaos.netns import NoNamespaces
from tests.chaos.ways import NUM_WORKERS, Namespaced, Proxied, Ways
from tests.chaos.world import World
from tests.frozen import frozen
from tests.services.replicas import LEASE_S

MOST_SECONDS, MOST_WORKERS = 600, 12
SETTLE_S = 60.0
NUM_CLIENTS = 2


@dataclass(frozen=True, slots=True)
class Event:
    """One harm, or two at once.

    Attributes:
        at_s: since the load began.
        harm: what was done.
        lasted_s: for how long.
        settled_s: from its end until somebody led and the group served.
        outage_s: without a right answer meanwhile, gaps of more than GAP_S counted.
        epochs: by how much the number of the epoch rose; a leader that misses a worker leaps.
        reigns: how many more there were.
        good, failed: requests that ended meanwhile.
    """

    at_s: float
    harm: str
    lasted_s: float
    settled_s: float
    outage_s: float
    epochs: int
    reigns: int
    good: int
    failed: int


def harm_once(
    world: World, load: Load, harms: list[Callable[[], str]], began: float, epoch: int
) -> tuple[Event, int, str]:
    """Do it, wait until the group serves; the event, the epoch after it, and what is wrong ("" = nothing)."""
    tally = load.tally
    before = reigns(world), tally.good, tally.failed
    done: list[str] = []
    at = time.monotonic()
    threads = [threading.Thread(target=lambda harm=harm: done.append(harm()), daemon=True) for harm in harms]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SETTLE_S)
    ended = time.monotonic()
    after = world.settle(SETTLE_S)
    good = tally.good
    while after is not None and tally.good == good and time.monotonic() < ended + SETTLE_S:
        time.sleep(0.02)
    now = time.monotonic()
    after = world.settle(SETTLE_S) if after is not None else None  # a death may have gone unnoticed at first
    event = Event(
        at_s=round(at - began, 1),
        harm=" + ".join(done),
        lasted_s=round(ended - at, 2),
        settled_s=round(now - ended, 2),
        outage_s=round(load.outage_s(at, now), 2),
        epochs=(after.epoch if after is not None else epoch) - epoch,
        reigns=reigns(world) - before[0],
        good=tally.good - before[1],
        failed=tally.failed - before[2],
    )
    lost = after is None or tally.good == good or len(done) < len(harms)
    trouble = f"after {event.harm}: not settled within {SETTLE_S:g} s" if lost else ""
    return event, epoch + event.epochs, trouble


def reigns(world: World) -> int:
    """How many there were."""
    return len({term for holder, term in list(world.api.writes) if holder})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a whole run.

    Attributes:
        events: in order.
        tally: what clients saw.
        availability: part of the time in which they were served.
        takeovers_s: from each kill -9 of a leader until another one led.
    """

    events: list[Event]
    tally: Tally
    availability: float
    takeovers_s: list[float]


def run(
    seconds: float,
    seed: int,
    folder: Path,
    ways: Ways,
    num_hosts: int = 1,
    provider: str = "tcp",
    two_hops: bool = False,
) -> Outcome:
    """Harm for so long."""
    chooser = random.Random(seed + 1)
    events: list[Event] = []
    with frozen(folder / "code"), World(folder, ways, num_hosts, provider, two_hops) as world:
        load, harms = Load(world.target, world.tensors, NUM_CLIENTS), Harms(world, seed)
        load.start()
        epoch = 1
        began = time.monotonic()
        while time.monotonic() - began < seconds and not load.tally.wrong:
            time.sleep(chooser.uniform(0.5, 2.0))
            event, epoch, trouble = harm_once(world, load, harms.choose(), began, epoch)
            events.append(event)
            print(show(event), flush=True)
            if trouble:
                load.tally.wrong.append(trouble)
        ended = time.monotonic()
        load.stop()
        availability = 1 - load.outage_s(began, ended) / (ended - began)
    return Outcome(events, load.tally, availability, harms.takeovers_s)


def show(event: Event) -> str:
    """One line."""
    words = f"settled {event.settled_s:5.2f} s after, outage {event.outage_s:5.2f} s"
    counts = f"epochs +{event.epochs}, reigns +{event.reigns}, good {event.good}, failed {event.failed}"
    return f"{event.at_s:6.1f} s  {event.harm}: {words}, {counts}"


def summarise(outcome: Outcome) -> dict[str, object]:
    """What came of it."""
    events, tally, takeovers_s = outcome.events, outcome.tally, outcome.takeovers_s
    return {
        "harms": len(events),
        "availability": round(outcome.availability, 4),
        "gap_s": GAP_S,
        "good": tally.good,
        "failed": tally.failed,
        "wrong": tally.wrong,
        "slowest_s": round(tally.slowest_s, 2),
        "election_lease_s": LEASE_S,
        "leaders_killed": len(takeovers_s),
        "new_leader_s_median": round(statistics.median(takeovers_s), 2) if takeovers_s else None,
        "new_leader_s_longest": round(max(takeovers_s), 2) if takeovers_s else None,
        "longest_outage_s": max((event.outage_s for event in events), default=0.0),
    }


def network(kind: str, num_workers: int) -> tuple[Ways, str]:
    """The ways of that kind, and why it is not namespaces, "" = it is. This process may start anew, with --inside."""
    why = "asked for proxies"
    if kind == "namespaces":
        why = become([*sys.argv[1:], "--network", "inside"], "tests.chaos")
    if kind == "inside":
        try:
            return Namespaced(num_workers), ""
        except NoNamespaces as error:
            why = str(error)
    return Proxied(num_workers), why


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Harm a group at random while clients ask it.")
    parser.add_argument("--seconds", type=float, default=180.0, help=f"for how long, at most {MOST_SECONDS}")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the order of harms")
    parser.add_argument("--out", type=Path, help="folder for events.csv and run.json; none: print only")
    parser.add_argument(
        "--network",
        choices=("namespaces", "proxies", "inside"),
        default="namespaces",
        help="what lines are; proxies wherever namespaces are not allowed (inside: this process is in one)",
    )
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help=f"2 to {MOST_WORKERS}")
    parser.add_argument(
        "--hosts", type=int, default=1, help="among which the workers are divided; no more than workers"
    )
    parser.add_argument(
        "--provider", choices=("tcp", "shuffle(tcp)"), default="tcp", help="of their rows; shuffle: in any order"
    )
    parser.add_argument(
        "--two-hops", action="store_true", help="a host adds its partials and returns one row per token"
    )
    arguments = parser.parse_args()
    if not 2 <= arguments.workers <= MOST_WORKERS:
        parser.error(f"--workers: expected 2..{MOST_WORKERS}, got {arguments.workers}")
    if not 0 < arguments.hosts <= arguments.workers:
        parser.error(f"--hosts: expected 1..{arguments.workers}, got {arguments.hosts}")
    if not 0 < arguments.seconds <= MOST_SECONDS:
        parser.error(f"--seconds: expected 0..{MOST_SECONDS}, got {arguments.seconds:g}")
    return arguments


def facts_of_run() -> dict[str, object]:
    """Of the code that is tested: taken before the run, in which the checkout may change."""
    command = [word for word in sys.argv[1:] if word not in {"--network", "inside"}]
    return facts.of_control(command, {}, "tests.chaos")


def main() -> int:
    """Run, print, write; the exit status."""
    arguments = parse()
    ways, why = network(arguments.network, arguments.workers)
    folder = Path(tempfile.mkdtemp(prefix="crossdock-chaos-"))
    print(f"seed {arguments.seed}; network: {ways.kind}{f' ({why})' if why else ''}; logs in {folder}", flush=True)
    load_before, found = os.getloadavg()[0], facts_of_run()
    hosts, provider, two_hops = arguments.hosts, arguments.provider, arguments.two_hops
    outcome = run(arguments.seconds, arguments.seed, folder, ways, hosts, provider, two_hops)
    summary = {"seed": arguments.seed, "seconds": arguments.seconds, "network": ways.kind, "no_namespaces": why}
    summary |= {"workers": arguments.workers, "hosts": hosts, "provider": provider, "two_hops": two_hops}
    summary |= {"load_average_before": round(load_before, 2), "load_average_after": round(os.getloadavg()[0], 2)}
    summary |= summarise(outcome)
    if arguments.out:
        facts.keep(arguments.out, "events", Event, outcome.events, found | {"config": summary})
    print("; ".join(f"{key} {value}" for key, value in summary.items()))
    return 1 if outcome.tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
