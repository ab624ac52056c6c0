"""What a client copies on its host takes no thread of torch's pool, for which a busy host has no processor."""

import os
from typing import Any

import torch

from crossdock.client import opened_buffer
from crossdock.protocol import wire
from crossdock.protocol.request_buffer import RequestMemory
from tests.worlds import World

T, H, K = 2048, 512, 32
"""Of each tensor more elements than torch copies by one thread."""


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def copies(rank: int, size: int, store: Any) -> None:
    torch.set_num_threads(1)
    rows = RequestMemory(8 << 20).rows(T, H, K, torch.bfloat16)
    wide, ids, weights = torch.randn(T, 2 * H).bfloat16(), torch.randint(-1, 256, (T, K)), torch.rand(T, K)
    x, gaps, narrow = wide[:, :H].contiguous(), wide[:, :H], ids.int()
    out, asked = (
        torch.empty_like(x),
        [(x, ids, weights), (gaps, narrow, weights), (x, narrow.t().contiguous().t(), weights)],
    )
    before = num_threads()
    torch.set_num_threads(4)
    for parts in asked:
        opened_buffer._copy(parts, rows)
        opened_buffer._take(out, rows)
        wire.read_into(out, wire.bytes_of(parts[0]), name="y")
    assert wire.decode(wire.encode(gaps), name="x", dtypes=[x.dtype], ndim=2).shape == x.shape
    assert num_threads() == before
    out.copy_(x)
    assert num_threads() > before, "torch would have taken more"


def test_a_client_copies_in_its_own_thread() -> None:
    World(1).run(copies)
