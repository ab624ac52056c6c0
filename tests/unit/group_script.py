"""Replays a transcript of the group machine: commands in, what the machine did out.

A transcript has lines `> command` and comments `# ...`; indented lines are the expected output. Write commands only and
run `python -m tests.unit.group_script FILE...` to fill the output in, or to rewrite it after a change that was meant.

    > group world=4 lease=3 form=600 recover=5 [elastic=1] [leap=]      a fresh control plane at time 0
    > register UID [inc=] [host=] [boot=] [local=] [domain=] [model=] [abi=] [transport=] [network=]
        [prior=EPOCH:RANK[:idle]] [active=0,1] [communicator=topk:2,mode:AUTO]
      a worker that finds the group full waits as a spare
    > cordon NAME [drain=1] / > uncordon NAME      an operator; NAME: a uid, a rank or a host
    > region UID epoch= [bytes=]                   PublishRegion
    > ready UID epoch= [placement=]
    > beat UID epoch= [silent=1,2] [fault=a_word] [loaded=1]
    > leave UID [reason=a_word]
    > wait SECONDS [UID...]                        ticks, eight per lease; the named workers keep beating
    > form UID...                                  all of these register, publish and get ready; prints the last view
    > exchange EPOCH                               all members publish and get ready; prints the last view
    > restart [leap=]                              kill -9 of the control plane: the state is gone, time goes on
    > suspend SECONDS                              the control plane itself stands still
    > view                                         the whole view

A member reads `rank:uid`, `.` after it: region published, `+`: ready as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from crossdock.control.group import cordon
from crossdock.control.group.group import advance, new_group
from crossdock.control.group.group_state import (
    Bar,
    Blamed,
    Cordon,
    Effect,
    Event,
    Group,
    Heartbeat,
    Leave,
    Lost,
    Prior,
    Publish,
    PublishRegion,
    Ready,
    Refusal,
    Refuse,
    RefusedWorker,
    Register,
    Scale,
    Settings,
    Tick,
    Uncordon,
    Waits,
    Wanted,
    Worker,
)
from crossdock.control.group.ranks import NetworkPlace, Place

_NEVER = (Refusal.MIXED_GROUP, Refusal.NAME_TAKEN)


def show(group: Group) -> str:
    """The view of a group on one line."""
    marks = ("", ".", "+")
    members = " ".join(f"{m.rank}:{m.uid}{marks[bool(m.region) + (bool(m.region) and m.ready)]}" for m in group.members)
    extra = f" lost={list(group.lost_ranks)}" if group.lost_ranks else ""
    extra += f" broken={list(group.broken_ranks)}" if group.broken_ranks else ""
    wanted = group.wanted.workers
    extra += f" scaling {group.world_size}->{wanted}" if wanted != group.world_size else ""
    extra += f" active={sorted(group.active)}" if group.active is not None else ""
    extra += f" barred={[f'{bar.uid} {bar.cause}' for bar in group.bars]}" if group.bars else ""
    recovering = " (recovering)" if group.recovering else ""
    return f"{group.phase.value} epoch {group.epoch}{recovering} [{members}]{extra} -- {group.why}"


class Replay:
    """One transcript in progress."""

    def __init__(self) -> None:
        self.now = 0.0
        self.group = new_group(Settings(4, 3.0, 600.0, 5.0), self.now)
        self.incarnations: dict[str, int] = {}

    def run(self, line: str) -> list[str]:
        """Carry out one command; returns the lines it printed."""
        name, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        command: Callable[[list[str], dict[str, str]], list[str]] = getattr(self, f"_do_{name}")
        return command(plain, named) or ["ok"]

    def _take(self, event: Event) -> list[str]:
        self.group, effects = advance(self.group, event, self.now)
        return [self._render(effect) for effect in effects]

    def _render(self, effect: Effect) -> str:
        match effect:
            case Refuse(refusal, message):
                return f"refused ({refusal.value}): {message}"
            case Lost(rank, uid, cause):
                return f"lost rank {rank} ({uid}): {cause}"
            case Blamed(rank, by_rank, num_blamed):
                return f"rank {rank} reported silent by rank {by_rank}, {num_blamed} in all"
            case Publish():
                return show(self.group)

    def _incarnation(self, uid: str, named: dict[str, str]) -> int:
        return int(named.get("inc", self.incarnations.get(uid, 1)))

    def _do_group(self, words: list[str], named: dict[str, str]) -> list[str]:
        numbers = {key: float(value) for key, value in named.items()}
        times, elastic = (numbers["lease"], numbers["form"], numbers["recover"]), bool(numbers.get("elastic"))
        most = int(numbers.get("most", 0))
        follows, least = bool(numbers.get("follow")), int(numbers.get("least", 1))
        settings = Settings(
            int(numbers["world"]), *times, elastic=elastic, min_workers=least, max_workers=most, follow_workers=follows
        )
        self.group = new_group(settings, self.now, int(numbers.get("leap", 0)))
        return [show(self.group)]

    def _do_restart(self, words: list[str], named: dict[str, str]) -> list[str]:
        self.group = new_group(self.group.settings, self.now, int(named.get("leap", 0)))
        return [show(self.group)]

    def _do_register(self, words: list[str], named: dict[str, str]) -> list[str]:
        uid = words[0]
        host, _, local = uid.partition("/")
        self.incarnations[uid] = incarnation = self._incarnation(uid, named)
        place = Place(uid, named.get("host", host), int(named.get("local", local or 0)), named.get("domain", ""))
        kind = [named.get("transport", "cpu"), named.get("abi", "abi1"), named.get("model", "tiny")]
        prior = None
        if "prior" in named:
            epoch, rank, *idle = named["prior"].split(":")
            active = frozenset(int(one) for one in named["active"].split(",")) if "active" in named else None
            region, size = b"" if idle else f"{uid}@{epoch}".encode(), int(named.get("of", 0))
            prior = Prior(int(epoch), int(rank), region, not idle, active, size)
        wanted = Wanted(*map(int, named["wanted"].split(":"))) if "wanted" in named else None
        network = NetworkPlace(named["network"]) if "network" in named else None
        pairs = [tuple(one.split(":")) for one in named.get("communicator", "").split(",") if one]
        communicator = tuple((name, value) for name, value in pairs)
        settings = {"network": network, "boot_id": named.get("boot", ""), "communicator": communicator}
        worker = Worker(place, incarnation, f"{uid}:1", f"{uid}:2", *kind, **settings)  # type: ignore[arg-type]
        self.group, effects = advance(self.group, Register(worker, prior, wanted), self.now)
        lines = [self._render(effect) for effect in effects]
        full = any(isinstance(effect, Refuse) and effect.refusal is Refusal.GROUP_FULL for effect in effects)
        never = [effect.message for effect in effects if isinstance(effect, Refuse) and effect.refusal in _NEVER]
        more = [Waits(worker)] if full else [RefusedWorker(uid, message) for message in never]
        return lines + [line for event in more for line in self._take(event) if line != "ok"]

    def _do_cordon(self, words: list[str], named: dict[str, str]) -> list[str]:
        found = cordon.named(self.group, words[0])
        why = "maintenance"
        return self._take(Cordon(tuple(Bar(*one, "cordoned", why, drain="drain" in named) for one in found)))

    def _do_uncordon(self, words: list[str], named: dict[str, str]) -> list[str]:
        return self._take(Uncordon(frozenset(uid for uid, _ in cordon.named(self.group, words[0]))))

    def _do_region(self, words: list[str], named: dict[str, str]) -> list[str]:
        region = named.get("bytes", f"{words[0]}@{named['epoch']}").encode()
        return self._take(PublishRegion(words[0], self._incarnation(words[0], named), int(named["epoch"]), region))

    def _do_ready(self, words: list[str], named: dict[str, str]) -> list[str]:
        placement = int(named.get("placement", 0))
        return self._take(Ready(words[0], self._incarnation(words[0], named), int(named["epoch"]), placement))

    def _do_beat(self, words: list[str], named: dict[str, str]) -> list[str]:
        silent = tuple(int(rank) for rank in named.get("silent", "").split(",") if rank)
        incarnation = self._incarnation(words[0], named)
        told = silent, named.get("fault", ""), "loaded" in named, "leaving" in named
        return self._take(Heartbeat(words[0], incarnation, int(named["epoch"]), *told))

    def _do_scale(self, words: list[str], named: dict[str, str]) -> list[str]:
        return self._take(Scale(int(words[0])))

    def _do_leave(self, words: list[str], named: dict[str, str]) -> list[str]:
        return self._take(Leave(words[0], self._incarnation(words[0], named), named.get("reason", "")))

    def _do_wait(self, words: list[str], named: dict[str, str]) -> list[str]:
        start, interval = self.now, self.group.settings.lease_s / 8
        lines = []
        until = start + float(words[0])
        while self.now < until:
            self.now = min(until, self.now + interval)
            for uid in words[1:]:
                lines += self._take(Heartbeat(uid, self.incarnations[uid], self.group.epoch))
            lines += [f"after {self.now - start:g} s: {line}" for line in self._take(Tick())]
        return lines

    def _do_suspend(self, words: list[str], named: dict[str, str]) -> list[str]:
        self.now += float(words[0])
        return self._take(Tick())

    def _do_form(self, words: list[str], named: dict[str, str]) -> list[str]:
        for uid in words:
            self._do_register([uid], named)
        return self._do_exchange([str(self.group.epoch)], {})

    def _do_exchange(self, words: list[str], named: dict[str, str]) -> list[str]:
        members = self.group.members
        lines: list[str] = []
        for command in (self._do_region, self._do_ready):
            for member in members:
                lines += command([member.uid], {"epoch": words[0], "inc": str(member.worker.incarnation)})
        return lines[-1:]

    def _do_view(self, words: list[str], named: dict[str, str]) -> list[str]:
        return [show(self.group)]


def replay(text: str) -> str:
    """The transcript with every output as the machine gives it now."""
    return "\n".join(_lines(text)) + "\n"


def _lines(text: str) -> Iterator[str]:
    script = Replay()
    for line in text.splitlines():
        if line.startswith("> "):
            yield line
            yield from (f"  {output}" for output in script.run(line[2:]))
        elif not line.startswith("  "):
            yield line


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(replay(path.read_text(encoding="utf-8")), encoding="utf-8")
