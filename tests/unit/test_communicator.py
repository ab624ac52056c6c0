"""MoECommunicator over a scripted transport: its states, its bring-up, and what never reaches the transport."""

import copy
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ep_kernels import bringup, communicator, tuning, types
from ep_kernels.collectives import collective_checks
from ep_kernels.communicator import MoECommunicator
from ep_kernels.config import MoEConfig
from ep_kernels.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    ClosedError,
    ConfigError,
    HandleError,
    PeerTimeout,
    TransportError,
)
from ep_kernels.routing import ExpertMap
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Layout, Mode, Overflow

CAN = Capabilities("cpu", False, (torch.bfloat16, torch.float32), (Mode.LL, Mode.HT), False, "abi-1")
TIMEOUT = PeerTimeout(peer=1, op="dispatch", phase="payload", expected=3, seen=2, waited_s=1.0)


class Script:
    """A transport that records calls and fails where told. Delivers every token to this rank, FLAT."""

    def __init__(self, config: MoEConfig) -> None:
        self.config, self.capabilities = config, CAN
        self.calls: list[str] = []
        self.dispatched: list[DispatchArgs] = []
        self.combined: list[CombineArgs] = []
        self.fail: dict[str, BaseException] = {}
        self.dropped, self.crossover, self.epoch = 0, 16, config.group.epoch
        self.device = "scripted"
        self.allocated_for: int | None = -1

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._call(name)

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        self._call("allocate")
        self.allocated_for = ll_max_tokens
        return b"ticket"

    def ll_max_tokens(self) -> int:
        return self.crossover

    def device_name(self) -> str:
        return self.device

    def quick(self, number: int, mode: Mode, ll_max_tokens: int) -> None:
        """No plans."""

    def dropped_by(self, out: DispatchOutput, handle: DispatchHandle) -> int:
        return int(out.num_dropped)

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        self._call("set_active")
        self.epoch = epoch

    def dispatch(self, args: DispatchArgs) -> Any:
        self._call("dispatch")
        self.dispatched.append(args)
        return Pending(lambda: self._deliver(args, len(self.dispatched)))

    def combine(self, args: CombineArgs) -> Any:
        self._call("combine")
        self.combined.append(args)
        return Pending(lambda: (args.y, args.row_weights), lambda: self._call("combine wait"))

    def _deliver(self, args: DispatchArgs, seq: int) -> tuple[DispatchOutput, DispatchHandle]:
        self._call("dispatch wait")
        rows, one = len(args.x), torch.zeros(1, dtype=torch.int32)
        out = DispatchOutput(
            layout=Layout.FLAT,
            tokens=args.x,
            scales=None,
            counts=one + rows,
            offsets=None,
            topk_ids=args.topk_ids,
            topk_weights=args.topk_weights,
            num_rows=one + rows,
            valid=torch.ones(rows, dtype=torch.bool),
            num_dropped=one + self.dropped,
            num_invalid_ids=one,
        )
        return out, DispatchHandle(0, seq, rows, args.mode, self.epoch, None, tuple(out.tokens.shape[:-1]))


class Pending:
    def __init__(self, result: Callable[[], Any], check: Callable[[], None] = lambda: None) -> None:
        self._result, self._check = result, check

    def wait(self) -> Any:
        self._check()
        return self._result()


class Group:
    """`answers` gives what rank r says, from what this rank says."""

    def __init__(self, answers: Callable[[int, bytes], bytes] = lambda rank, mine: mine, size: int = 2) -> None:
        self.rank, self.size, self.epoch, self._answers = 0, size, 0, answers

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        return [self._answers(rank, payload) for rank in range(self.size)]


def hello(**changes: Any) -> Callable[[int, bytes], bytes]:
    """Rank 1 says something else."""

    def answer(rank: int, mine: bytes) -> bytes:
        said = msgspec.msgpack.decode(mine, type=bringup.Hello)
        return msgspec.msgpack.encode(msgspec.structs.replace(said, **changes)) if rank == 1 else mine

    return answer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Every transport that was created."""
    scripts: list[Script] = []

    def create(config: MoEConfig) -> Script:
        scripts.append(Script(config))
        return scripts[-1]

    monkeypatch.setattr(communicator, "create", create)
    return scripts


def config(**changes: Any) -> MoEConfig:
    fields: dict[str, Any] = {
        "group": Group(),
        "num_experts": 4,
        "hidden_size": 8,
        "topk": 2,
        "max_tokens_per_rank": 32,
        "mode": Mode.HT,
    }
    return MoEConfig(**(fields | changes))


def arguments(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 8).bfloat16(), torch.zeros(rows, 2, dtype=torch.int32), torch.ones(rows, 2)


def test_bring_up_in_order(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    assert made[0].calls == ["allocate", "import_regions", "barrier"]
    assert (comm.rank, comm.size, comm.num_local_experts, comm.epoch) == (0, 2, 2, 0)


def test_the_number_of_local_experts_is_counted_once(made: list[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    comm = MoECommunicator(config())
    monkeypatch.setattr(ExpertMap, "num_local_experts", lambda *_: pytest.fail("went through the whole map again"))
    assert comm.num_local_experts == 2


@pytest.mark.parametrize("step", ["allocate", "import_regions", "barrier"])
def test_failed_bring_up_frees(made: list[Script], monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def create(config: MoEConfig) -> Script:
        script = Script(config)
        script.fail[step] = TransportError("no")
        made.append(script)
        return script

    monkeypatch.setattr(communicator, "create", create)
    with pytest.raises(TransportError, match="no"):
        MoECommunicator(config())
    assert made[0].calls[-1] == "close"


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (Group(hello(abi="abi-2")), "region ABI abi-2 of rank 1 differs from abi-1 of rank 0"),
        (Group(hello(epoch=3)), "rank 1 is in epoch 3, rank 0 in epoch 0"),
        (Group(lambda rank, mine: b"\x00" if rank else mine), "rank 1 sent no hello"),
        (Group(lambda rank, mine: msgspec.msgpack.encode({"abi": 3}) if rank else mine), "rank 1 sent no hello"),
    ],
)
def test_hellos_that_are_refused(made: list[Script], group: Group, says: str) -> None:
    with pytest.raises(TransportError, match=says):
        MoECommunicator(config(group=group))
    assert made[0].calls == ["allocate", "close"]


def test_a_group_that_lost_a_hello_is_refused(made: list[Script]) -> None:
    group = Group()
    group.all_gather = lambda payload, timeout_s: [payload]  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="expected 2 hellos, got 1"):
        MoECommunicator(config(group=group))


def test_every_field_is_compared(made: list[Script]) -> None:
    fields = bringup.fingerprint(config())
    assert set(fields) == set(MoEConfig.__struct_fields__) - {"group", "kernel_cache_dir", "absent_id"}
    for name in fields:
        with pytest.raises(ConfigError, match=f"^{name}: expected .* as on rank 0, got 'other on rank 1'"):
            MoECommunicator(config(group=Group(hello(fields=fields | {name: "other"}))))


def test_explicit_defaults_are_no_mismatch() -> None:
    explicit = config(layout=Layout.FLAT, output_dtype=torch.bfloat16, combine_dtype=torch.bfloat16)
    assert bringup.fingerprint(config()) == bringup.fingerprint(explicit)


def test_what_the_transport_cannot_do(made: list[Script]) -> None:
    with pytest.raises(ConfigError, match=r"^dtype: .*transport 'cpu'"):
        MoECommunicator(config(dtype=torch.float16))
    assert made[0].calls == ["close"]


def test_what_the_algorithms_cannot_do(made: list[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "create", lambda c: replace_capabilities(Script(c), modes=(Mode.LL,)))
    with pytest.raises(ConfigError, match=r"^mode"):
        MoECommunicator(config(mode=Mode.AUTO))


def replace_capabilities(script: Script, **changes: Any) -> Script:
    script.capabilities = replace(CAN, **changes)
    return script


AUTO: dict[str, Any] = {"mode": Mode.AUTO, "layout": Layout.FLAT}


def tuned(folder: Path, crossover: int, **changes: Any) -> dict[str, Any]:
    """Fields of a config whose cache has a crossover for it."""
    fields = AUTO | {"kernel_cache_dir": str(folder)} | changes
    record = tuning.Record(
        key=tuning.key_of(config(**fields), "scripted"), ll_max_tokens=crossover,
        tokens=(1,), ll_us=(1.0,), ht_us=(2.0,), measured_at="2026-01-01T00:00:00+00:00", crossdock="0",
    )  # fmt: skip
    tuning.remember(folder / tuning.FILE_NAME, record)
    return fields


@pytest.mark.parametrize("measured", [5, 0])
def test_what_this_machine_has_measured_is_the_crossover(made: list[Script], tmp_path: Path, measured: int) -> None:
    comm = MoECommunicator(config(**tuned(tmp_path, measured)))
    assert (comm.ll_max_tokens, comm.config.ll_max_tokens) == (measured, measured)
    for asked in (measured, measured + 1, None):
        comm.dispatch(*arguments(min(3, measured)), step_tokens=asked)
        assert made[-1].dispatched[-1].mode is (Mode.LL if asked == measured else Mode.HT)


def test_the_regions_are_allocated_for_the_crossover_that_was_agreed_on(made: list[Script], tmp_path: Path) -> None:
    comm = MoECommunicator(config(**tuned(tmp_path, 5)))
    (lived,) = made
    assert (lived.config.ll_max_tokens, comm.config.ll_max_tokens, lived.allocated_for) == (None, 5, 5)
    assert lived.calls == ["allocate", "import_regions", "barrier"]


@pytest.mark.parametrize(("here", "there", "agreed"), [(5, 7, 5), (5, None, 5), (None, 7, 7), (None, None, 16)])
def test_the_lowest_rank_that_has_measured_decides(
    made: list[Script], tmp_path: Path, here: int | None, there: int | None, agreed: int
) -> None:
    fields = AUTO | {"kernel_cache_dir": str(tmp_path)} if here is None else tuned(tmp_path, here)
    comm = MoECommunicator(config(**fields, group=Group(hello(measured=there))))
    assert comm.ll_max_tokens == agreed


def test_another_shape_or_device_has_measured_nothing(
    made: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = tuned(tmp_path, 5)
    assert MoECommunicator(config(**fields, num_experts=8)).ll_max_tokens == 16
    monkeypatch.setattr(Script, "device_name", lambda self: "another")
    assert MoECommunicator(config(**fields)).ll_max_tokens == 16


def test_a_communicator_names_its_device_as_records_are_kept(made: list[Script]) -> None:
    assert MoECommunicator(config()).device_name == "scripted"


def test_configured_crossover_wins(made: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = tuned(tmp_path, 5)
    monkeypatch.setattr(tuning, "recall", lambda *_: pytest.fail("asked what this machine has measured"))
    assert MoECommunicator(config(**fields, ll_max_tokens=9)).ll_max_tokens == 9
    assert made[0].allocated_for == 9


def test_where_ranks_cannot_settle_the_transport_is_closed(made: list[Script], tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="region ABI abi-2"):
        MoECommunicator(config(**AUTO, kernel_cache_dir=str(tmp_path), group=Group(hello(abi="abi-2"))))
    assert made[0].calls == ["close"]


def test_one_rank_is_given_a_crossover_and_the_other_none(made: list[Script], tmp_path: Path) -> None:
    fields = AUTO | {"kernel_cache_dir": str(tmp_path)}
    for mine, theirs in ((None, 9), (9, None)):
        said = bringup.fingerprint(config(**fields, ll_max_tokens=theirs))
        with pytest.raises(
            ConfigError, match=f"^ll_max_tokens: expected {mine} as on rank 0, got '{theirs} on rank 1'"
        ):
            MoECommunicator(config(**fields, ll_max_tokens=mine, group=Group(hello(fields=said))))
        assert "import_regions" not in made[-1].calls


def test_a_rank_that_does_not_ask_is_told_apart_from_one_that_does(made: list[Script]) -> None:
    said = bringup.fingerprint(config(mode=Mode.LL, layout=Layout.FLAT))
    with pytest.raises(ConfigError, match=r"^mode: "):
        MoECommunicator(config(**AUTO, group=Group(hello(fields=said))))


def test_a_lost_peer_breaks_it_until_set_active(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    _, handle = comm.dispatch(*arguments())
    made[0].fail["dispatch wait"] = TIMEOUT
    request = comm.dispatch_async(*arguments())
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="rank 1"):
            request.wait()
    before = len(made[0].calls)
    for call in (comm.check, comm.barrier, lambda: comm.dispatch(*arguments()), lambda: comm.exchange([0] * 8)):
        with pytest.raises(PeerTimeout):
            call()
    assert len(made[0].calls) == before, "nothing reached the transport"
    made[0].fail.clear()
    comm.set_active([True, False], 4)
    assert (comm.epoch, comm.active) == (4, (True, False))
    comm.check()
    with pytest.raises(HandleError, match="epoch 0"):
        comm.combine(arguments()[0], handle)
    out, handle = comm.dispatch(*arguments())
    comm.combine(out.tokens, handle)


def test_failed_set_active_stays_broken(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    made[0].fail["set_active"] = TIMEOUT
    with pytest.raises(PeerTimeout):
        comm.set_active([True, True], 1)
    with pytest.raises(PeerTimeout):
        comm.check()
    assert comm.epoch == 0


@pytest.mark.parametrize("words", [[1.5] * 8, [0] * 7, [None] * 8, [1 << 63] * 8, range(9), iter([0] * 8), 8])
def test_no_rank_enters_an_exchange_of_other_words(made: list[Script], words: Any) -> None:
    """One that failed within it would be out of step with the others."""
    comm = MoECommunicator(config())
    with pytest.raises(ArgumentError, match="words: expected 8 int64"):
        comm.exchange(words)
    assert "exchange" not in made[0].calls
    comm.exchange([True, np.int64(-1), *range(6)])
    assert made[0].calls[-1] == "exchange"


def test_abort_leaves_only_close(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    comm.abort("moving on")
    for call in (comm.check, comm.barrier, lambda: comm.set_active([True, True], 1)):
        with pytest.raises(AbortedError, match="moving on"):
            call()
    comm.close()
    comm.close()
    assert made[0].calls.count("close") == 1
    with pytest.raises(ClosedError):
        comm.check()


def test_only_peers_can_be_given_up(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    comm.give_up([1])
    assert made[0].calls[-1] == "give_up"
    for wrong in ([0], [2], [-1], [1, 0]):
        with pytest.raises(ArgumentError, match=r"ranks: expected other ranks of 0\.\.1 than 0"):
            comm.give_up(wrong)
    comm.close()
    comm.give_up([1])
    assert made[0].calls.count("give_up") == 1


def test_later_faults_do_not_hide_an_abort(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    made[0].fail["dispatch wait"] = TIMEOUT
    request = comm.dispatch_async(*arguments())
    comm.abort("re-forming")
    with pytest.raises(AbortedError):
        request.wait()
    with pytest.raises(AbortedError):
        comm.check()


def test_requests_of_an_old_epoch_are_void(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    begun = [comm.dispatch_async(*arguments()) for _ in range(2)]
    comm.set_active([True, True], 1)
    for request in begun:
        with pytest.raises(HandleError, match="begun in epoch 0, the group is in epoch 1"):
            request.wait()
        assert request.done
    assert "dispatch wait" not in made[0].calls
    comm.dispatch(*arguments())


def test_in_flight_is_counted(made: list[Script]) -> None:
    comm = MoECommunicator(config(max_in_flight=2))
    first, second = (comm.dispatch_async(*arguments()) for _ in range(2))
    with pytest.raises(HandleError, match="max_in_flight = 2"):
        comm.dispatch_async(*arguments())
    out, handle = second.wait()
    with pytest.raises(HandleError, match="begun 2 before this"):
        comm.dispatch_async(*arguments())
    assert made[0].calls.count("dispatch") == 2, "refused before it is sent"
    first.wait()
    comm.dispatch_async(*arguments()).wait()
    combines = [comm.combine_async(out.tokens, handle) for _ in range(2)]
    with pytest.raises(HandleError, match="combine"):
        comm.combine(out.tokens, handle)
    assert torch.equal(combines[1].wait(), out.tokens)
    with pytest.raises(AttributeError, match="row_weights"):
        _ = combines[1].weights


def test_a_dropped_request_is_received_by_the_operation_that_needs_its_room(made: list[Script]) -> None:
    """And only that one; a request that somebody still has is in the way as before."""
    comm = MoECommunicator(config(max_in_flight=2))
    comm.dispatch_async(*arguments())
    kept = comm.dispatch_async(*arguments())
    assert "dispatch wait" not in made[0].calls
    comm.dispatch_async(*arguments())
    assert made[0].calls[-2:] == ["dispatch wait", "dispatch"]
    with pytest.raises(HandleError, match="begun 2 before this"):
        comm.dispatch(*arguments())
    out, handle = kept.wait()
    comm.combine_async(out.tokens, handle)
    for _ in range(3):
        comm.combine(out.tokens, handle)
    assert made[0].calls.count("combine wait") == 4


def test_a_peer_that_is_lost_meanwhile_is_named(made: list[Script]) -> None:
    """Of the dropped request, by the operation that receives it: the communicator is then broken."""
    comm = MoECommunicator(config(max_in_flight=1))
    comm.dispatch_async(*arguments())
    made[0].fail["dispatch wait"] = TIMEOUT
    with pytest.raises(PeerTimeout, match="rank 1"):
        comm.dispatch(*arguments())
    assert made[0].calls.count("dispatch") == 1, "nothing was sent"
    with pytest.raises(PeerTimeout, match="rank 1"):
        comm.dispatch(*arguments())


@pytest.mark.parametrize("flight", [1, 2, 3])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_request_may_be_overtaken_so_often(made: list[Script], kind: str, at_once: bool, flight: int) -> None:
    """Slots are taken in turn, whoever waits for what: an operation that would take a pending one's is not sent. Those
    of the other kind do not count."""
    comm = MoECommunicator(config(max_in_flight=flight))
    out, handle = comm.dispatch(*arguments())
    operations: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dispatch": (lambda: comm.dispatch(*arguments()), lambda: comm.dispatch_async(*arguments())),
        "combine": (lambda: comm.combine(out.tokens, handle), lambda: comm.combine_async(out.tokens, handle)),
    }
    now, later = operations.pop(kind)
    ((other, _),) = operations.values()
    for _ in range(3):
        request = later()
        for _ in range(flight - 1):
            now() if at_once else later().wait()
            other()
        sent = made[0].calls.count(kind)
        for call in (now, later):
            with pytest.raises(HandleError, match=rf"^{kind}: expected .* max_in_flight = {flight} .* {flight} before"):
                call()
        assert made[0].calls.count(kind) == sent
        other()
        request.wait()
        now()


def test_overflow_raise_carries_the_rest(made: list[Script]) -> None:
    comm = MoECommunicator(config(max_recv_rows=3))
    made[0].dropped = 2
    with pytest.raises(CapacityError, match="2 rows") as error:
        comm.dispatch(*arguments())
    comm.combine(error.value.output.tokens, error.value.handle)
    drops = MoECommunicator(config(max_recv_rows=3, overflow=Overflow.DROP))
    made[1].dropped = 2
    assert int(drops.dispatch(*arguments())[0].num_dropped) == 2


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_request_repeats_any_error(made: list[Script], error: BaseException) -> None:
    comm = MoECommunicator(config())
    request = comm.dispatch_async(*arguments())
    made[0].fail["dispatch wait"] = error
    for _ in range(2):
        with pytest.raises(type(error)):
            request.wait()
    assert made[0].calls.count("dispatch wait") == 1


def test_previous_handle_is_checked(made: list[Script]) -> None:
    comm, other = MoECommunicator(config()), MoECommunicator(config())
    x, ids, weights = arguments()
    _, handle = comm.dispatch(x, ids + 1, weights)
    comm.dispatch(x, None, None, previous_handle=handle)
    args = made[0].dispatched[-1]
    assert args.previous is handle
    assert torch.equal(args.topk_ids, ids + 1)
    assert torch.equal(args.topk_weights, weights)
    with pytest.raises(HandleError, match="another communicator"):
        other.dispatch(x, None, None, previous_handle=handle)
    with pytest.raises(HandleError, match="made for 3 tokens, x has 2"):
        comm.dispatch(*arguments(2), previous_handle=handle)
    with pytest.raises(ArgumentError, match="handle"):
        comm.dispatch(x, ids, weights, previous_handle="it")  # type: ignore[arg-type]


def test_a_tensor_that_wraps_others_is_named(made: list[Script]) -> None:
    """As a DTensor does: it has no memory of its own."""
    comm = MoECommunicator(config())
    x, ids, weights = arguments()
    expected = r": expected a plain tensor, got a TwoTensor, which wraps others: .* DTensor's to_local"
    for bad in ((TwoTensor(x, x), ids, weights), (x, TwoTensor(ids, ids), weights)):
        with pytest.raises(ArgumentError, match=expected):
            comm.dispatch(*bad)
    with pytest.raises(ArgumentError, match="x" + expected):
        collective_checks.contiguous("x", TwoTensor(x, x), "cpu")


@pytest.mark.parametrize("other", ["of its own start", "a forked child"])
def test_a_handle_that_comes_from_another_process_is_refused(
    made: list[Script], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """The communicators of all ranks have the same numbers."""
    comm = MoECommunicator(config())
    out, handle = comm.dispatch(*arguments())
    for same in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert same.owner == handle.owner
        comm.combine(out.tokens, same)
    sent = pickle.dumps(handle)
    if other == "a forked child":
        monkeypatch.setattr(os, "getpid", lambda: 1)
    else:
        monkeypatch.setattr(types, "_TOKEN", bytes(8))
    with pytest.raises(HandleError, match="handle: made by another communicator, or in another process"):
        comm.combine(out.tokens, pickle.loads(sent))


def test_ids_reach_the_transport_as_int32(made: list[Script]) -> None:
    comm = MoECommunicator(config())
    x, ids, weights = arguments(2)
    wide = ids.long()
    wide[0, 0], wide[1, 1] = (1 << 40) + 1, -(1 << 40)
    comm.dispatch(x, wide, weights)
    got = made[0].dispatched[-1].topk_ids
    assert got.dtype == torch.int32
    assert got.tolist() == [[(1 << 31) - 1, 0], [0, -(1 << 31)]]


def test_any_thread_calls_after_close(made: list[Script]) -> None:
    with MoECommunicator(config()) as comm:
        pass
    comm.wake()
    comm.abort("late")
    assert comm.samples() == []
    assert made[0].calls[-1] == "close"
