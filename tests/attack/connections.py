"""Attacks by request connections: halves of requests, answers that nobody reads, garbage, and no ticket at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import torch

from crossdock.common.addresses import split_address
from crossdock.protocol import wire
from crossdock.protocol.request_buffer import described
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.attack.attacks import CALL_S, HOLD_S, channels, counted, is_open, together, word_of
from tests.attack.scene import Scene, all_closed
from tests.services.cluster import E, H, K
from tests.services.request_world import framed

NUM, BUFFER_BYTES, TOKENS, STRANGERS = 64, 1 << 20, 1500, 300


def _request(number: int) -> bytes:
    shapes = described(torch.float32, (TOKENS, H)), described(torch.int32, (TOKENS, K))
    weights = described(torch.float32, (TOKENS, K))
    message = expert_pb2.ForwardRequest(id=number, layer=1, x=shapes[0], topk_ids=shapes[1], topk_weights=weights)
    parts = torch.randn(TOKENS, H), torch.randint(0, E, (TOKENS, K)).int(), torch.rand(TOKENS, K)
    return framed(message) + b"".join(bytes(wire.bytes_of(part)) for part in parts)


def _misuse(place: tuple[str, int], ticket: bytes, kind: int) -> socket.socket:
    """A connection with its ticket, and one of four kinds of what must not be."""
    sock = socket.create_connection(place, CALL_S)
    sock.sendall(ticket)
    sock.recv(1)
    sock.settimeout(0.2)
    with contextlib.suppress(OSError):
        if kind == 0:
            sock.sendall(os.urandom(1 << 16))
        elif kind == 1:
            sock.sendall(_request(1)[:-1000])
        elif kind == 2:
            for number in range(20):  # after each, before its answer is read
                sock.sendall(_request(number))
        else:
            sock.sendall(framed(expert_pb2.ForwardRequest(id=1, layer=1, x=described(torch.float32, (1 << 40, H)))))
    return sock


async def _offers(calls: Sequence[Any], answers: Counter[str]) -> list[expert_pb2.OpenBufferResponse]:
    made = []
    for call in calls:
        try:
            made.append(await asyncio.wait_for(call.read(), CALL_S))
        except (grpc.RpcError, TimeoutError) as error:
            answers[word_of(error)] += 1
    return made


async def _connections(scene: Scene) -> str:
    answers, host = Counter[str](), split_address(scene.worker())[0]
    async with channels(scene, scene.worker(), 8) as made:
        stubs = [expert_pb2_grpc.ExpertServiceStub(channel) for channel in made]
        wanted = expert_pb2.OpenBufferRequest(num_bytes=BUFFER_BYTES, tcp=True)
        calls = [stubs[index % len(stubs)].OpenBuffer(wanted) for index in range(NUM)]
        offers = await _offers(calls, answers)
        place = host, offers[0].port
        held = [await asyncio.to_thread(_misuse, place, one.ticket, i % 4) for i, one in enumerate(offers[::2])]
        strangers = [socket.create_connection(place, CALL_S) for _ in range(STRANGERS)]
        with all_closed([*held, *strangers]):
            for index, stranger in enumerate(strangers):
                with contextlib.suppress(OSError):
                    stranger.sendall(os.urandom(16 if index % 2 else 1024))
            await asyncio.sleep(HOLD_S)
            answers["connections"] = len(held)
            answers["strangers open"] = sum(map(is_open, strangers))
            assert answers["strangers open"] <= 64, counted(answers)
        for call in calls:
            call.cancel()
    return counted(answers, 4)


def request_connections(scene: Scene) -> str:
    """64 offers of 1 MiB, half of them redeemed: garbage, requests without an end, requests whose answers nobody reads,
    shapes that nothing holds; 300 connections without a ticket."""
    return together(_connections(scene))
