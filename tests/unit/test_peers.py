"""Experts from another worker: the same bytes as from disk in every format, on either kind of socket, whatever the
holder does; and what it refuses. Both ends are the product's; a small listener stands for the greeter between them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from crossdock.protocol import frames
from crossdock.protocol.frames import FrameKind
from crossdock.protocol.same_host import host_identity
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.expert_sources import Disk, Sources
from crossdock.worker.checkpoints.weight_memory import PIECE_BYTES, hashed
from crossdock.worker.experts.expert_mlps import ExpertMLPs, HeldLayer
from crossdock.worker.experts.placement import FROM_CONFIG, Holder, WeightsOf
from crossdock.worker.peers import giving
from crossdock.worker.peers.assignment import shared_among
from crossdock.worker.peers.giving import WeightGiver
from crossdock.worker.peers.messages import Read, WeightLine, Which, bytes_of, form_of
from crossdock.worker.peers.reading import Peers
from tests.unit.moe_files import Sizes, draw_weights, write_files, write_gpt_oss
from tests.unit.test_layouts import LAYOUTS, write

CPU, EXPERTS = torch.device("cpu"), (0, 1, 2)
SIZES = Sizes(num_experts=3, hidden=128, inner=64, layers=2)
DEADLINE_S = 20.0
FORMATS = (
    "float", "gpt-oss", "fp8 blocks named weight_scale", "AutoFP8, static", "bf16 last layer", "AWQ, last layer float",
    "pack-quantized, asymmetric", "NVFP4 of ModelOpt", "MXFP8",
)  # fmt: skip


def write_format(folder: Path, name: str) -> Checkpoint:
    """Three experts a layer."""
    if name == "float":
        write_files(folder, "mixtral", SIZES, draw_weights(SIZES))
    elif name == "gpt-oss":
        write_gpt_oss(folder)
    else:
        config, layers, _ = LAYOUTS[name]
        write(folder, config, layers)
        if "hf_quant_config" in name:
            (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    return Checkpoint.open(folder)


@dataclass
class Shelf:
    """What a holder has. `fingerprint`: it says."""

    checkpoint: Checkpoint
    experts: ExpertMLPs
    fingerprint: str = ""
    device: torch.device = CPU

    def held_layers(self) -> dict[int, HeldLayer]:
        return self.experts.layers

    def fingerprint_of(self, held: HeldLayer) -> str:
        return self.fingerprint or self.checkpoint.spec.fingerprint

    def digest_of(self, layer: int, expert: int, held: HeldLayer) -> int:
        return self.checkpoint.digest(layer, expert)


@dataclass
class World:
    """A checkpoint, holders of it, and a reader who counts what came from where, and why holders were given up."""

    checkpoint: Checkpoint
    near: bool = True
    read: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    listeners: list[socket.socket] = field(default_factory=list)
    givers: list[WeightGiver] = field(default_factory=list)

    def shelf(self, ids: tuple[int, ...] = EXPERTS) -> Shelf:
        return Shelf(self.checkpoint, ExpertMLPs.load(self.checkpoint, ids, dtype=torch.float32))

    def holder(self, shelf: Shelf | None = None) -> Holder:
        giver = WeightGiver(shelf or self.shelf(), DEADLINE_S)
        self.givers.append(giver)
        return self.listening(giver.give)

    def listening(self, take: Callable[[socket.socket], None]) -> Holder:
        """Where connections that have said READER go to `take`."""
        sock = socket.socket(socket.AF_UNIX if self.near else socket.AF_INET)
        sock.bind("" if self.near else ("127.0.0.1", 0))
        sock.listen()
        self.listeners.append(sock)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line = WeightLine(sock.accept()[0], DEADLINE_S)
                    head = bytearray(frames.HEADER.size)
                    line.receive_into(memoryview(head))
                    _, count, kind, _, _ = frames.HEADER.unpack(head)
                    assert kind == FrameKind.READER
                    line.receive_into(memoryview(bytearray(count)))
                    take(line.sock)

        threading.Thread(target=accept, daemon=True).start()
        where = sock.getsockname()
        name = where.decode()[1:] if self.near else ""
        return Holder("127.0.0.1:1", 0 if self.near else where[1], name, host_identity())

    def load(self, *holders: Holder, checkpoint: Checkpoint | None = None, timeout_s: float = DEADLINE_S) -> ExpertMLPs:
        """All experts, from these holders, else from disk."""
        peers = Peers("own", None, timeout_s, self.failed.append)
        checkpoint = checkpoint or self.checkpoint

        def count(name: str, num_bytes: int, seconds: float) -> None:
            self.read[name] = self.read.get(name, 0) + num_bytes

        with peers.source(holders, 0, CPU) as source:
            loaded = ExpertMLPs.load(checkpoint, EXPERTS, dtype=torch.float32, sources=Sources((source, Disk()), count))
        peers.close()
        return loaded

    def check(self, loaded: ExpertMLPs, peer: float) -> None:
        """It has the bits of the files, of which so large a part came from peers."""
        wanted = ExpertMLPs.load(self.checkpoint, EXPERTS, dtype=torch.float32)
        for layer, held in wanted.layers.items():
            for expected, got in zip(held.weights, loaded.held(layer).weights, strict=True):
                for one, other in zip(expected.tensors, got.tensors, strict=True):
                    assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        assert self.read.get("peer", 0) == peer * wanted.num_bytes
        assert self.read.get("peer", 0) + self.read.get("disk", 0) == wanted.num_bytes


@pytest.fixture(params=["near", "far"])
def near(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "near")


@pytest.fixture
def world(tmp_path: Path, near: bool) -> Iterator[World]:
    made = World(write_format(tmp_path, "float"), near)
    yield made
    for listener in made.listeners:
        listener.close()
    for giver in made.givers:
        giver.close()


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_bytes_in_every_format(tmp_path: Path, near: bool, name: str) -> None:
    """A reader whose own files have nothing but their headers and samples."""
    made = World(write_format(tmp_path, name), near)
    hollow, digests = Checkpoint.open(tmp_path), {}
    for layer in hollow.spec.moe_layers:
        for expert in EXPERTS:
            digests[layer, expert] = made.checkpoint.digest(layer, expert)
    hollow.read_expert = None  # type: ignore[assignment,method-assign]
    hollow._shards = None  # type: ignore[assignment]
    loaded = made.load(made.holder(), checkpoint=hollow)
    made.check(loaded, peer=1)
    assert not made.failed
    assert {place: hollow.digest(*place) for place in digests} == digests, "they came along"


def test_a_tensor_of_many_pieces(tmp_path: Path, near: bool) -> None:
    large = Sizes(num_experts=3, hidden=1024, inner=700, layers=1)
    made = World(Checkpoint.open(write_files(tmp_path, "mixtral", large, draw_weights(large))), near)
    assert 3 * PIECE_BYTES < 4 * 2 * 1024 * 700
    made.check(made.load(made.holder()), peer=1)


def answering(world: World, behave: Callable[[WeightLine, Any], None]) -> Holder:
    """A holder that says what it has, and then behaves otherwise."""
    real = WeightGiver(world.shelf(), DEADLINE_S)

    def serve(line: WeightLine) -> None:
        line.send_piece(memoryview(frames.welcome(1, 1)))
        with contextlib.suppress(OSError, EOFError):
            while True:
                ask: Any = line.receive(Which | Read, 1 << 20)
                behave(line, ask) if isinstance(ask, Read) else line.send(real._held())
        line.close()

    return world.listening(
        lambda sock: threading.Thread(target=serve, args=(WeightLine(sock, 60.0),), daemon=True).start()
    )


@pytest.mark.parametrize("others", [0, 1])
def test_a_holder_that_dies_in_the_middle(world: World, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """It has given one expert and a half; the next holder gives the others, or the disk."""
    shelf, sent, asked = world.shelf(), itertools.count(1), itertools.count(1)
    dying, send_piece = WeightGiver(shelf, DEADLINE_S), WeightLine.send_piece

    def send(line: WeightLine, piece: memoryview) -> None:
        """Welcome, two tensors, one more."""
        if line in dying._lines and next(sent) > 4:
            line.shut_down()
        send_piece(line, piece)

    def digest_of(*place: object) -> int:
        """Of the second expert, which lies in memory."""
        if next(asked) == 2:
            next(iter(dying._lines)).shut_down()
        return 0

    if world.near:
        monkeypatch.setattr(shelf, "digest_of", digest_of)
    else:
        monkeypatch.setattr(WeightLine, "send_piece", send)
    loaded = world.load(world.listening(dying.give), *(world.holder() for _ in range(others)))
    assert world.failed == ["lost"]
    world.check(loaded, peer=1 if others else world.read["peer"] / loaded.num_bytes)
    assert world.read["peer"] > 0
    assert bool(others) is (world.read.get("disk", 0) == 0)


def test_bytes_that_changed_on_the_way_are_not_served(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = world.shelf()
    holder = world.holder(shelf)
    if world.near:  # what it hashed, and what lies there when the reader copies
        world.load(holder)
        world.read.clear()
        shelf.experts.held(0).weights[1].data[1, 3, 3].neg_()
    else:
        monkeypatch.setattr(giving, "bytes_of", lambda piece: bytes_of(piece.clone().bitwise_xor_(1)))
    loaded = world.load(holder)
    assert world.failed == ["damaged"]
    world.check(loaded, peer=world.read.get("peer", 0) / loaded.num_bytes)
    assert world.read["disk"] > 0


def test_a_version_that_changes_under_the_reader(world: World, tmp_path: Path) -> None:
    """Layer 1 is switched to other weights after the holder has said what it has: refused, and read from disk. Layer 0
    is switched while it is read: what comes is what was held when it began."""
    other = Checkpoint.open(write_files(tmp_path / "other", "mixtral", SIZES, draw_weights(SIZES)))
    shelf, new = world.shelf(), WeightsOf(1, "other", other.spec.fingerprint)
    shelf.fingerprint_of = lambda held: held.of.fingerprint or world.checkpoint.spec.fingerprint  # type: ignore[method-assign]

    def digest_of(layer: int, expert: int, held: HeldLayer) -> int:
        for each in (0, 1):
            if shelf.experts.held(each).of == FROM_CONFIG:
                shelf.experts.replace(each, EXPERTS, *shelf.experts.stage(other, each, EXPERTS, of=new), of=new)
        return 0

    shelf.digest_of = digest_of  # type: ignore[method-assign]
    loaded = world.load(world.holder(shelf))
    assert world.failed == ["refused"]
    world.check(loaded, peer=0.5)


def test_one_that_was_switched_before_is_asked_for_nothing(world: World) -> None:
    shelf = world.shelf()
    shelf.fingerprint = "of another checkpoint"
    world.check(world.load(world.holder(shelf)), peer=0)
    assert not world.failed


def test_a_slow_holder_is_waited_for_no_longer_than_is_said(world: World) -> None:
    stop = threading.Event()
    slow = answering(world, lambda line, ask: stop.wait(DEADLINE_S) and None)
    loaded = world.load(slow, timeout_s=0.2)
    stop.set()
    assert world.failed == ["slow"]
    world.check(loaded, peer=0)


def test_one_that_drips_is_slow_too(world: World) -> None:
    """A byte at a time resets no deadline."""

    def drip(line: WeightLine, ask: Read) -> None:
        for byte in msgspec.msgpack.encode({"refused": "x" * 4000}):
            line.send_piece(memoryview(bytes([byte])))
            threading.Event().wait(0.05)

    loaded = world.load(answering(world, drip), timeout_s=0.3)
    assert world.failed[0] in ("slow", "lost")
    world.check(loaded, peer=0)


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\x05\0\0\0hello", b""], ids=["long", "strange", "end"])
def test_one_that_says_something_else(world: World, said: bytes) -> None:
    def behave(line: WeightLine, ask: Read) -> None:
        line.send_piece(memoryview(said))
        line.shut_down()

    world.check(world.load(answering(world, behave)), peer=0)
    assert world.failed == ["lost"]


def test_nobody_there_is_no_reason_to_wait(world: World) -> None:
    gone = world.listening(socket.socket.close)
    world.listeners.pop().close()
    world.check(world.load(gone), peer=0)
    assert world.failed == ["lost"]


def test_memory_that_may_shrink_or_is_too_short_is_not_mapped(tmp_path: Path) -> None:
    """A byte past its end would end the reader's process."""
    made = World(write_format(tmp_path, "float"), near=True)
    file = (tmp_path / "plain").open("w+b")
    file.truncate(1 << 20)

    def with_file(line: WeightLine, ask: Read) -> None:
        line.send(giving.Granted("", 1 << 20), os.dup(file.fileno()))
        line.send(giving.Sum(0, 0, [0, 0]))

    loaded = made.load(answering(made, with_file))
    made.check(loaded, peer=0)
    shelf, sizes = made.shelf(), []

    def past_the_end(line: WeightLine, ask: Read) -> None:
        memory = shelf.experts.held(ask.layer).weights[0].memory
        assert memory is not None
        sizes.append(memory.num_bytes)
        line.send(giving.Granted("", memory.num_bytes), memory.reader())
        line.send(giving.Sum(0, 0, [0, memory.num_bytes - 1]))

    made.read.clear()
    made.check(made.load(answering(made, past_the_end)), peer=0)
    assert sizes
    assert made.failed == ["lost", "lost"]


def test_what_a_reader_asks_is_checked_before_it_is_used(world: World) -> None:
    """Experts and layers that are not there, other weights and other shapes are refused; the connection goes on."""
    shelf = world.shelf((0, 2))
    holder, print_ = world.holder(shelf), world.checkpoint.spec.fingerprint
    held = shelf.experts.held(0)
    form = form_of(held.expert(0))
    line = dialled(world, holder)
    for ask, word in (
        (Read(0, print_, form, [1], False), "expected some of its experts here, got 1"),
        (Read(0, print_, form, [0, 1 << 60], False), "got 1152921504606846976"),
        (Read(9, print_, form, [0], False), "layer 9: not held"),
        (Read(-1, print_, form, [0], False), "layer -1: not held"),
        (Read(0, "another", form, [0], False), "expected weights of"),
        (Read(0, print_, form + "; torch.int8", [0], False), "expected float"),
    ):
        line.send(ask)
        granted, _ = line.receive_granted()
        assert word in granted.refused
    line.send(Read(0, print_, form, [2], False))
    assert not line.receive_granted()[0].refused


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + msgspec.msgpack.encode(7),
    ],
    ids=["long", "no message", "another message"],
)
def test_a_reader_that_says_something_else_is_ended(world: World, said: bytes) -> None:
    holder = world.holder()
    line = dialled(world, holder)
    line.send_piece(memoryview(said))
    with pytest.raises((EOFError, OSError)):
        line.receive(Which, 100)
    world.check(world.load(holder), peer=1)


def dialled(world: World, holder: Holder) -> WeightLine:
    from crossdock.worker.peers.weight_lines import dial

    return dial(holder, None)


def test_readers_are_few(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "MAX_READERS", 1)
    giver = WeightGiver(world.shelf(), DEADLINE_S)
    pairs = [socket.socketpair() for _ in range(2)]
    giver.give(pairs[0][0])
    with pytest.raises(giving.ResourceExhausted, match="expected at most 1"):
        giver.give(pairs[1][0])
    giver.close()
    with pytest.raises(giving.Unavailable):
        giver.give(pairs[1][0])


def test_load_is_spread() -> None:
    loads = [0, 0, 0]
    who = {0: [0, 1], 1: [0, 1], 2: [1], 3: [0, 2], 4: []}
    far, none = shared_among({expert: expert for expert in who}, who.__getitem__, loads, [False] * 3, 0), [False] * 3
    assert far == {0: [0], 1: [1, 2], 2: [3]}
    assert loads == [1, 2, 1]
    assert shared_among({7: 0}, lambda _: [0, 1, 2], [0, 0, 0], none, 2) == {1: [7]}, "another reader begins elsewhere"
    near = shared_among({7: 0, 8: 0}, lambda _: [0, 2], [0, 0, 5], [False, False, True], 0)
    assert near == {2: [7, 8]}, "of this host before others"


def test_hashes_are_xxh64() -> None:
    """Known values, and a copy of every length of tail."""

    def of(data: bytes, seed: int = 0) -> int:
        source = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)
        copied = torch.zeros(len(data) + 1, dtype=torch.uint8)
        found = hashed(source.data_ptr(), len(data), seed, copied.data_ptr())
        assert bytes_of(copied).tobytes() == data + b"\0"
        assert found == hashed(source.data_ptr(), len(data), seed)
        return found

    assert of(b"") == 0xEF46DB3751D8E999
    assert of(b"a") == 0xD24EC4F1A98C6E5B
    assert of(b"abc") == 0x44BC2CF5AD770999
    assert of(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1
    for length in (*range(70), 300_000, 300_007):
        of(bytes(torch.randint(0, 256, (length,), dtype=torch.uint8).tolist()), length)
