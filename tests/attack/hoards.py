"""Attacks by shared memory: asked for again and again, changed while it is read, used outside, kept after the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter

import torch

from crossdock.protocol import frames
from crossdock.protocol.shared_memory import SharedMemory
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.attack.attacks import CALL_S, HOLD_S, channels, counted, together, word_of
from tests.attack.scene import Scene
from tests.services.cluster import Batch, E, H, K
from tests.services.request_world import request_of

NUM, ASKED, REQUESTS, TOKENS, MEMORY_BYTES = 24, 10, 10, 1500, 4 << 20


class Hoard:
    """A connection of the worker's host, without manners. name: of the worker's socket."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_S)
        self.sock.connect(f"\0{name}")
        security = scene.security()
        context = security.request_caller() if security is not None else None
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname="crossdock-worker")
        self.sock.sendall(frames.hello("", name))
        if context is not None:
            self.sock.unwrap()  # type: ignore[attr-defined]
            self.sock = frames.plain_socket(self.sock)
            self.sock.settimeout(CALL_S)
        self.sock.recv(len(frames.welcome(1, 1)))
        self.kept = list[SharedMemory]()

    def fill(self) -> int:
        """Ask for memory, again and again, and write all of it; how many times there was some."""
        for _ in range(ASKED):
            self.sock.sendall(frames.memory(MEMORY_BYTES))
            _, descriptors, _, _ = socket.recv_fds(self.sock, len(frames.memory(0)), 1)
            for descriptor in descriptors:
                self.kept.append(SharedMemory(descriptor, MEMORY_BYTES))
                self.kept[-1].bytes.fill_(1)
                os.close(descriptor)
        return len(self.kept)

    def ask(self) -> None:
        """Requests that change while they are read; the last is outside. No answer is read."""
        batch = Batch(1, torch.randn(TOKENS, H), torch.randint(0, E, (TOKENS, K)), torch.rand(TOKENS, K))
        for number in range(REQUESTS):
            for memory in self.kept[-1:]:
                memory.bytes[: TOKENS * H * 4].random_()
                memory.bytes[TOKENS * H * 4 : TOKENS * (H + 2 * K) * 4].zero_()
            self.sock.sendall(frames.forward(*request_of(number, batch, place=0)))
            for memory in self.kept[-1:]:
                memory.bytes.fill_(255)
        self.sock.sendall(frames.forward(*request_of(REQUESTS, batch, place=MEMORY_BYTES)))


async def _hoards(scene: Scene) -> str:
    answers, hoards = Counter[str](), list[Hoard]()
    async with channels(scene, scene.worker(), 1) as (channel,):
        about = await expert_pb2_grpc.ExpertServiceStub(channel).Describe(expert_pb2.DescribeRequest())
    for _ in range(NUM):
        try:
            hoards.append(await asyncio.to_thread(Hoard, scene, about.request_socket))
            answers["memories"] += await asyncio.to_thread(hoards[-1].fill)
            await asyncio.to_thread(hoards[-1].ask)
            answers["connections"] += 1
        except OSError as error:
            answers[word_of(error)] += 1
    await asyncio.sleep(HOLD_S)
    for hoard in hoards:
        with contextlib.suppress(OSError):
            hoard.sock.close()
    await asyncio.sleep(HOLD_S)  # what they keep now is theirs alone
    return counted(answers, 4)


def hoards(scene: Scene) -> str:
    """24 connections that ask for 4 MiB ten times, write it all, and keep it; requests there that change while they are
    read, and one outside."""
    return together(_hoards(scene))
