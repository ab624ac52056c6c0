"""Attacks by request connections: halves of requests, answers that nobody reads, floods, garbage, and no greeting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter

import torch

from crossdock.protocol import frames
from crossdock.protocol.frames import FrameKind
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.attack.attacks import CALL_S, HOLD_S, channels, counted, is_open, together, word_of
from tests.attack.scene import Scene, all_closed
from tests.services.cluster import Batch, E, H, K
from tests.services.request_world import packet

NUM, TOKENS, STRANGERS, MANY = 64, 1500, 300, 40


def _request(number: int) -> bytes:
    ids = torch.randint(0, E, (TOKENS, K)).int()
    return packet(number, Batch(1, torch.randn(TOKENS, H), ids, torch.rand(TOKENS, K)))


def _connected(scene: Scene, place: tuple[str, int]) -> socket.socket:
    """Behind TLS, where the scene has it."""
    sock = socket.create_connection(place, CALL_S)
    security = scene.security()
    context = security.request_caller() if security is not None else None
    return sock if context is None else context.wrap_socket(sock, server_hostname="crossdock-worker")


def _misuse(scene: Scene, place: tuple[str, int], kind: int) -> socket.socket:
    """A connection with a greeting, and one of five kinds of what must not be."""
    sock = _connected(scene, place)
    sock.sendall(frames.hello(""))
    sock.recv(1)
    sock.settimeout(0.2)
    with contextlib.suppress(OSError):
        if kind == 0:
            sock.sendall(os.urandom(1 << 16))
        elif kind == 1:
            sock.sendall(_request(1)[:-1000])
        elif kind == 2:
            for number in range(MANY):  # and no answer is read
                sock.sendall(_request(number))
        elif kind == 3:
            for _ in range(100):
                sock.sendall(frames.plain(FrameKind.PING) * 10_000)
        else:
            sock.sendall(frames.HEADER.pack((1 << 32) - 1, 24, FrameKind.FORWARD, 0, 1) + bytes(24))
    return sock


async def _connections(scene: Scene) -> str:
    answers, held = Counter[str](), list[socket.socket]()
    async with channels(scene, scene.worker(), 1) as (channel,):
        about = await expert_pb2_grpc.ExpertServiceStub(channel).Describe(expert_pb2.DescribeRequest())
    place = "127.0.0.1", about.request_port
    for index in range(NUM):
        try:
            held.append(await asyncio.to_thread(_misuse, scene, place, index % 5))
        except OSError as error:
            answers[word_of(error)] += 1
    strangers = [socket.create_connection(place, CALL_S) for _ in range(STRANGERS)]
    with all_closed([*held, *strangers]):
        for index, stranger in enumerate(strangers):
            with contextlib.suppress(OSError):
                stranger.sendall(os.urandom(16 if index % 2 else 1024))
        await asyncio.sleep(HOLD_S)
        answers["connections"] = len(held)
        answers["strangers open"] = sum(map(is_open, strangers))
        assert answers["strangers open"] <= 64, counted(answers)
    return counted(answers, 4)


def request_connections(scene: Scene) -> str:
    """64 connections: garbage, requests without an end, requests whose answers nobody reads, floods, lengths that
    nothing holds; 300 connections without a greeting."""
    return together(_connections(scene))
