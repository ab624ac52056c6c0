"""Random calls through real gRPC, with metadata and long texts: each is answered, and the server serves on."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from crossdock.common.access import METHODS
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from tests.services.control_world import TIMEOUT_S, ControlProcess

NUM_CALLS = 150
MOST_GROWTH_BYTES = 128 << 20
SEEDS = [1]
NAMES = [
    "Register", "PublishRegion", "Ready", "Heartbeat", "Leave", "Topology", "Placement", "Experts", "Rebalance",
    "Scale",
]  # fmt: skip
KEYS = ["crossdock-term", "crossdock-key", "authorization", "x-unknown", "x-unknown-bin"]
OUR_FAULT = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}


def text(dice: random.Random) -> str:
    return dice.choice(["", "a/0", "a\nb", "\x9b31m", "é", "x" * 257, "y" * (64 << 10), str(dice.getrandbits(63))])


def filled(kind: type[Message], dice: random.Random, depth: int = 0) -> Message:
    """A message of a kind with random fields, nested ones too."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if dice.random() < 0.25:
            continue
        if field.type == Field.TYPE_MESSAGE:
            if depth < 3:
                place = getattr(made, field.name)
                inner = place.add() if field.is_repeated else place
                inner.CopyFrom(filled(type(inner), dice, depth + 1))
        else:
            value = one_value(field, dice)
            if field.is_repeated:
                getattr(made, field.name).extend([value] * dice.randrange(4))
            else:
                setattr(made, field.name, value)
    return made


def one_value(field: Field, dice: random.Random) -> object:
    if field.type == Field.TYPE_STRING:
        return text(dice)
    if field.type == Field.TYPE_BYTES:
        return dice.randbytes(dice.choice([0, 16, 65 << 10]))
    if field.type in (Field.TYPE_BOOL, Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
        return dice.choice([0, 1]) if field.type == Field.TYPE_BOOL else dice.choice([0.0, -1.0, float("nan"), 1e300])
    if field.type in (Field.TYPE_INT32, Field.TYPE_ENUM):
        return dice.choice([0, 1, 2, 2**31 - 1])
    return dice.choice([0, 1, 2, dice.getrandbits(32)])


def metadata(dice: random.Random) -> list[tuple[str, str | bytes]]:
    """Up to three headers; values that gRPC can carry, most of them senseless, none of 8 KiB together."""
    found: list[tuple[str, str | bytes]] = []
    for key in dice.sample(KEYS, dice.randrange(4)):
        number = dice.choice(["-1", "7", str(2**31 - 1), str(10**18), "x", "", "9" * 1500])
        found.append((key, dice.randbytes(64) if key.endswith("-bin") else number))
    return found


def rss_bytes(pid: int) -> int:
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_are_answered_and_the_server_serves_on(seed: int) -> None:
    dice = random.Random(seed)
    with ControlProcess("world_size=2", "log.level=error") as process:
        before = rss_bytes(process.pid)
        with grpc.insecure_channel(process.addresses.address) as channel:
            for _ in range(NUM_CALLS):
                name = dice.choice(NAMES)
                request = filled(getattr(pb, f"{name}Request"), dice).SerializeToString()
                if dice.random() < 0.3:
                    request = dice.randbytes(dice.choice([1, 50, 100 << 10]))
                answer(channel, f"/crossdock.v1.ControlPlane/{name}", request, metadata(dice))
        with grpc.insecure_channel(process.addresses.address) as channel:
            found = control_pb2_grpc.ControlPlaneStub(channel).Topology(
                pb.TopologyRequest(), timeout=TIMEOUT_S, wait_for_ready=True
            )
            assert found is not None
        assert rss_bytes(process.pid) - before < MOST_GROWTH_BYTES
        code, errors = process.terminate()
    assert code == 0
    assert "Traceback" not in errors


def answer(channel: grpc.Channel, method: str, request: bytes, headers: list[tuple[str, str | bytes]]) -> None:
    """One call; only what a handler or a guard answers on purpose is right (bytes that are no message are gRPC's)."""
    assert method in METHODS
    call = channel.unary_unary(method).future(request, timeout=TIMEOUT_S, metadata=headers, wait_for_ready=True)
    code, details = call.code(), str(call.details())
    assert code not in OUR_FAULT or "deserializ" in details.lower(), (method, code, details)
