"""What ranks do in test_cut_lines.py: hosts in network namespaces, whose lines are cut, reset and lossy while they
work. Each function runs on every rank."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ep_kernels import MoECommunicator
from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig
from tests.cases import RoutingCase, draw_seed
from tests.transports.faults import SENT_S, Loss, lose, meet
from tests.transports.steps import Place, Store, check_step, next_case

PATIENCE_S = 3.0
LONG_S = 30.0
QUIET_S = 1.6
"""After the third copy of a segment that is lost, and long before the fourth, at 3 s."""
MASKS = {"without 2": [True, True, False], "all": [True] * 3}
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Apart:
    """Where the ranks are.

    Attributes:
        namespaces: file by rank; "" for this process's own.
        hosts: name by rank.
        provider: of the network.
        folder: where signals between ranks and the test lie as files.
        transport: of the ranks.
        advertise: by rank, if it is not to be found by the rank itself.
    """

    namespaces: tuple[str, ...]
    hosts: tuple[str, ...]
    provider: str
    folder: Path
    transport: str = "cpu"
    advertise: tuple[str, ...] = ("", "", "")

    def say(self, name: str) -> None:
        """`name` has come."""
        (self.folder / name).touch()

    def await_(self, name: str, timeout_s: float = 60.0) -> None:
        """Until someone has said it."""
        until = time.monotonic() + timeout_s
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"nobody said {name!r}"
            time.sleep(0.002)


@dataclass(frozen=True)
class Where(Place):
    """A place in a namespace."""

    apart: Apart

    def overrides(self) -> dict[str, Any]:
        """See `Place`."""
        apart = self.apart
        network = NetworkConfig(
            provider=apart.provider,
            domain=apart.hosts[self.rank],
            advertise=apart.advertise[self.rank],
            seed=draw_seed(),
        )
        return {"transport": apart.transport, "network": network}


def enter(namespace: str) -> None:
    """This thread, and those it will start, live there from now on."""
    if not namespace:
        return
    fd = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)


Story = Callable[[Where, RoutingCase], Any]


def there(rank: int, size: int, store: Store, apart: Apart, story: Story, case: RoutingCase) -> Any:
    """A story on the rank's host."""
    enter(apart.namespaces[rank])
    return story(Where(rank, size, store, apart.transport, apart), case)


def steps(comm: MoECommunicator, case: RoutingCase, first: int, number: int = 4) -> None:
    for turn in range(first, first + number):
        check_step(comm, next_case(case, turn))


def until_cut(place: Where, comm: MoECommunicator, case: RoutingCase) -> None:
    """Steps; then the test does what it does to the line, when the word of no rank is on it."""
    steps(comm, case, 0)
    comm.barrier()
    place.apart.say(f"met {place.rank}")
    if place.rank == 0:
        for rank in range(comm.size):
            place.apart.await_(f"met {rank}")
        place.apart.say("running")
    place.apart.await_("done")


def host_is_killed(place: Where, case: RoutingCase) -> tuple[Loss, float] | None:
    """All of host b, rank 2, dies between steps; seconds from its death until a survivor was told."""
    with place.communicator(case, timeout_s=LONG_S) as comm:
        steps(comm, case, 0)
        comm.barrier()
        if place.rank == 2:
            time.sleep(SENT_S)
            (place.apart.folder / "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = lose(lambda: check_step(comm, next_case(case, 9)))
        took = time.monotonic() - float((place.apart.folder / "died").read_text())
        comm.set_active(MASKS["without 2"], 1)
        steps(comm, case, 10)
        comm.barrier()
    return loss, took


def line_is_cut(place: Where, case: RoutingCase) -> Loss:
    """Host b hears nothing more and nobody hears it, without a word; the others go on without it. When the line is
    whole again, rank 2 is told that it was left out, or that the others are gone."""
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        until_cut(place, comm, case)
        loss = lose(lambda: check_step(comm, next_case(case, 9)))
        if place.rank == 2:
            place.apart.await_("gone on")
            place.apart.say("mend")
            place.apart.await_("mended")
            with pytest.raises(TransportError):
                check_step(comm, next_case(case, 9))
        else:
            comm.set_active(MASKS["without 2"], 1)
            steps(comm, case, 10)
            comm.barrier()
            place.apart.say("gone on")
            place.apart.await_("mended")
            steps(comm, case, 20)
            comm.barrier()
    return loss


def cut_rank_is_given_up(place: Where, case: RoutingCase) -> Loss | None:
    """As a control plane does whose lease has ended: long before the deadline."""
    with place.communicator(case, timeout_s=LONG_S) as comm:
        until_cut(place, comm, case)
        if place.rank == 2:
            place.apart.await_("gone on")
            comm.abort("over")
            return None
        threading.Timer(0.2, comm.give_up, [[2]]).start()
        loss = lose(lambda: check_step(comm, next_case(case, 9)))
        comm.set_active(MASKS["without 2"], 1)
        steps(comm, case, 10)
        comm.barrier()
        place.apart.say("gone on")
    return loss


def line_recovers(place: Where, case: RoutingCase) -> tuple[Loss, int]:
    """Whatever became of the connections: set_active of all heals the group. (What was seen, epoch in which it did.)"""
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        until_cut(place, comm, case)
        loss = lose(lambda: check_step(comm, next_case(case, 9)))
        meet(place.store, place.rank, place.size, "lost")
        place.apart.say("mend")
        place.apart.await_("mended")
        for epoch in range(1, 4):  # what the line held back may need longer than one deadline
            said = all_say(place, f"epoch {epoch}", joined(comm, epoch))
            if said == ["joined"] * place.size:
                break
        assert said == ["joined"] * place.size, said
        steps(comm, case, 10)
        comm.barrier()
    return loss, epoch


def one_side_parts(place: Where, case: RoutingCase, parting: tuple[int, ...]) -> None:
    """The line is cut without a word, and those who part go on without the others, who do not notice. When the line is
    whole again, one set_active of all joins them, though one side believes that its connections stand."""
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        until_cut(place, comm, case)
        if place.rank in parting:
            comm.set_active([rank in parting for rank in range(place.size)], 1)
            steps(comm, case, 5)
            time.sleep(QUIET_S)
        meet(place.store, place.rank, place.size, "parted")
        place.apart.say("mend")
        place.apart.await_("mended")
        comm.set_active(MASKS["all"], 2)
        steps(comm, case, 10)
        comm.barrier()


def joined(comm: MoECommunicator, epoch: int) -> str:
    """How a set_active of all went."""
    try:
        comm.set_active(MASKS["all"], epoch)
    except TransportError as error:
        return repr(error)
    return "joined"


def all_say(place: Where, name: str, word: str) -> list[str]:
    """Everybody's word."""
    place.store.set(f"{name}/{place.rank}", word)
    return [place.store.get(f"{name}/{rank}").decode() for rank in range(place.size)]


def line_loses_packets(place: Where, case: RoutingCase) -> None:
    """It is slow, and all is right."""
    with place.communicator(case, timeout_s=LONG_S) as comm:
        until_cut(place, comm, case)
        steps(comm, case, 10, 60)
        comm.barrier()


def comes_back_elsewhere(place: Where, case: RoutingCase) -> None:
    """Host b has another address in the next epoch; it waits there for those who still wait for it here."""
    with place.communicator(case, timeout_s=PATIENCE_S) as comm:
        until_cut(place, comm, case)
        if place.rank != 2:
            lose(lambda: check_step(comm, next_case(case, 9)))
        else:
            comm.abort("this host moves")
    again = replace(place, apart=replace(place.apart, advertise=("", "", (place.apart.folder / "moved").read_text())))
    config = case.config(again.group("second", epoch=1), **(again.overrides() | {"timeout_s": LONG_S}))
    with MoECommunicator(config) as comm:
        assert comm.epoch == 1
        steps(comm, case, 10)
        comm.barrier()


def garbage_during_traffic(place: Where, case: RoutingCase) -> int:
    """Somebody who is no member sends to every data port while the ranks work."""
    with place.communicator(case, timeout_s=LONG_S) as comm:
        transport: Any = comm._transport
        channel = transport._remote.channel if place.transport == "nvlink" else transport.comm.channel
        listener = channel._network.listener
        place.store.set(f"port/{place.rank}", str(listener.address[1]))
        stop = threading.Event()
        ports = [int(place.store.get(f"port/{rank}")) for rank in range(place.size)]
        thread = threading.Thread(target=pester, args=(ports, stop), daemon=True)
        thread.start()  # in the rank's namespace, and so to the port of this rank's host
        steps(comm, case, 0, 40)
        comm.barrier()
        stop.set()
        thread.join()
        comm.barrier()
        return sum(listener.refused.values())


def pester(ports: list[int], stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        try:
            with socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 1.0) as connection:
                connection.sendall(os.urandom(1 + number % 3000))
        except OSError:
            continue


def ticket_is_forged(place: Where, case: RoutingCase) -> str:
    """Rank 0 has a ticket of rank 2 whose secret is wrong: it cannot join, and says where."""
    group = place.group("first")

    class Forging:
        rank, size, epoch = group.rank, group.size, group.epoch

        def all_gather(self, payload: bytes, *args: Any, **options: Any) -> list[bytes]:
            got = group.all_gather(payload, *args, **options)
            return [forged(raw) if place.rank == 0 and n == 2 else raw for n, raw in enumerate(got)]

    with pytest.raises(TransportError) as error:
        MoECommunicator(case.config(Forging(), **(place.overrides() | {"timeout_s": PATIENCE_S})))
    return str(error.value)


def forged(hello: bytes) -> bytes:
    """With another first digit of the secret in its ticket."""
    key = b'"secret":"'
    at = hello.index(key) + len(key)
    return hello[:at] + (b"1" if hello[at : at + 1] == b"0" else b"0") + hello[at + 1 :]
