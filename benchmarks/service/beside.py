"""What stands beside the service: the same experts in this process, a bare gRPC echo, a model with its own experts."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing as mp
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import grpc
import torch

from benchmarks.service.load import Sizes
from crossdock.client import Client, attach
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts.expert_mlps import ExpertMLPs

_CLONE_NEWNET = 0x40000000
_LARGE_BYTES = 30 << 20
"""Of a block after whose end the C library keeps smaller ones: else rows of each call cost page faults."""
PROMPT, NEW_TOKENS, BATCH = 16, 24, 4


class EchoProcess:
    """A gRPC server that answers each message of a stream with as many bytes as its first eight say.

    Args:
        address: to listen at.
        namespace: file of the network namespace that has it; empty: this one.
    """

    def __init__(self, address: str = "127.0.0.1", namespace: str = "") -> None:
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve_echo, args=(there, address, namespace), daemon=True)
        self._process.start()
        self.address: str = here.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve_echo(pipe: Connection, address: str, namespace: str) -> None:
    if namespace:
        with Path(namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
    asyncio.run(_echo(pipe, address))


async def _echo(pipe: Connection, address: str) -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        answer = b""
        async for request in requests:
            num_bytes = int.from_bytes(request[:8], "little")
            answer = answer if len(answer) == num_bytes else bytes(num_bytes)
            yield answer

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bench", {"Echo": handler}),))
    pipe.send(f"{address}:{server.add_insecure_port(f'{address}:0')}")
    await server.start()
    await server.wait_for_termination()


class InProcess:
    """The same experts, all of them, in this process.

    Args:
        model: the checkpoint's folder.
    """

    def __init__(self, model: Path) -> None:
        checkpoint = Checkpoint.open(model)
        self.spec = checkpoint.spec
        self._experts = ExpertMLPs.load(checkpoint, range(self.spec.num_experts), dtype=self.spec.dtype)
        checkpoint.close()
        torch.empty(_LARGE_BYTES, dtype=torch.uint8)  # freed at once: from now on blocks so large are kept (glibc)

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H]: rows by expert, products, weighted sum in float32."""
        order = ids.flatten().argsort(stable=True)
        token = order // ids.shape[1]
        counts = torch.bincount(ids.flatten(), minlength=self.spec.num_experts).int()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        rows = self._experts.forward(layer, x.index_select(0, token), offsets, counts)
        weighted = rows.float().mul_(weights.flatten().index_select(0, order)[:, None])
        return torch.zeros(x.shape).index_add_(0, token, weighted).to(x.dtype)

    def measure(self, sizes: Sizes, layer: int, tokens: int, seconds: float) -> list[float]:
        """Seconds of each call."""
        drawn = [sizes.draw(tokens) for _ in range(4)]
        took, began = list[float](), time.monotonic()
        while time.monotonic() - began < seconds or len(took) < 8:
            start = time.perf_counter()
            self.forward(layer, *drawn[len(took) % 4])
            took.append(time.perf_counter() - start)
        return took[2:]


def tokens_per_s(model: Path, target: str) -> tuple[float, float]:
    """Of a `transformers` model that generates: with its own experts, and attached to the service."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model)
    made.eval()
    ids = torch.randint(0, 256, (BATCH, PROMPT))

    def generate() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            made.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        return BATCH * NEW_TOKENS / (time.perf_counter() - began)

    generate()
    own = generate()
    with Client(target) as client, attach(made, client, verify=False, keep_local=True):
        generate()
        return own, generate()
