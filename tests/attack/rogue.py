"""A rogue member: it takes a worker's seat with a newer incarnation, as any caller of a group in plain text may, and
publishes false region tickets, of another kind in each epoch. The peers must refuse them and live on.

    python -m tests.attack.rogue CONTROL SECONDS        prints JSON: tickets by kind, calls refused

It ends once each kind was published, or after SECONDS. Kinds: `garbage` (random bytes), `copy` (a peer's own ticket),
`pid1` (a descriptor of process 1), `negative` (pid and fd below 0), `unsealed` (its own memfd with a right header and
no seals, truncated once peers may have mapped it). In the end it beats once with epoch 2^62.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import msgspec

from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.worker.group.same_weights import Parcel
from tests.attack.attacks import learn, registration
from tests.attack.scene import Scene

VICTIM, NOBODY, _FAR = "w0", 65534, 2**62
KINDS = ("unsealed", "garbage", "copy", "pid1", "negative")
_SECONDS, _CALL_S, _BEAT_S, _MAPPED_S = 45.0, 3.0, 0.1, 1.0
_METADATA = (("crossdock-lease-key", "k" * 32),)
_HEADER_AT, _MAGIC = 4096, 0x4B434F4453534F52


class Rogue:
    """One member that is none.

    Args:
        control: address of the control plane.

    Attributes:
        published: tickets by kind.
        refused: calls that failed.
    """

    def __init__(self, control: str) -> None:
        self._stub = control_pb2_grpc.ControlPlaneStub(grpc.insecure_channel(control))
        self._id = pb.WorkerId()
        self._view = next(self._stub.Watch(pb.WatchRequest(), timeout=_CALL_S))
        self._hello: dict[str, Any] | None = None
        self._parcel = Parcel(region=b"", sum=0)
        self._held: list[int] = []
        self._epochs: set[int] = set()
        self.published = dict.fromkeys(KINDS, 0)
        self.refused = 0

    def run(self, seconds: float) -> None:
        """Take the seat, beat, publish in each epoch."""
        self._take_seat()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(self.published.values()):
            try:
                self._beat(self._view.epoch)
                self._publish()
            except grpc.RpcError as error:
                self.refused += 1
                if error.code() == grpc.StatusCode.ALREADY_EXISTS:  # type: ignore[attr-defined]
                    self._take_seat()  # its owner came back
            time.sleep(_BEAT_S)
        try:
            self._beat(_FAR)
        except grpc.RpcError:
            self.refused += 1

    def _beat(self, epoch: int) -> None:
        beat = pb.HeartbeatRequest(worker=self._id, epoch=epoch)
        self._stub.Heartbeat(beat, timeout=_CALL_S, metadata=_METADATA)

    def _take_seat(self) -> None:
        """Register as a newer process. Each refusal names a field of the group's kind, which the next try has."""
        self._id = pb.WorkerId(uid=VICTIM, incarnation=time.time_ns())
        request = registration(self._view, VICTIM, self._id.incarnation)
        with contextlib.suppress(OSError):
            request.host.boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        while True:
            try:
                self._stub.Register(request, timeout=_CALL_S, metadata=_METADATA)
                break
            except grpc.RpcError as error:
                learn(request, error)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for view in self._stub.Watch(pb.WatchRequest(worker=self._id), metadata=_METADATA):
                self._view = view
                for member in view.members:
                    if member.region and member.worker.uid != VICTIM:
                        with contextlib.suppress(msgspec.DecodeError):
                            self._parcel = msgspec.msgpack.decode(member.region, type=Parcel)
                            self._hello = msgspec.msgpack.decode(self._parcel.region)

    def _publish(self) -> None:
        epoch = self._view.epoch
        if self._view.state != pb.EXCHANGING or epoch in self._epochs:
            return
        kind = min(KINDS, key=lambda each: self.published[each])
        region = os.urandom(64)  # until a peer's hello is seen, in the first table, anything will do
        if self._hello is not None:
            ticket = self._hello["ticket"]
            if kind != "copy":
                ticket = self._ticket(kind, json.loads(ticket))
            hello = msgspec.msgpack.encode({**self._hello, "epoch": epoch, "ticket": ticket})
            region = msgspec.msgpack.encode(msgspec.structs.replace(self._parcel, region=hello, expected=[]))
        request = pb.PublishRegionRequest(worker=self._id, epoch=epoch, region=region)
        self._stub.PublishRegion(request, timeout=_CALL_S, metadata=_METADATA)
        self._epochs.add(epoch)
        if self._hello is not None:
            self.published[kind] += 1
        if self._held:
            time.sleep(_MAPPED_S)
            os.ftruncate(self._held.pop(), 0)

    def _ticket(self, kind: str, peers: dict[str, Any]) -> bytes:
        if kind == "garbage":
            return os.urandom(200)
        if kind == "negative":
            return json.dumps(peers | {"pid": -1, "fd": -7}).encode()
        if kind == "pid1":
            return json.dumps(peers | {"pid": 1, "fd": 1, "start_ticks": _start_ticks(1)}).encode()
        size = int(peers["num_bytes"])
        fd = os.memfd_create("evil")
        os.ftruncate(fd, size)
        rank = next(member.rank for member in self._view.members if member.worker.uid == VICTIM)
        with mmap.mmap(fd, _HEADER_AT + mmap.PAGESIZE) as memory:
            memory[_HEADER_AT : _HEADER_AT + 32] = struct.pack("<QQQq", _MAGIC, 1, size, rank)
        self._held.append(fd)
        mine = {"pid": os.getpid(), "fd": fd, "start_ticks": _start_ticks(os.getpid()), "nonce": 1}
        return json.dumps(peers | mine).encode()


def _start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def tickets(scene: Scene) -> str:
    """Let a rogue do its worst; no other worker may die of it."""
    others = {name: pid for name, pid in scene.pids().items() if name != "worker-0"}
    command = [sys.executable, "-m", "tests.attack.rogue", scene.control, str(_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    said = json.loads(done.stdout.splitlines()[-1])
    died = [name for name, pid in others.items() if scene.pids()[name] != pid]
    assert not died, f"{', '.join(died)} died"
    missing = [kind for kind, number in said["published"].items() if not number]
    assert not missing, f"no ticket of kind {', '.join(missing)}"
    epoch = scene.view().epoch
    assert epoch < _FAR, f"the group is at epoch {epoch}"
    number = sum(said["published"].values())
    return f"{number} tickets of {len(KINDS)} kinds, {said['refused']} calls refused; nobody died"


def main() -> None:
    """One rogue, as another user where that is allowed."""
    control, seconds = sys.argv[1:]
    rogue = Rogue(control)
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    rogue.run(float(seconds))
    print(json.dumps({"published": rogue.published, "refused": rogue.refused}))


if __name__ == "__main__":
    main()
