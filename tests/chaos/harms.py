"""What can be done to a group: each harm does it, undoes it, and says what it did."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tests.chaos.netns import Host
from tests.chaos.ways import NUM_CONTROLS, Line, Namespaced
from tests.chaos.world import World
from tests.services.replicas import Replica

Harm = Callable[[float], str]
TAKEOVER_S = 20.0
"""Longest wait for another leader; while the API server is away there is none."""
OVERSLEPT_S = 15.0
"""Longest wait for the epoch that begins when a worker is called lost."""


class Harms:
    """The seed decides which, on whom, and for how long; who leads decides the rest.

    Args:
        world: to be harmed.
        seed: of every choice.

    Attributes:
        takeovers_s: from each kill -9 of a leader until another one led.
    """

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, random.Random(seed)
        self.takeovers_s: list[float] = []
        self._held = [threading.Lock() for _ in range(NUM_CONTROLS)]
        workers: list[Harm] = [
            self.kill_worker, self.kill_worker, self.stop_worker, self.oversleep_worker, self.drain_worker,
            self.cut_worker, self.reset_worker, self.scale, self.scale,
        ]  # fmt: skip
        controls: list[Harm] = [
            self.kill_leader, self.kill_leader, self.stop_leader, self.restart_control, self.cut_leader,
            self.cut_control,
        ]  # fmt: skip
        lease: list[Harm] = [self.cut_lease, self.lose_api, self.slow_api, self.delete_lease]
        self._all = workers + controls + lease
        if isinstance(world.ways, Namespaced):
            net = Cuts(world.ways, self._random, self._leader)
            self._all += [net.isolate_worker, net.isolate_worker, net.orphan_worker, net.isolate_leader, net.one_way]
            if world.num_hosts > 1:
                self._all += [net.cut_rows, net.cut_rows, net.reset_rows, net.reset_rows]

    def choose(self) -> list[Callable[[], str]]:
        """One, or two at once."""
        return [self._one() for _ in range(self._random.choice((1, 1, 1, 2)))]

    def _one(self) -> Callable[[], str]:
        harm, seconds = self._random.choice(self._all), self._random.uniform(0.3, 5.0)
        return lambda: harm(seconds)

    def kill_worker(self, _: float) -> str:
        number = self._worker()
        self._signal_worker(number, signal.SIGKILL)
        return f"kill -9 of worker {number}"

    def stop_worker(self, seconds: float) -> str:
        number = self._worker()
        self._signal_worker(number, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal_worker(number, signal.SIGCONT)
        return f"worker {number} stands still for {seconds:.1f} s"

    def oversleep_worker(self, seconds: float) -> str:
        """Stopped past its lease and the deadline of a step, until the group has a later epoch; then it goes on."""
        number, before = self._worker(), self._world.epoch()
        self._signal_worker(number, signal.SIGSTOP)
        self._world.wait_epoch(before + 1, OVERSLEPT_S)
        time.sleep(seconds / 5)
        self._signal_worker(number, signal.SIGCONT)
        return f"worker {number} stands still until epoch {self._world.epoch()}, from {before}"

    def drain_worker(self, _: float) -> str:
        number = self._worker()
        self._signal_worker(number, signal.SIGTERM)
        return f"SIGTERM of worker {number}"

    def cut_worker(self, seconds: float) -> str:
        number = self._worker()
        return _cut(f"clients cut off from worker {number}", seconds, *self._world.ways.to_worker(number))

    def reset_worker(self, _: float) -> str:
        number = self._worker()
        many = self._world.ways.reset(number)
        return f"{many} connections to worker {number} reset"

    def scale(self, _: float) -> str:
        """One worker fewer than there are processes, which then waits as a spare, or all of them."""
        size = len(self._world.ways.workers) - self._random.randrange(2)
        return f"{size} workers wanted" + ("" if self._world.scale(size) else ", which nobody heard")

    def kill_leader(self, seconds: float) -> str:
        number = self._leader()
        with self._control(number) as replica:
            replica.end()
            began = time.monotonic()
            found = self._world.wait_leader(number, TAKEOVER_S)
            took_s = time.monotonic() - began
            if found is not None:
                self.takeovers_s.append(took_s)
            time.sleep(max(0.0, seconds - took_s))
            replica.start()
        return f"kill -9 of leader {number}, another one after {took_s:.1f} s"

    def stop_leader(self, seconds: float) -> str:
        number = self._leader()
        with self._control(number) as replica:
            replica.send(signal.SIGSTOP)
            time.sleep(seconds)
            replica.send(signal.SIGCONT)
        return f"leader {number} stands still for {seconds:.1f} s"

    def restart_control(self, _: float) -> str:
        number = self._random.randrange(NUM_CONTROLS)
        with self._control(number) as replica:
            replica.end(signal.SIGTERM)
            replica.start()
        return f"restart of control plane {number}"

    def cut_leader(self, seconds: float) -> str:
        number, ways = self._leader(), self._world.ways
        return _cut(f"leader {number} cut off from all", seconds, *ways.to_control(number), *ways.to_lease(number))

    def cut_control(self, seconds: float) -> str:
        number = self._leader()
        words = f"workers and clients cut off from leader {number}"
        return _cut(words, seconds, *self._world.ways.to_control(number))

    def cut_lease(self, seconds: float) -> str:
        number = self._leader()
        return _cut(f"leader {number} cut off from the lease", seconds, *self._world.ways.to_lease(number))

    def lose_api(self, seconds: float) -> str:
        self._world.api.away = True
        time.sleep(seconds)
        self._world.api.away = False
        return f"no API server for {seconds:.1f} s"

    def slow_api(self, seconds: float) -> str:
        self._world.api.delay_s = 0.3
        time.sleep(seconds)
        self._world.api.delay_s = 0.0
        return f"slow API server for {seconds:.1f} s"

    def delete_lease(self, _: float) -> str:
        self._world.api.lease = None
        return "lease deleted"

    def _worker(self) -> int:
        return self._random.randrange(len(self._world.ways.workers))

    def _leader(self) -> int:
        """Number of the leader; while there is none, of any."""
        number = self._world.leader()
        return self._random.randrange(NUM_CONTROLS) if number is None else number

    @contextlib.contextmanager
    def _control(self, number: int) -> Iterator[Replica]:
        """One harm after the other for each process: two that restart it would start it twice."""
        with self._held[number]:
            yield self._world.controls[number]

    def _signal_worker(self, number: int, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it died already; its successor is on the way
            os.kill(self._world.supervisor.worker_pids()[number], kind)


class Cuts:
    """What only a real network does: connections that neither close nor answer, in one way or both, lines that go down.

    Args:
        ways: to be cut.
        chooser: of whom, how, and how long: up to four times as long as other harms, beyond every keepalive.
        leader: who leads.
    """

    def __init__(self, ways: Namespaced, chooser: random.Random, leader: Callable[[], int]) -> None:
        self._ways, self._random, self._leader = ways, chooser, leader

    def isolate_worker(self, seconds: float) -> str:
        return self._isolate(self._random.choice(self._ways.machines), seconds)

    def isolate_leader(self, seconds: float) -> str:
        return self._isolate(self._ways.hosts[self._leader()], seconds)

    def orphan_worker(self, seconds: float) -> str:
        number = self._random.randrange(len(self._ways.workers))
        words = f"worker {number} cut off from the control planes"
        return _cut(words, seconds * self._longer(), *self._ways.from_controls(number))

    def cut_rows(self, seconds: float) -> str:
        """Two workers no longer reach each other; both reach everybody else."""
        one, other = self._random.sample(range(len(self._ways.workers)), 2)
        words = f"workers {one} and {other} cut off from each other"
        return _cut(words, seconds * self._longer(), *self._ways.between_workers(one, other))

    def reset_rows(self, _: float) -> str:
        one, other = self._random.sample(range(len(self._ways.workers)), 2)
        many = self._ways.fabric.reset(self._ways.machines[one], self._ways.machines[other])
        return f"{many} connections between workers {one} and {other} reset"

    def one_way(self, seconds: float) -> str:
        host = self._random.choice([*self._ways.machines, self._ways.hosts[self._leader()]])
        way = self._random.choice(("from", "to"))
        return _cut(f"nothing passes {way} {host.name}", seconds * self._longer(), *self._ways.one_way(host, way))

    def _isolate(self, host: Host, seconds: float) -> str:
        if self._random.random() < 0.5:
            return _cut(f"the line of {host.name} down", seconds * self._longer(), *self._ways.plug(host))
        return _cut(f"nothing passes from or to {host.name}", seconds * self._longer(), *self._ways.around(host))

    def _longer(self) -> float:
        return self._random.choice((1.0, 1.0, 4.0))


def _cut(what: str, seconds: float, *lines: Line) -> str:
    for line in lines:
        line.cut()
    time.sleep(seconds)
    for line in lines:
        line.mend()
    return f"{what} for {seconds:.1f} s"
