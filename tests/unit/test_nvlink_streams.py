"""Which stream waits for which, when a communicator's caller changes streams: with streams that only take notes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ep_kernels.transports.nvlink.calls import streams
from ep_kernels.transports.nvlink.calls.routing_state import DispatchState, Origin
from ep_kernels.transports.nvlink.calls.streams import StreamOrder, tensors_in
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember
from ep_kernels.types import DispatchHandle, Mode


@dataclass(eq=False)
class Event:
    """What was in a stream when it was recorded."""

    after: tuple[str, ...] = ()

    def record(self, stream: Stream) -> None:
        self.after = tuple(stream.work)


@dataclass(eq=False)
class Stream:
    """What lies in it, and what it waits for."""

    cuda_stream: int
    capturing: bool = False
    work: list[str] = field(default_factory=list)

    def record_event(self) -> Event:
        return Event(tuple(self.work))

    def wait_event(self, event: Event) -> None:
        self.work += [name for name in event.after if name not in self.work]


class Device:
    """Stands for torch.cuda."""

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(7), Stream(9)]
        self.now = self.streams[0]

    def current_stream(self, _: object) -> Stream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.now.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    fake: Any = SimpleNamespace(
        cuda=made, Tensor=torch.Tensor, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: made.now.cuda_stream)
    )
    monkeypatch.setattr(streams, "torch", fake)
    return made


def launch(device: Device, order: StreamOrder, stream: int, name: str) -> Stream:
    """An operation on that stream."""
    with device.stream(device.streams[stream]):
        assert order.enter() == device.now.cuda_stream
        device.now.work.append(name)
        order.leave([])
        return device.now


def made_order() -> StreamOrder:
    order: Any = StreamOrder(SimpleNamespace(index=0))  # type: ignore[arg-type]
    return order  # type: ignore[no-any-return]


@pytest.mark.parametrize("turns", ["000", "01", "10", "0110", "0121020", "1112220"])
def test_each_comes_after_the_one_before(device: Device, turns: str) -> None:
    order, launched = made_order(), []
    for number, stream in enumerate(turns):
        used = launch(device, order, int(stream), f"op {number}")
        launched.append(f"op {number}")
        if number:
            assert launched[-2] in used.work[: used.work.index(launched[-1])], (turns, number)


def test_what_others_do_meanwhile_is_not_waited_for(device: Device) -> None:
    """Once a second stream has shown, an operation waits for the one before and for nothing that came after it."""
    order = made_order()
    launch(device, order, 0, "a")
    launch(device, order, 1, "b")
    device.streams[1].work.append("unrelated")
    assert "unrelated" not in launch(device, order, 2, "c").work


def test_capture_stays_by_itself(device: Device) -> None:
    """Captured operations follow each other, wait for nothing outside, and nothing outside waits for them."""
    order = made_order()
    launch(device, order, 0, "eager")
    device.streams[1].capturing = device.streams[2].capturing = True
    assert launch(device, order, 1, "first").work == ["first"]
    assert launch(device, order, 2, "second").work == ["first", "second"]
    assert launch(device, order, 1, "third").work == ["first", "second", "third"]
    device.streams[1].capturing = device.streams[2].capturing = False
    assert launch(device, order, 0, "later").work == ["eager", "later"]
    assert launch(device, order, 1, "last").work[-3:] == ["eager", "later", "last"]


def test_a_stream_that_was_eager_may_capture(device: Device) -> None:
    order = made_order()
    launch(device, order, 1, "eager")
    device.streams[1].capturing = device.streams[2].capturing = True
    launch(device, order, 1, "first")
    assert "first" in launch(device, order, 2, "second").work


class OnDevice(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def tensor(size: int = 1) -> torch.Tensor:
    return torch.zeros(size).as_subclass(OnDevice)


def test_every_tensor_is_found() -> None:
    @dataclass
    class Record:
        a: object
        b: object

    want = [tensor() for _ in range(4)]
    thing = [want[0], None, {"x": want[1], "y": 3}, Record((want[2], torch.zeros(1)), [[want[3]]]), Record]
    assert [id(t) for t in tensors_in(thing)] == [id(t) for t in want]


def test_the_memory_of_a_handle_is_found() -> None:
    """Also of one that a plan has made, whose combine is on another stream: the caller may drop it at once."""
    at = SimpleNamespace(routing_at=0, carried_at=512, state=SimpleNamespace(routing_bytes=8, carried_bytes=8))
    origin = Origin(1, 0, cast(Any, at), 2, keeps=False, outputs=cast(Any, None))
    blocks, ids, weights = [tensor(256), tensor(256)], tensor(), tensor(2)
    first = DispatchState(origin, 1, Mode.HT, b"", blocks[0], None, None, ids, weights)
    again = DispatchState(origin, 2, Mode.HT, b"", blocks[1], first, None, ids, weights)
    found = {each.untyped_storage().data_ptr() for each in tensors_in([DispatchHandle(1, 2, 1, Mode.HT, 0, again)])}
    assert found >= {each.untyped_storage().data_ptr() for each in (*blocks, ids, weights)}


# Beside other communicators.


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No communicator of another test."""
    monkeypatch.setattr(streams, "_used", {})
    monkeypatch.setattr(streams, "_warned", set())


def made_with(num_blocks: int) -> StreamOrder:
    return StreamOrder(SimpleNamespace(index=0), num_blocks, 132)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "usual", "blocks"),
    [
        ([None, None], None, 132),
        ([24, None], None, 132),
        ([8, 24], None, 24),
        ([0, 16], None, 16),
        ([0, 0], None, 1),
        ([200, 8], None, 132),
        ([None], 32, 32),
        ([8], 32, 8),
    ],
)
def test_blocks_of_a_member_are_the_most_of_its_operations(
    monkeypatch: pytest.MonkeyPatch, limits: list[int | None], usual: int | None, blocks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    member = NvlinkMember(SimpleNamespace(group=SimpleNamespace(size=2, epoch=0)), "abi")
    assert member._enter_device(limits, usual) == 132
    assert member._streams._num_blocks == blocks


@pytest.mark.usefixtures("used")
def test_kernels_of_two_streams_that_do_not_fit_are_named_once(device: Device) -> None:
    first, second = made_with(132), made_with(24)
    launch(device, first, 0, "a")
    with pytest.warns(RuntimeWarning, match=r"cuda:0: .* on 2 streams, .* up to 132 \+ 24 blocks .* on 132 multipro"):
        launch(device, second, 1, "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(device, second, 2, "c")


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("how", ["they fit", "one stream", "at rest", "dropped", "captured", "moved"])
def test_kernels_that_cannot_wait_for_each_other_are_not_named(device: Device, how: str) -> None:
    first, second = made_with(108 if how == "they fit" else 132), made_with(24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(device, first, 0, "a")
        if how == "at rest":  # as behind a barrier, and once it is closed
            first.rest()
        elif how == "dropped":
            del first
        elif how == "moved":
            launch(device, first, 1, "b")
        device.streams[1].capturing = how == "captured"
        launch(device, second, 0 if how == "one stream" else 1, "c")


def test_behind_a_rest_of_barriers_the_next_stream_is_the_only_one(device: Device) -> None:
    """The barrier of bring-up ran on torch's default stream: the next one waits for nothing, and may stay alone."""
    order = made_order()
    launch(device, order, 0, "barrier")
    order.rest()
    assert launch(device, order, 1, "a").work == ["a"]
    assert order.event is None


def test_behind_a_rest_memory_of_handles_is_still_kept(device: Device) -> None:
    """A dispatch on one stream, a barrier, then its combine on another: the handle may be dropped at once."""
    order = made_order()
    with device.stream(device.streams[0]):
        order.enter()
        order.leave([tensor()])
    order.rest()
    launch(device, order, 1, "combine")
    assert order.event is not None


def test_the_stream_of_the_launch_before(device: Device) -> None:
    order = made_order()
    assert order.here() is None
    launch(device, order, 1, "a")
    assert order.here() is None, "the current one is another"
    with device.stream(device.streams[1]):
        assert order.here() is device.streams[1]
    launch(device, order, 0, "b")
    assert order.here() is device.streams[0]
    order.rest()
    assert order.here() is None


@pytest.mark.usefixtures("used")
def test_the_launch_behind_a_rest_is_looked_at(device: Device) -> None:
    first, second = made_with(132), made_with(132)
    launch(device, first, 0, "barrier")
    first.rest()
    assert first.current.value == -1
    launch(device, second, 1, "a")
    with pytest.warns(RuntimeWarning, match="give them num_sms that fit together, or one stream"):
        launch(device, first, 0, "b")
    assert first.current.value == 0
