"""Attacks by request buffers: memory that is held, never used, or kept after its end; sockets without a ticket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter

import grpc
import torch

from crossdock.protocol.request_buffer import Places, SharedMemory, described, host_identity
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.attack.attacks import CALL_S, HOLD_S, channels, counted, together, word_of
from tests.attack.scene import Scene
from tests.services.cluster import E, H, K

NUM, BUFFER_BYTES, TOKENS, ROUNDS = 64, 1 << 20, 1500, 2


class Held:
    """One end of a buffer, without manners."""

    def __init__(self, offer: expert_pb2.OpenBufferResponse) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(CALL_S)
        self._sock.connect(f"\0{offer.socket}")
        self._sock.send(offer.ticket)
        _, self._fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        self._memory = SharedMemory(self._fds[0], offer.num_bytes)

    def ask(self, times: int) -> None:
        """Send requests and read no answers; the tensors change meanwhile."""
        places, few = Places.of(TOKENS, H, K, 4), (TOKENS, K)
        ids = self._memory.tensor(torch.int32, few, places.ids)
        self._memory.tensor(torch.float32, (TOKENS, H), places.x).normal_()
        self._memory.tensor(torch.float32, few, places.weights).fill_(0.5)
        request = expert_pb2.ForwardRequest(
            layer=1,
            x=described(torch.float32, (TOKENS, H)),
            topk_ids=described(torch.int32, few),
            topk_weights=described(torch.float32, few),
        )
        for number in range(times):
            ids.copy_(torch.randint(0, E, few))
            with contextlib.suppress(OSError):
                request.id = number
                self._sock.send(request.SerializeToString())
            ids.fill_(2**31 - 1)

    def hang_up(self) -> None:
        """Keep the memory."""
        self._sock.close()

    def free(self) -> None:
        """Let go of the memory too."""
        self.hang_up()
        for fd in self._fds:
            os.close(fd)


async def _buffers(scene: Scene) -> str:
    answers, kept = Counter[str](), list[Held]()
    async with channels(scene, scene.worker(), 8) as made:
        stubs = [expert_pb2_grpc.ExpertServiceStub(channel) for channel in made]
        wanted = expert_pb2.OpenBufferRequest(host=host_identity(), num_bytes=BUFFER_BYTES)
        name = ""
        for turn in range(ROUNDS):
            calls = [stubs[index % len(stubs)].OpenBuffer(wanted) for index in range(NUM)]
            for index, call in enumerate(calls):
                try:
                    offer = await asyncio.wait_for(call.read(), CALL_S)
                    name = offer.socket
                    if index % 8:  # the others' tickets are never redeemed
                        kept.append(await asyncio.to_thread(Held, offer))
                        await asyncio.to_thread(kept[-1].ask, 50)
                    answers["buffers"] += 1
                except (grpc.RpcError, OSError, TimeoutError) as error:
                    answers[word_of(error)] += 1
            await asyncio.sleep(HOLD_S / ROUNDS)
            for held in kept[turn * NUM :: 2]:
                held.hang_up()
            for call in calls:
                call.cancel()
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(300)]
        for stranger in strangers:
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect(f"\0{name}")
        await asyncio.sleep(HOLD_S)
    for stranger in strangers:
        stranger.close()
    for held in kept:
        held.free()
    return counted(answers)


def request_buffers(scene: Scene) -> str:
    """128 request buffers of 1 MiB: requests without reading, changed while they are read, memory kept after the end;
    tickets that nobody redeems; 300 connections without one."""
    return together(_buffers(scene))
