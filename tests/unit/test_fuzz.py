"""Whatever arrives at the control plane, built from random bytes and from random fields: it is refused with a reason or
taken, never an error of our own, and the group stays one that can be shown."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.common.call_errors import CallError
from crossdock.common.config import ControlConfig
from crossdock.common.metrics import ControlMetrics
from crossdock.control.server.server import ControlPlane
from crossdock.protocol.v1 import control_pb2 as pb

REQUESTS = {
    "Register": pb.RegisterRequest,
    "PublishRegion": pb.PublishRegionRequest,
    "Ready": pb.ReadyRequest,
    "Heartbeat": pb.HeartbeatRequest,
    "Leave": pb.LeaveRequest,
    "Topology": pb.TopologyRequest,
}
UNSIGNED, SIGNED = st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2, 2**62, 2**63])
VALUES: dict[int, st.SearchStrategy[Any]] = {
    Field.TYPE_STRING: st.sampled_from(["", "a/0", "b/1", "a\nb", "é", "x" * 300]) | st.text(max_size=20),
    Field.TYPE_BYTES: st.binary(max_size=64) | st.just(b"x" * (65 << 10)),
    Field.TYPE_UINT32: st.sampled_from([0, 1, 2]) | UNSIGNED,
    Field.TYPE_INT32: SIGNED,
    Field.TYPE_UINT64: LONG,
    Field.TYPE_FIXED64: LONG,
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_DOUBLE: st.floats(),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    """A message of a kind with random fields, nested ones too."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.integers(0, 3)):
            continue
        if field.type == Field.TYPE_MESSAGE:
            inner = messages(
                type(getattr(made, field.name).add()) if field.is_repeated else type(getattr(made, field.name))
            )
            if field.is_repeated:
                made.ClearField(field.name)
                getattr(made, field.name).extend(draw(st.lists(inner, max_size=3)))
            else:
                getattr(made, field.name).CopyFrom(draw(inner))
        elif field.is_repeated:
            getattr(made, field.name).extend(draw(st.lists(VALUES[field.type], max_size=5)))
        else:
            setattr(made, field.name, draw(VALUES[field.type]))
    return made


def plane() -> ControlPlane:
    config = ControlConfig(world_size=2, lease_s=1.0, recover_s=0.001)
    return ControlPlane(config, ControlMetrics(), clock=iter(range(10**9)).__next__)


async def call(control: ControlPlane, method: str, request: Message) -> None:
    """One call as the server makes it; then everything that others could ask for must still work."""
    try:
        await getattr(control, method)(request, None)
    except CallError as refused:
        words = str(refused)
    else:
        words = "taken"
    assert words
    assert words.isprintable()
    control.tick()
    for watch in (
        pb.WatchRequest(),
        *(pb.WatchRequest(worker=pb.WorkerId(uid=m.uid), brief=True) for m in control.group.members),
    ):
        control._view(watch.worker, watch.brief, watch.table_once)
    await control.Topology(pb.TopologyRequest(), None)


CALLS = st.lists(
    st.sampled_from(sorted(REQUESTS)).flatmap(lambda name: st.tuples(st.just(name), messages(REQUESTS[name]))),
    max_size=6,
)


@settings(max_examples=120)
@given(CALLS)
async def test_random_fields(calls: list[tuple[str, Message]]) -> None:
    control = plane()
    for method, request in calls:
        await call(control, method, request)


@pytest.mark.parametrize("method", REQUESTS)
@settings(max_examples=100)
@given(data=st.binary(max_size=200))
async def test_random_bytes(method: str, data: bytes) -> None:
    request = REQUESTS[method]()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return
    await call(plane(), method, request)


@settings(max_examples=100)
@given(messages(pb.RegisterRequest), st.data())
async def test_bytes_with_a_flaw(request: Message, data: st.DataObject) -> None:
    """A real message of which some bytes are changed, cut or repeated."""
    raw = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] * data.draw(st.integers(1, 2))
    flawed = pb.RegisterRequest()
    try:
        flawed.ParseFromString(bytes(raw))
    except DecodeError:
        return
    await call(plane(), "Register", flawed)
