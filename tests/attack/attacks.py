"""The attacks, each a function from a scene to what was answered, in a few words. `ATTACKS` is the index.

An attack holds what it takes (streams, connections, messages) for some seconds, in which the well-behaved client must
be served and new ones must get in, and lets go in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common.addresses import split_address
from crossdock.common.call_errors import code_of_number
from crossdock.protocol import wire
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, expert_pb2, expert_pb2_grpc, topology_pb2
from tests.attack.scene import Scene, all_closed
from tests.services import http2
from tests.services.cluster import Batch, E, H, K

WATCH, REGISTER = "/crossdock.v1.ControlPlane/Watch", "/crossdock.v1.ControlPlane/Register"
FORWARD = "/crossdock.v1.ExpertService/Forward"
CALL_S, HOLD_S, UNREAD_S = 10.0, 2.0, 10.0
MIB = 1 << 20
RATE, BURST = 400, 850
"""Calls a second of all names at one host, by default, and those that may come at once."""
HUGE_NAME = "x" * (3 * MIB)


@dataclass(frozen=True, slots=True)
class Attack:
    """One line of the table.

    Attributes:
        run: does it; what was answered. Raises AssertionError where an answer is not as it must be.
        kills: it ends a worker or its seat, as the method's caller may: gaps are longer then.
        plain, mtls: whether it makes sense in such a scene.
        short: part of the short form.
    """

    run: Callable[[Scene], str]
    kills: bool = False
    plain: bool = True
    mtls: bool = True
    short: bool = False


_LOOP = asyncio.new_event_loop()
"""One for all attacks: grpc.aio keeps to the loop that it has begun with."""


def together(work: Coroutine[Any, Any, str]) -> str:
    """Run to the end."""
    return _LOOP.run_until_complete(work)


def hold(seconds: float = HOLD_S) -> None:
    """Keep what was taken, while the others go on."""
    time.sleep(seconds)


# ---- bytes ----


def garbage(scene: Scene) -> str:
    """Random bytes to each port."""
    for address in scene.ports().values():
        for _ in range(50):
            blast(address, os.urandom(4096))
    return "closed"


def blast(address: str, data: bytes, timeout_s: float = 0.2) -> bytes:
    """Send, and read once."""
    try:
        with socket.create_connection(split_address(address), timeout_s) as connection:
            connection.sendall(data)
            return connection.recv(64)
    except OSError:
        return b""


def http_headers(scene: Scene) -> str:
    """Headers of 8 MiB, and 100,000 of them, to the HTTP ports; HTTP/1.1 to the gRPC ports."""
    many = b"".join(b"A%d: b\r\n" % number for number in range(100_000))
    for name in ("control http", "worker http"):
        for lines in (b"A: " + b"a" * (8 * MIB) + b"\r\n", many):
            answer = blast(scene.ports()[name], b"GET /metrics HTTP/1.1\r\n" + lines + b"\r\n", 3.0)
            assert b"200" not in answer[:16], answer
    for name in ("control", "worker"):
        blast(scene.ports()[name], b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    return "refused"


def false_lengths(scene: Scene) -> str:
    """A message of 4 GiB - 1, a compressed one, and one that is no protobuf."""
    answers = Counter[str]()
    for address, path in ((scene.control, REGISTER), (scene.worker(), FORWARD)):
        for prefix in (b"\0" + b"\xff" * 4, b"\1" + struct.pack(">I", 100), b"\0" + struct.pack(">I", 100)):
            answers[http2.false_message(address, path, prefix, scene.connect)] += 1
    assert "status 0" not in answers, answers
    return counted(answers)


def rapid_reset(scene: Scene) -> str:
    """2,000 calls that are cancelled at once, to each server."""
    sent = [
        http2.rapid_reset(address, path, 2000, scene.connect)
        for address, path in ((scene.control, WATCH), (scene.worker(), FORWARD))
    ]
    return ", ".join(sent)


def huge_headers(scene: Scene) -> str:
    """Headers of 1 MB, 40 of them."""
    return http2.huge_headers(scene.control, WATCH, 40, scene.connect)


def unfinished_messages(scene: Scene) -> str:
    """60 connections to each server, at once, with a message each that lacks its last byte: 20 of the largest that the
    server takes, 20 that are smaller, and 20 over its limit, which it refuses at once."""
    places = {scene.worker(): (FORWARD, (63, 2, 1)), scene.control: (REGISTER, (4, 1, 0.5))}
    wanted = [(address, path, int(mib * MIB) - 1) for address, (path, sizes) in places.items() for mib in sizes]
    with ThreadPoolExecutor(len(wanted)) as threads:
        held = list(threads.map(lambda each: http2.Unfinished(*each[:2], 20, each[2], scene.connect), wanted))
    hold()
    for each in held:
        each.close()
    return f"{sum(each.sent_bytes for each in held) // MIB} MiB sent"


def slow_http(scene: Scene) -> str:
    """200 connections to each /metrics, a byte a second, while it is scraped."""
    slowest = 0.0
    for child in ("control", "worker-0"):
        where = split_address(scene.http(child))
        held: list[socket.socket] = []

        def trickle(where: tuple[str, int] = where, held: list[socket.socket] = held) -> None:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(where, 5.0))
                held[-1].sendall(b"GET /metrics HT")

        threads = [threading.Thread(target=trickle, daemon=True) for _ in range(200)]
        for thread in threads:
            thread.start()
        with all_closed(held):
            for _ in range(4):
                for each in held:
                    with contextlib.suppress(OSError):
                        each.sendall(b"a")
                slowest = max(slowest, scrape(scene.supervisor.addresses()[child].http_address))
                time.sleep(0.5)
    assert slowest < 5.0, f"a scrape took {slowest:.1f} s"
    return f"scraped within {slowest:.2f} s"


def scrape(address: str) -> float:
    """Seconds that /livez took, by the way that a kubelet takes."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(*split_address(address.replace("[::]", "[::1]")), timeout=CALL_S)
    try:
        connection.request("GET", "/livez")
        connection.getresponse().read()
    finally:
        connection.close()
    return time.monotonic() - began


def idle_connections(scene: Scene) -> str:
    """2,000 connections to a worker and a control plane that say nothing. One in a TLS handshake costs 43 KiB."""
    held: list[socket.socket] = []
    with all_closed(held):
        for address in (scene.worker(), scene.control):
            for _ in range(1000):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(split_address(address), 0.5))
        hold()
        open_now = sum(is_open(each) for each in held)
    return f"{open_now} of {len(held)} open after {HOLD_S:g} s"


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not hung up."""
    connection.setblocking(False)
    try:
        while data := connection.recv(4096):
            del data
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


# ---- gRPC ----


def counted(answers: Counter[str], most: int = 3) -> str:
    """The most frequent ones."""
    return ", ".join(f"{number} x {answer}" for answer, number in answers.most_common(most))


def word_of(error: BaseException) -> str:
    """The status, or the kind of error."""
    return error.code().name if isinstance(error, grpc.RpcError) else type(error).__name__  # type: ignore[attr-defined]


async def attempt(call: Any) -> str:
    """How a unary call, or the first message of a stream, ends."""
    try:
        await asyncio.wait_for(call.read() if hasattr(call, "read") else call, CALL_S)
    except (grpc.RpcError, TimeoutError, asyncio.CancelledError) as error:
        return word_of(error)
    return "OK"


@contextlib.asynccontextmanager
async def channels(scene: Scene, address: str, number: int = 4, part: str = "client") -> Any:
    """Connections of one attacker."""
    made = [scene.channel(address, index, part) for index in range(number)]
    try:
        yield made
    finally:
        for channel in made:
            await channel.close(0)


async def many_watches(scene: Scene, pause_s: float, number: int) -> str:
    """Views that are watched and never left."""
    async with channels(scene, scene.control, 12) as made:  # a connection has room for 128 streams
        answers, tasks, calls = Counter[str](), [], []
        stubs = [control_pb2_grpc.ControlPlaneStub(channel) for channel in made]
        for index in range(number):
            calls.append(stubs[index % len(stubs)].Watch(pb.WatchRequest()))
            tasks.append(asyncio.ensure_future(attempt(calls[-1])))
            await asyncio.sleep(pause_s)
        for task in tasks:
            answers[await task] += 1
        await asyncio.sleep(HOLD_S)
        for call in calls:
            call.cancel()
    return counted(answers)


def watches(scene: Scene) -> str:
    """1,300 Watch streams, about as fast as the rate limit lets them in."""
    return together(many_watches(scene, 0.0025, 1300))


async def _health_watches(scene: Scene, address: str) -> str:
    async with channels(scene, address) as made:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in made]
        calls = [stubs[index % len(stubs)].Watch(health_pb2.HealthCheckRequest()) for index in range(1100)]
        answers = Counter(await asyncio.gather(*map(attempt, calls)))
        await asyncio.sleep(HOLD_S)
        for call in calls:
            call.cancel()
    return counted(answers)


def health_watches(scene: Scene) -> str:
    """1,100 streams of the health service to a worker, and to the control plane."""

    async def both() -> str:
        return "; ".join(
            await asyncio.gather(*(_health_watches(scene, each) for each in (scene.worker(), scene.control)))
        )

    return together(both())


async def _unread(scene: Scene) -> str:
    batch = Batch.random(2000)
    message, answers = batch.message(0), Counter[str]()
    async with channels(scene, scene.worker(), 8) as made:
        stubs = [expert_pb2_grpc.ExpertServiceStub(channel) for channel in made]
        calls, last_at = [], asyncio.get_running_loop().time() + UNREAD_S

        async def send(index: int) -> None:
            call = stubs[index % len(stubs)].Forward()
            calls.append(call)
            try:
                async with asyncio.timeout_at(last_at):
                    for request_id in range(20):
                        one = expert_pb2.ForwardRequest()
                        one.CopyFrom(message)
                        one.id = request_id
                        await call.write(one)
                answers["wrote all"] += 1
            except TimeoutError:
                answers["held back"] += 1
            except (grpc.RpcError, asyncio.InvalidStateError):  # the call is over; the error may not say how
                answers[(await call.code()).name] += 1

        tasks = []
        for index in range(500):
            tasks.append(asyncio.ensure_future(send(index)))
            await asyncio.sleep(0.0103)
        await asyncio.gather(*tasks)
        await asyncio.sleep(HOLD_S)
        for call in calls:
            call.cancel()
    return counted(answers)


def unread_answers(scene: Scene) -> str:
    """500 Forward streams with 20 requests of 2,000 tokens each, of which no answer is read."""
    return together(_unread(scene))


async def _names(scene: Scene) -> str:
    answers = Counter[str]()
    async with channels(scene, scene.control, part="rogue") as made:
        stubs = [control_pb2_grpc.ControlPlaneStub(channel) for channel in made]
        for first in range(0, 24, 6):
            workers = [pb.WorkerId(uid=f"{index}{HUGE_NAME}", incarnation=1) for index in range(first, first + 6)]
            calls = [
                call
                for worker, stub in zip(workers, itertools.cycle(stubs))
                for call in (
                    stub.Heartbeat(pb.HeartbeatRequest(worker=worker)),
                    stub.Watch(pb.WatchRequest(worker=worker)),
                )
            ]
            answers += Counter(await asyncio.gather(*map(attempt, calls)))
        began = time.monotonic()
        limited = Counter[str]()
        for turn in range(3):  # a burst is let in, then as many a second as workers of one host may need
            fresh = [
                stubs[index % 4].Heartbeat(
                    pb.HeartbeatRequest(worker=pb.WorkerId(uid=f"{turn}-{index}", incarnation=1))
                )
                for index in range(500)
            ]
            limited += Counter(await asyncio.gather(*map(attempt, fresh)))
        allowed = BURST + RATE * (time.monotonic() - began)
    passed = limited.total() - limited["RESOURCE_EXHAUSTED"] - limited["UNAVAILABLE"]
    assert passed <= allowed, f"expected at most {allowed:.0f} calls of one host to pass, got {passed}: {limited}"
    assert not answers["OK"], answers
    return counted(answers + limited)


def names(scene: Scene) -> str:
    """Calls with a uid of 3 MiB, which a server may not keep, and 1,500 calls with a fresh uid each."""
    return together(_names(scene))


async def _identities(scene: Scene) -> str:
    view = await asyncio.to_thread(scene.view)
    answers = Counter[str]()
    async with channels(scene, scene.control, 1, part="client" if scene.guarded else "rogue") as (channel,):
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        known = registration(view, "w0", 2**64 - 1)  # refused for its incarnation, once its kind is the group's
        with contextlib.suppress(grpc.RpcError):
            while True:
                try:
                    await stub.Register(known, timeout=CALL_S)
                    break  # taken: the checks below find the seat lost
                except grpc.RpcError as error:
                    learn(known, error)
        for incarnation in (2**64 - 1, 2**63, time.time_ns() + 10**18):
            known.worker.incarnation = incarnation
            answers[await attempt(stub.Register(known))] += 1
        for epoch in (2**62, 2**64 - 1):
            known.worker.uid, known.worker.incarnation = "rogue", time.time_ns()
            known.prior.CopyFrom(pb.PriorMembership(epoch=epoch, rank=0, region=b"r", ready=True))
            answers[await attempt(stub.Register(known))] += 1
        for term in (10**18, 2**31 - 3000, 2**64):
            metadata = (("crossdock-term", str(term)),)
            answers[await attempt(stub.Topology(pb.TopologyRequest(), metadata=metadata)) + " with a term"] += 1
    epoch, members = view.epoch, {member.worker.uid: member.worker.incarnation for member in view.members}
    after = await asyncio.to_thread(scene.view)
    assert after.epoch <= epoch + 1, f"the epoch rose from {epoch} to {after.epoch}"
    assert {member.worker.uid: member.worker.incarnation for member in after.members} == members, "a seat was lost"
    return counted(answers)


def registration(view: pb.GroupView, uid: str, incarnation: int) -> pb.RegisterRequest:
    """Of a worker that might be taken."""
    return pb.RegisterRequest(
        worker=pb.WorkerId(uid=uid, incarnation=incarnation),
        host=topology_pb2.HostFacts(hostname="rogue", num_cpus=2),
        address="127.0.0.1:1",
        http_address="127.0.0.1:1",
        transport="cpu",
        abi="0",
        model=view.model,
        num_experts=E,
        moe_layers=[1, 2],
    )


def learn(request: pb.RegisterRequest, error: grpc.RpcError) -> None:
    """Set the field of the group's kind that a refusal names to what it expects. Raises the error if it names none."""
    found = re.search(r"(abi|communicator\.[^:]+): expected '([^']+)'", error.details() or "")  # type: ignore[attr-defined]
    if not found:
        raise error
    if found[1] == "abi":
        request.abi = found[2]
    else:
        request.communicator.add(name=found[1].removeprefix("communicator."), value=found[2])


def identities(scene: Scene) -> str:
    """Incarnations, epochs and terms far above all that are known."""
    return together(_identities(scene))


async def _roles(scene: Scene) -> str:
    view = await asyncio.to_thread(scene.view)
    answers = Counter[str]()
    worker = view.members[0].worker
    async with channels(scene, scene.control, 1) as (channel,):
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        for call in (
            stub.Register(registration(view, "w0", time.time_ns())),
            stub.Heartbeat(pb.HeartbeatRequest(worker=worker, epoch=view.epoch, fault="x")),
            stub.PublishRegion(pb.PublishRegionRequest(worker=worker, epoch=view.epoch, region=b"r")),
            stub.Ready(pb.ReadyRequest(worker=worker, epoch=view.epoch)),
            stub.Leave(pb.LeaveRequest(worker=worker)),
            stub.Placement(pb.PlacementRequest(epoch=view.epoch)),
            stub.Rebalance(pb.RebalanceRequest()),
            stub.Scale(pb.ScaleRequest(workers=1)),
            stub.Watch(pb.WatchRequest(worker=worker)),
        ):
            answers[await attempt(call)] += 1
    async with channels(scene, scene.worker(), 1) as (channel,):
        answers[await attempt(expert_pb2_grpc.ExpertServiceStub(channel).Drain(expert_pb2.DrainRequest()))] += 1
    async with channels(scene, scene.control, 1, part="rogue") as (channel,):
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        answers[await attempt(stub.Register(registration(view, "w0", time.time_ns())))] += 1
    assert set(answers) == {"PERMISSION_DENIED"}, answers
    return counted(answers)


def roles(scene: Scene) -> str:
    """A client's certificate calls what is a worker's and an operator's; a worker's speaks for another worker."""
    return together(_roles(scene))


async def _strangers(scene: Scene) -> str:
    request = pb.WatchRequest()
    answers = Counter[str]()
    for number in range(60):
        async with grpc.aio.insecure_channel(scene.control, options=[("n", number)]) as channel:
            answers[await attempt(control_pb2_grpc.ControlPlaneStub(channel).Watch(request, timeout=1.0))] += 1
    assert not answers["OK"], answers
    return counted(answers)


def strangers(scene: Scene) -> str:
    """Calls without a certificate, and 300 connections that never begin their handshake."""
    before = scene.log_bytes()
    held: list[socket.socket] = []
    with all_closed(held):
        for _ in range(300):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(split_address(scene.control), 1.0))
        answer = together(_strangers(scene))
    grown = scene.log_bytes() - before
    assert grown < 64 << 10, f"logs grew by {grown} bytes"
    return f"{answer}; logs +{grown // 1024} KiB"


async def _expensive(scene: Scene) -> str:
    async with channels(scene, scene.control) as made:
        stubs = [control_pb2_grpc.ControlPlaneStub(channel) for channel in made]
        calls = itertools.chain(
            (stubs[index % 4].Topology(pb.TopologyRequest()) for index in range(400)),
            (stubs[index % 4].Experts(pb.ExpertsRequest()) for index in range(400)),
        )
        return counted(Counter(await asyncio.gather(*map(attempt, calls))))


def expensive_reads(scene: Scene) -> str:
    """400 calls each of Topology and Experts at once."""
    return together(_expensive(scene))


# ---- requests ----


def tensor(dtype: str = "float32", shape: tuple[int, ...] = (4, H), data: bytes = b"") -> expert_pb2.Tensor:
    """A tensor that says what it likes about itself."""
    return expert_pb2.Tensor(data=data, dtype=dtype, shape=list(shape))


def bad_requests() -> Iterator[tuple[str, expert_pb2.ForwardRequest, bool]]:
    """Name, message, and whether it may be served all the same."""
    good = Batch.random(4)

    def of(name: str, *, served: bool = False, **fields: Any) -> tuple[str, expert_pb2.ForwardRequest, bool]:
        message = good.message(1)
        for field, value in fields.items():
            if isinstance(value, expert_pb2.Tensor):
                getattr(message, field).CopyFrom(value)
            else:
                setattr(message, field, value)
        return name, message, served

    yield of("nan", served=True, x=wire.encode(torch.full((4, H), float("nan"))))
    yield of("weights 3e38", served=True, topk_weights=wire.encode(torch.full((4, K), 3e38)))
    yield of("no tokens", served=True, x=wire.encode(good.x[:0]), topk_ids=wire.encode(good.ids[:0]),
             topk_weights=wire.encode(good.weights[:0]))  # fmt: skip
    yield of("dtype", x=tensor("evil" * 9, (1, 1), b"1234"))
    yield of("bf16", x=wire.encode(good.x.bfloat16()))
    yield of("payload short", x=tensor(data=good.x.numpy().tobytes()[:-4]))
    for shape in ((2**31, H), (2**62, 4), (-1, H), (2**31 - 1, 0), (1,) * 10_000, ()):
        yield of(f"shape {str(shape)[:12]}", x=tensor(shape=shape))
    for value in (-2, E, 2**31 - 1):
        yield of(f"id {value}", topk_ids=wire.encode(torch.full((4, K), value, dtype=torch.int32)))
    yield of("id 2^62", topk_ids=wire.encode(torch.full((4, K), 2**62)))
    yield of("weights f64", topk_weights=tensor("float64", (4, K), b"\0" * 64))
    for layer in (0, 99, 2**32 - 1):
        yield of(f"layer {layer}", layer=layer)
    yield of("model", model="x" * 100_000)
    yield "empty", expert_pb2.ForwardRequest(), False


def requests(scene: Scene) -> str:
    """Requests with wrong dtypes, shapes, ids, layers; each is answered in its stream, which stays up."""
    return together(_requests(scene))


async def _requests(scene: Scene) -> str:
    answers = Counter[str]()
    async with channels(scene, scene.worker(), 1) as (channel,):
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        call = stub.Forward()
        for name, message, served in bad_requests():
            await call.write(message)
            answer = await asyncio.wait_for(call.read(), CALL_S)
            assert isinstance(answer, expert_pb2.ForwardResponse), name
            assert served or answer.HasField("error"), f"{name}: served"
            answers[code_of_number(answer.error.code).name if answer.HasField("error") else "served"] += 1
        for number in range(3000):
            await call.write(expert_pb2.ForwardRequest(id=number, cancel=True))
        await call.write(Batch.random(4).message(7))
        last = await asyncio.wait_for(call.read(), CALL_S)
        assert last.id == 7, last
        assert not last.HasField("error"), last.error
        call.cancel()
        too_long = stub.Forward()
        await too_long.write(Batch.random(4).message(1, model="x" * (70 * MIB)))
        answers[await attempt(too_long)] += 1
    return counted(answers, 5)


ATTACKS: dict[str, Attack] = {
    "garbage": Attack(garbage, short=True),
    "http headers": Attack(http_headers),
    "false lengths": Attack(false_lengths, short=True),
    "rapid reset": Attack(rapid_reset),
    "huge headers": Attack(huge_headers),
    "unfinished messages": Attack(unfinished_messages, short=True),
    "unread answers": Attack(unread_answers),
    "watch streams": Attack(watches),
    "health streams": Attack(health_watches),
    "names": Attack(names, short=True),
    "identities": Attack(identities, short=True),
    "bad requests": Attack(requests, short=True),
    "expensive reads": Attack(expensive_reads),
    "slow http": Attack(slow_http),
    "idle connections": Attack(idle_connections),
    "roles": Attack(roles, plain=False, short=True),
    "strangers": Attack(strangers, plain=False),
}
