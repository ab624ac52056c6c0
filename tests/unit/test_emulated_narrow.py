"""The kernel that narrows expert ids, on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from ep_kernels import jit
from tests.cases import draw_seed
from tests.emulator.build import build
from tests.tools import needs

EDGES = [0, 255, -1, -2, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 + 3, -(2**32) + 5, 2**63 - 1, -(2**63)]


@needs("g++")
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("count", [0, len(EDGES), 1000])
def test_ids_are_clamped_not_wrapped_and_weights_copied(count: int, copies: bool) -> None:
    torch.manual_seed(draw_seed())
    more = torch.randint(-(2**40), 2**40, (max(0, count - len(EDGES)),))
    ids = torch.cat([torch.tensor(EDGES), more])[:count].contiguous()
    found = torch.full((count + 8,), -7, dtype=torch.int32)
    weights, copy = torch.randn(count), torch.full((count + 8,), -7.0)
    own = (weights.data_ptr(), copy.data_ptr()) if copies else (0, 0)
    words = (ctypes.c_size_t * 5)(ids.data_ptr(), found.data_ptr(), count, *own)
    threads, blocks = jit.NARROW.num_threads, 2
    library = build(replace(jit.NARROW, loopback=True))
    library.emulated_launch(
        ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_uint(0), ctypes.byref(words), ctypes.c_int(blocks)
    )
    assert torch.equal(found[:count], ids.clamp(-(2**31), 2**31 - 1).int())
    assert found[count:].tolist() == [-7] * 8
    assert torch.equal(copy[:count], weights if copies else copy.new_full((count,), -7.0))
    assert copy[count:].tolist() == [-7.0] * 8
