"""What the network brings a rank of the `cpu` transport, by its handler alone: which messages count, what they
complete, and what no rank can mean."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_kernels.config import MoEConfig
from ep_kernels.errors import EpError, PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.routing import ExpertMap
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.transport import CpuTransport
from ep_kernels.types import CombineOrder, DispatchHandle, DispatchOutput, Layout, Mode
from tests.groups import LonelyGroup
from tests.unit.network_ends import DOWN, End, join

HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64)
(
    DISPATCH_PART, DISPATCH_HEAD, COMBINE_PART, COMBINE_HEAD, DISPATCH_CONSUMED, COMBINE_CONSUMED, BARRIER, EXCHANGE,
    RESYNC, DISPATCH_ROWS, COMBINE_ROWS, MEMBERSHIP,
) = range(12)  # fmt: skip
"""`cd::Imm`; ARRIVED: `cd::NetEvent`."""
ARRIVED = 0
SEQ_BITS = 18
"""Of the number in an immediate (native/remote.hpp)."""
HEAD = struct.Struct("=qqQQiiii17i")
"""`cd::SlotMeta` as far as the parts for the host of rank 0."""
HEAD_BYTES = 4416
"""Of all of it."""
MEETING = 4096
BARRIER_AT, MEMBERSHIP_AT, LATEST_AT, EXCHANGES_AT, RESYNCS_AT = (MEETING + at for at in (64, 128, 256, 384, 640))
PUBLISHED_AT, CONSUMED_AT = (MEETING + 768 + i * 64 * 64 for i in (2, 3))
"""Of dispatches. Within a region or a mirror (native/meeting.hpp, region.hpp)."""
T, K, H = 4, 2, 8
_hosts = itertools.count()


class Receiver:
    """Rank 0 of two hosts; rank 1 is the test, which writes the mirror and calls the handler. `mask`: active ranks."""

    def __init__(self, mask: int = 1, timeout_s: float = 0.2, **fields: Any) -> None:
        self.domain = f"host {next(_hosts)}"  # so its network is its own
        network = NetworkConfig(listen="127.0.0.1:0", domain=self.domain)
        config = MoEConfig(
            group=LonelyGroup(0, 2), num_experts=3, hidden_size=H, topk=K, max_tokens_per_rank=T, dtype=torch.float32,
            transport="cpu", network=network, timeout_s=timeout_s, **fields,
        )  # fmt: skip
        self.transport = CpuTransport(config)
        self.transport.allocate(None)
        comm = self.transport.native()
        assert comm.region is not None
        assert comm.landing is not None
        assert comm.channel is not None
        self.lib, self.geometry, self.pointer = comm.lib, self.transport.geometry, comm.pointer
        self.region, self.channel, self.rank = comm.region.bytes, comm.channel, 0
        mirror_bytes = len(comm.landing.bytes) // 2
        self.mirror = memoryview(comm.landing.bytes.numpy())[mirror_bytes:]
        self.lib.cd_set_hosts(self.pointer, (ctypes.c_int32 * 2)(0, 1))
        self.lib.cd_activate(self.pointer, mask)
        self.parts = native.region_parts(self.geometry)
        self._handle = HANDLER(self.lib.cd_network_handler())

    def close(self) -> None:
        self.transport.close()

    def ticket(self) -> NetworkTicket:
        return self.channel.ticket()

    def write(self, at: int, values: bytes) -> None:
        """What the network has written to the mirror."""
        self.mirror[at : at + len(values)] = values

    def word(self, at: int, own: bool = False) -> int:
        raw = self.region.numpy() if own else self.mirror
        return int(struct.unpack_from("=Q", raw, at)[0])

    def comes(self, kind: int, place: int, seq: int) -> None:
        """An immediate of rank 1."""
        immediate = kind << 28 | place << SEQ_BITS | seq & (1 << SEQ_BITS) - 1
        self._handle(self.pointer, 1, ARRIVED, immediate)

    def slot(self, op: int, seq: int) -> tuple[int, int]:
        """(number of the slot of a dispatch (0) or combine (1), where it begins)."""
        slot = seq % int(self.geometry.in_flight)
        part = ("dispatch", "combine")[op]
        return slot, getattr(self.parts, part) + slot * getattr(self.parts, f"{part}_slot")

    def comes_head(
        self, op: int, seq: int, tokens: int = 0, mode: int = 0, origin: int = 1, others: int = 0, rows: int = 0
    ) -> None:
        """Of a dispatch (0) or combine (1), which says so many other messages, and of rows in its first chunk."""
        slot, at = self.slot(op, seq)
        self.write(at, HEAD.pack(0, 0, seq, origin, tokens, 0, 0, mode, others, rows, *[0] * 15))
        self.comes((DISPATCH_HEAD, COMBINE_HEAD)[op], slot, seq)

    def comes_places(self, op: int, seq: int, places: list[int]) -> None:
        """Of a dispatch: [T, K] places; of a combine: the table of this rank's tokens."""
        self.write(self.slot(op, seq)[1] + HEAD_BYTES, struct.pack(f"={len(places)}i", *places))

    def dispatches(self, number: int) -> None:
        """Without tokens, by this rank alone."""
        op = native.dispatch_op((0,) * 7, (0, 0), (0,) * 4, (1, 1, 0), (0,) * 7)
        for _ in range(number):
            assert self.lib.cd_dispatch(self.pointer, ctypes.byref(op), native.SEND) == native.OK

    def dispatch(self, previous: DispatchHandle | None = None) -> tuple[DispatchOutput, DispatchHandle]:
        """Of this rank's T tokens, all for expert 0, which is its own, and expert 2, which is rank 1's."""
        ids, weights = torch.tensor([[0, 2]] * T, dtype=torch.int32), torch.ones(T, K)
        args = DispatchArgs(torch.ones(T, H), None, ids, weights, Mode.LL, previous)
        return self.transport.dispatch(args).wait()

    def counts(self, seq: int) -> bool:
        """Whether the head of rank 1's dispatch `seq`, which has no other message, wakes this rank."""
        events = self.region[:4].view(torch.int32)
        before = int(events[0])
        self.comes_head(0, seq)
        return int(events[0]) > before

    def comes_entry(self, tag: int, counters: list[int], index: int = 1) -> None:
        """Rank 1 has entered set_active."""
        self.write(RESYNCS_AT + 64 * index + 8, struct.pack("=4QQ", *counters, tag))
        self.comes(RESYNC, index, tag)

    def agrees(self, tag: int, limit_s: float = 0.0) -> int:
        """The native set_active of both ranks: its status."""
        return int(self.lib.cd_resync(self.pointer, 3, tag - 1, int(limit_s * 1e9)))


Make = Callable[..., Receiver]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Receiver] = []

    def receiver(*args: Any, **fields: Any) -> Receiver:
        made.append(Receiver(*args, **fields))
        return made[-1]

    yield receiver
    for each in made:
        each.close()


def test_a_message_counts_once_and_not_behind_a_later_one(make: Make) -> None:
    receiver = make()
    assert receiver.counts(1)
    assert not receiver.counts(1)
    receiver.dispatches(3)
    assert receiver.counts(3)
    assert not receiver.counts(1)


def test_messages_count_after_a_long_time_without_any(make: Make) -> None:
    """Rank 1 sends to another rank of this host during many dispatches. Then the low bits of the next number are below
    those of the last number received here."""
    receiver = make()
    assert receiver.counts(1)
    assert receiver.counts(2)
    receiver.dispatches((1 << SEQ_BITS - 1) + 10)
    assert receiver.counts((1 << SEQ_BITS - 1) + 10)
    assert receiver.counts((1 << SEQ_BITS - 1) + 11)


@pytest.mark.parametrize("wrong", [{"origin": 7}, {"mode": 1}])
def test_credit_of_a_refused_dispatch_is_for_what_has_come(make: Make, wrong: dict[str, int]) -> None:
    """A row that is still on its way would land on those of the dispatch that takes the slot next."""
    early = make(3)
    early.comes_head(0, 1, **wrong, rows=1)
    with pytest.raises(PeerTimeout, match="payload"):
        early.dispatch()
    assert early.word(CONSUMED_AT + 64, own=True) == 0
    late = make(3, timeout_s=10.0)
    late.comes_head(0, 1, **wrong, rows=1)
    late.comes(DISPATCH_ROWS, 1, 1)
    with pytest.raises(EpError, match=r"routing of dispatch 1|step_tokens"):
        late.dispatch()
    assert late.word(CONSUMED_AT + 64, own=True) == 1


def test_credit_of_a_refused_combine_is_for_what_has_come(make: Make) -> None:
    receiver = make(3)
    receiver.comes_head(0, 1)
    out, handle = receiver.dispatch()
    receiver.comes_head(1, 1, origin=7, rows=1)
    with pytest.raises(PeerTimeout, match="payload"):
        receiver.transport.combine(CombineArgs(out.tokens, handle, None, True)).wait()


@pytest.mark.parametrize("ahead", [(1 << 17) - 2, (1 << 17) + 3, (1 << 18) + 5, 3 << 18])
def test_numbers_after_an_agreement_are_those_of_the_largest(make: Make, ahead: int) -> None:
    """Rank 1 has done so many operations without this rank, which stood still. Its first messages after both have
    agreed come while this rank has not left set_active."""
    receiver = make(3)
    numbers = [ahead + i for i in range(4)]
    receiver.comes_entry(5, numbers)
    assert receiver.agrees(5, limit_s=0.01) == native.NOTHING, "rank 1 has not said that it has this rank's numbers"
    assert list(receiver.transport.native().next) == numbers
    receiver.comes(MEMBERSHIP, 1, 5)
    dispatch, combine, barrier, exchange = numbers
    receiver.comes(EXCHANGE, exchange % 2, exchange)
    receiver.comes(BARRIER, 0, barrier)
    assert receiver.counts(dispatch)
    receiver.comes_head(1, combine)
    assert receiver.word(LATEST_AT) == exchange
    assert receiver.word(EXCHANGES_AT + 128 * (exchange % 2)) == exchange
    assert receiver.agrees(5) == native.OK
    assert receiver.lib.cd_barrier(receiver.pointer) == native.OK
    assert receiver.transport.exchange([0] * 8)[1] is not None
    slot, at = receiver.slot(0, dispatch)
    assert struct.unpack_from("=Q", receiver.mirror, at + 16)[0] == dispatch
    assert receiver.word(PUBLISHED_AT + 64 * slot) == dispatch
    receiver.comes_head(0, dispatch, origin=dispatch)
    receiver.dispatch()


def test_nobody_goes_on_before_all_have_told_those_left_out(make: Make) -> None:
    """A rank that was left out reads rows beside a survivor of its host, whose `membership` tells it. Another
    survivor's next rows come only once that word stands."""
    receiver = make(3)
    receiver.comes_entry(5, [1, 1, 1, 1])
    assert receiver.word(MEMBERSHIP_AT, own=True) == 0
    assert receiver.agrees(5, limit_s=0.01) == native.NOTHING
    assert receiver.word(MEMBERSHIP_AT, own=True) == 5, "before rank 1 may go on, which waits for it"
    receiver.comes_entry(5, [1, 1, 1, 1])
    assert receiver.agrees(5, limit_s=0.01) == native.NOTHING
    receiver.comes(MEMBERSHIP, 1, 5)
    assert receiver.agrees(5) == native.OK


@pytest.mark.parametrize("tokens", [T + 1, 100_000, 2**31 - 1, -1, -5, -(2**31)])
def test_a_head_of_more_tokens_than_there_can_be(make: Make, tokens: int) -> None:
    receiver = make(3)
    receiver.comes_head(0, 1, tokens)
    with pytest.raises(TransportError, match=rf"dispatch: rank 1 sent {tokens} tokens, expected 0\.\.{T}"):
        receiver.dispatch()


@pytest.mark.parametrize("tokens", [1, 3, T, T + 1, -1])
def test_an_older_routing_with_other_tokens_than_it_was_made_of(make: Make, tokens: int) -> None:
    receiver = make(3)
    receiver.comes_places(0, 1, [0, 2] * T)
    receiver.comes_head(0, 1, 2)
    _, handle = receiver.dispatch()
    receiver.comes_head(0, 2, tokens, origin=1)
    with pytest.raises(TransportError, match=rf"dispatch: rank 1 sent {tokens} tokens, expected 0\.\.2"):
        receiver.dispatch(handle)


@pytest.mark.parametrize("place", [2 * T, 100_000, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_table_that_names_no_partial(make: Make, place: int, exact: bool) -> None:
    receiver = make(3, exact_combine=exact)
    receiver.comes_head(0, 1)
    out, handle = receiver.dispatch()
    place += T * (K - 1) * 2 if exact and place == 2 * T else 0
    receiver.comes_places(1, 1, [0, 0, 0, 0, place, place, 0, 0])
    receiver.comes_head(1, 1)
    with pytest.raises(TransportError, match=rf"combine: rank 1 sent place {place} of a partial, expected -1\.\."):
        receiver.transport.combine(CombineArgs(out.tokens, handle, None, True)).wait()


def test_places_of_experts_that_a_rank_does_not_have(make: Make) -> None:
    """This rank has expert 0 alone; rank 1 has two, so each rank has two places."""
    receiver = make(3, layout=Layout.GROUPED, expert_map=ExpertMap.from_ranks([[0], [1, 2]]))
    receiver.comes_places(0, 1, [0, 1, 2, 3, 4, 2**31 - 1, -(2**31), -7])
    receiver.comes_head(0, 1, T)
    out, handle = receiver.dispatch()
    assert (out.counts.tolist(), out.num_rows.tolist(), out.num_dropped.tolist()) == ([T + 1], [T + 1], [0])
    assert handle.state.rows[1].tolist() == [[T, -1], [-1, -1], [-1, -1], [-1, -1]]


WRONG = {
    "kind": (12, 0, 1),
    "kind_and_all": (15, 1023, 1),
    "slot_of_a_head": (DISPATCH_HEAD, 40, 1),
    "slot_of_another_number": (DISPATCH_HEAD, 0, 1),
    "slot_of_rows": (COMBINE_ROWS, 63, 1),
    "credit": (DISPATCH_CONSUMED, 1023, 1),
    "credit_of_combine": (COMBINE_CONSUMED, 2, 2),
    "barrier": (BARRIER, 1, 1),
    "exchange": (EXCHANGE, 2, 1),
    "parity": (EXCHANGE, 0, 1),
    "resync": (RESYNC, 2, 1),
    "membership": (MEMBERSHIP, 3, 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_rank_can_mean_ends_its_connection(make: Make, wrong: str) -> None:
    receiver = make(3, timeout_s=10.0)
    with End(1) as far:
        join(receiver, far)  # type: ignore[arg-type]
        kind, place, seq = WRONG[wrong]
        far.push(0, 0, 0, kind << 28 | place << SEQ_BITS | seq)
        far.until(lambda events: (0, DOWN) in [event[:2] for event in events])
        with pytest.raises(PeerTimeout, match="rank 1 sent what no rank of this version sends") as raised:
            receiver.transport.barrier()
    assert raised.value.peer == 1
    fault = native.NativeFault()
    receiver.lib.cd_fault(receiver.pointer, ctypes.byref(fault))
    assert fault.error == errno.EPROTO


def test_more_messages_than_a_head_says(make: Make) -> None:
    receiver = make(3, timeout_s=10.0)
    with End(1) as far:
        join(receiver, far)  # type: ignore[arg-type]
        receiver.comes_head(0, 1, rows=1)
        for _ in range(2):
            far.push(0, 0, 0, DISPATCH_ROWS << 28 | 1 << SEQ_BITS | 1)
        far.until(lambda events: (0, DOWN) in [event[:2] for event in events])


NUMBERS = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2 * T * K + 2)
IMMEDIATES = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 1023), st.integers(0, 4)), max_size=6)


BY_HOST = {"combine_order": CombineOrder.DOMAIN, "two_hop_tokens": 0}


@pytest.mark.parametrize("fields", [*({"layout": each} for each in Layout), {"exact_combine": True}, BY_HOST])
def test_nothing_that_comes_is_read_or_written_beyond(make: Make, fields: dict[str, Any]) -> None:
    """Random heads, places, tables and immediates: an error, or a result, and no byte beside the results' own."""
    receiver = make(3, timeout_s=0.002, **fields)
    guards = [receiver.region[-4096:].clone()]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(-1, T + 1) | NUMBERS, st.lists(NUMBERS, min_size=T * K, max_size=T * K),
        st.lists(NUMBERS, min_size=T * K, max_size=T * K), IMMEDIATES,
    )  # fmt: skip
    def story(tokens: int, places: list[int], table: list[int], immediates: list[tuple[int, int, int]]) -> None:
        seq = receiver.transport.native().next[0]
        for kind, place, ahead in immediates:
            receiver.comes(kind, place, seq + ahead)
        receiver.comes_places(0, seq, places)
        receiver.comes_head(0, seq, tokens, origin=seq)
        try:
            out, handle = receiver.dispatch()
            at = receiver.transport.native().next[1]
            receiver.comes_places(1, at, table)
            receiver.comes_head(1, at, origin=seq)
            receiver.transport.combine(CombineArgs(out.tokens, handle, None, True)).wait()
        except EpError:
            pass
        tag = receiver.word(MEMBERSHIP_AT, own=True) + 1  # whatever has failed: go on from new numbers
        receiver.comes_entry(tag, [0] * 4, tag % 2)
        receiver.comes(MEMBERSHIP, tag % 2, tag)
        receiver.agrees(tag)

    story()
    assert torch.equal(receiver.region[-4096:], guards[0])


class Gate(threading.Event):
    """Closed: who waits stands still, and `reached` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


@contextlib.contextmanager
def stand_still(receiver: Receiver) -> Iterator[None]:
    """Its proxy thread does, in the handler of another channel."""
    with End(1) as far, End(0, shared=True, domain=receiver.domain) as here:
        join(here, far)
        here.may_hear = gate = Gate()
        far.push(0, 0, 0, 1)
        assert gate.reached.wait(10.0)
        try:
            yield
        finally:
            gate.set()


@pytest.fixture
def stuck(make: Make) -> Iterator[Receiver]:
    """A receiver whose ring is full."""
    receiver = make(3)
    with stand_still(receiver):
        while receiver.channel.push(1, 0, 0, 0):
            pass
        yield receiver


CALLS: dict[str, Callable[[Receiver], object]] = {
    "dispatch": Receiver.dispatch,
    "barrier": lambda receiver: receiver.transport.barrier(),
    "exchange": lambda receiver: receiver.transport.exchange([0] * 8),
    "set_active": lambda receiver: receiver.transport.judge(receiver.agrees(5)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_for_the_own_proxy_has_a_deadline(stuck: Receiver, call: str) -> None:
    with pytest.raises(PeerTimeout, match=r"credit .*does not leave"):
        CALLS[call](stuck)


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_for_the_own_proxy_ends_for_a_rank_that_is_given_up(stuck: Receiver, call: str) -> None:
    stuck.lib.cd_give_up(stuck.pointer, 2)
    with pytest.raises(PeerTimeout) as raised:
        CALLS[call](stuck)
    assert raised.value.given_up
    assert raised.value.waited_s < 0.1


def test_a_barrier_waits_for_its_word_within_its_own_deadline(make: Make) -> None:
    """What rank 1 is to get does not leave, though that one has come: half of the deadline is over by then."""
    receiver = make(3, timeout_s=0.4)
    with stand_still(receiver):
        threading.Timer(0.2, receiver.comes, (BARRIER, 0, 1)).start()
        with pytest.raises(PeerTimeout, match=r"credit .*does not leave") as raised:
            receiver.transport.barrier()
    assert raised.value.waited_s < 0.55


# Own words that say that a call has begun to wait, and how it would end.
WAITS: dict[str, tuple[Callable[[Receiver], object], int, Callable[[Receiver], None]]] = {
    "dispatch": (Receiver.dispatch, PUBLISHED_AT + 64, lambda receiver: receiver.comes_head(0, 1)),
    "barrier": (CALLS["barrier"], BARRIER_AT, lambda receiver: receiver.comes(BARRIER, 0, 1)),
    "exchange": (CALLS["exchange"], LATEST_AT, lambda receiver: receiver.comes(EXCHANGE, 1, 1)),
    "wait_for_peer": (
        lambda receiver: receiver.transport.wait_for_peer(20.0), 4, lambda receiver: receiver.comes(EXCHANGE, 1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("raises", [True, False])
def test_a_signal_is_handled_within_a_wait(make: Make, wait: str, raises: bool) -> None:
    """Its handler's exception ends the wait, and breaks what peers depend on; a handler without one ends nothing."""
    receiver, handled = make(3, timeout_s=20.0), threading.Event()
    call, word, ends = WAITS[wait]

    def handler(*_: object) -> None:
        handled.set()
        if raises:
            raise KeyboardInterrupt

    def signal_then_end() -> None:
        End.poll(lambda: receiver.word(word, own=True) & 0xFFFFFFFF != 0, 10.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handled.wait(5.0)
        if not raises:
            ends(receiver)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=signal_then_end)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
            call(receiver)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    is_broken = raises and wait != "wait_for_peer"
    with pytest.raises(TransportError, match="signal handler") if is_broken else contextlib.nullcontext():
        receiver.transport.check()
