"""Leaving a group, and failures that no call has raised: what a member asks of its transport, and in which order."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from ep_kernels import AbortedError, ClosedError, MoECommunicator, PeerTimeout
from ep_kernels.membership import GroupMember
from ep_kernels.network import NetworkConfig
from ep_kernels.network.listener import Listener
from ep_kernels.network.network import Network
from ep_kernels.types import LatencySample
from tests.cases import RoutingCase
from tests.groups import LonelyGroup

LOST = PeerTimeout(peer=1, op="combine", phase="payload", expected=2, seen=1, waited_s=1.0)


class Scripted:
    """A transport that notes what it is asked."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fault: Exception | None = None
        self.aborted = threading.Event()
        self.busy, self.most_s = False, 0.0

    def check(self, op: str = "check") -> None:
        if self.fault is not None:
            raise self.fault

    def check_results(self) -> None:
        pass

    def drain(self, timeout_s: float) -> None:
        self.said.append("drain")
        self.most_s = timeout_s
        if self.busy:
            assert self.aborted.wait(10), "abort could not reach it"

    def abort(self, reason: str) -> None:
        self.said.append("abort")
        self.aborted.set()

    def samples(self) -> list[LatencySample]:
        self.said.append("samples")
        assert self.aborted.wait(10), "abort could not reach it"
        return []

    def close(self) -> None:
        self.said.append("close")
        self.fault = AbortedError("the communicator was closed")


@pytest.fixture
def transport() -> Scripted:
    return Scripted()


@pytest.fixture
def member(transport: Scripted) -> GroupMember:
    given: Any = transport
    return GroupMember(RoutingCase(2, 1, 16, (1,)).config(LonelyGroup()), given)


def test_what_was_begun_ends_before_it_is_closed(member: GroupMember, transport: Scripted) -> None:
    member.close()
    member.close()
    assert transport.said == ["drain", "close"]
    assert transport.most_s == 10.0


def test_one_that_is_dropped_is_closed(transport: Scripted) -> None:
    given: Any = transport
    member = GroupMember(RoutingCase(2, 1, 16, (1,)).config(LonelyGroup()), given)
    assert transport.said == []
    del member
    gc.collect()
    assert transport.said == ["drain", "close"]
    assert transport.most_s == 1.0, "of 10: any thread may have to collect it"


class Collecting(dict[int, Any]):
    """Its memory runs short when something is taken out."""

    def pop(self, *args: Any) -> Any:
        gc.collect()
        return super().pop(*args)


def test_one_that_is_dropped_may_be_collected_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation may collect garbage while its thread holds a lock: that of a port at which a channel is opened, or
    that of all networks while one is opened."""
    networks = [NetworkConfig(listen="127.0.0.1:0", seed=seed) for seed in range(2)]

    def over(network: NetworkConfig) -> MoECommunicator:
        return MoECommunicator(
            msgspec.structs.replace(RoutingCase(2, 1, 16, (1,)).config(LonelyGroup()), network=network)
        )

    def drop() -> None:
        cycle: list[Any] = [over(networks[0])]
        cycle.append(cycle)

    def open_and_close() -> None:
        kept = over(networks[0])
        drop()
        port = Network._shared[networks[0]].listener
        port._registered = Collecting(port._registered)
        kept.close()
        drop()
        make = Listener.__init__
        monkeypatch.setattr(Listener, "__init__", lambda *args: (gc.collect(), make(*args))[1])
        over(networks[1]).close()

    thread = threading.Thread(target=open_and_close, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    for network in [Network._shared.pop(config) for config in networks if config in Network._shared]:
        network.close()


def test_a_thread_that_ends_may_collect_one_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an idle network's port, which closes to make room for another network."""
    networks = [NetworkConfig(listen="127.0.0.1:0", seed=seed) for seed in range(3)]
    case, collectors = RoutingCase(2, 1, 16, (1,)), []
    close_sockets = Listener._close_sockets

    def collect(port: Listener) -> None:
        collectors.append(threading.current_thread())
        gc.collect()
        close_sockets(port)

    def replace_an_idle_one() -> None:
        configs = [msgspec.structs.replace(case.config(LonelyGroup()), network=network) for network in networks]
        idle, cycle = MoECommunicator(configs[0]), [MoECommunicator(configs[1])]
        cycle.append(cycle)  # type: ignore[arg-type]
        idle.close()
        gc.disable()
        del cycle
        monkeypatch.setattr(Listener, "_close_sockets", collect)
        MoECommunicator(configs[2]).close()

    try:
        thread = threading.Thread(target=replace_an_idle_one, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert collectors, "else it shows nothing"
        assert thread not in collectors
    finally:
        gc.enable()
    monkeypatch.undo()
    for network in [Network._shared.pop(config) for config in networks if config in Network._shared]:
        network.close()


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_of_it_is_made(member: GroupMember, transport: Scripted, act: Callable[[Any], Any]) -> None:
    """Two would close one rank's memory twice. A module that has one says so when it is copied or saved."""
    module = torch.nn.Module()
    module.comm = member  # type: ignore[assignment]
    with pytest.raises(TypeError, match="GroupMember: cannot be copied or pickled"):
        act(member if act is copy.copy else module)
    assert transport.said == []


def test_what_is_broken_is_closed_at_once(member: GroupMember, transport: Scripted) -> None:
    transport.fault = LOST
    with pytest.raises(PeerTimeout):
        member.check()
    member.close()
    assert transport.said == ["close"]


def test_another_thread_may_abort_what_close_waits_for(member: GroupMember, transport: Scripted) -> None:
    transport.busy = True
    closing = threading.Thread(target=member.close)
    closing.start()
    while "drain" not in transport.said:
        pass
    member.abort("enough")
    closing.join(10)
    assert not closing.is_alive()
    assert transport.said == ["drain", "abort", "close"]


@pytest.mark.parametrize("act", ["close", "abort"])
def test_another_thread_may_close_or_abort_right_before_close_waits(act: str) -> None:
    comm = MoECommunicator(RoutingCase(2, 1, 16, (1,)).config(LonelyGroup()))
    drain = comm._transport.drain

    def late(timeout_s: float) -> None:
        comm._transport.close() if act == "close" else comm._transport.abort("enough")
        drain(timeout_s)

    comm._transport.drain = late  # type: ignore[method-assign]
    comm.close()
    with pytest.raises(ClosedError):
        comm.barrier()


def test_another_thread_may_abort_while_records_are_read(member: GroupMember, transport: Scripted) -> None:
    reading = threading.Thread(target=member.samples)
    reading.start()
    while "samples" not in transport.said:
        pass
    member.abort("enough")
    reading.join(10)
    member.close()
    assert transport.said == ["samples", "abort", "close"]
    assert member.samples() == []


def test_a_failure_is_unheard_until_a_call_raises_it(member: GroupMember, transport: Scripted) -> None:
    assert member.unheard() is None
    transport.fault = LOST
    assert member.unheard() is LOST
    assert member.unheard() is LOST, "asking breaks nothing"
    with pytest.raises(PeerTimeout):
        member.check()
    assert member.unheard() is None


def test_closing_is_no_failure(member: GroupMember) -> None:
    member.close()
    assert member.unheard() is None


def test_the_flag_of_a_transport_that_raises_is_never_set() -> None:
    from ep_kernels.transports.cpu.transport import create

    flag = create(RoutingCase(2, 1, 16, (1,)).config(LonelyGroup(), transport="cpu")).failed()
    assert torch.equal(flag, torch.zeros(1, dtype=torch.int64))


def test_one_that_is_dropped_while_a_graph_is_captured_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free device memory would end the capture."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    config, capturing, closed = RoutingCase(2, 1, 16, (1,)).config(LonelyGroup(), transport="cpu"), True, []
    comm = MoECommunicator(config)
    monkeypatch.setattr(type(comm), "_leave", lambda self: closed.append(self._id))
    number = comm._id
    del comm
    gc.collect()
    assert closed == []
    capturing = False
    other = MoECommunicator(config)
    assert closed == [number]
    monkeypatch.undo()
    other.close()


def test_a_fault_that_later_calls_repeat_keeps_no_communicator() -> None:
    case = RoutingCase(4, 2, 64, (2,), "uniform", 1, max_tokens=2)
    comm = MoECommunicator(case.config(LonelyGroup(), timeout_s=1.0))
    comm.abort("moving on")
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(AbortedError):
                comm.barrier()
                pytest.fail("not refused")
        comm.close()
        left = weakref.ref(comm)
        del comm
        assert left() is None, "regions stay until a collection"
    finally:
        gc.enable()
