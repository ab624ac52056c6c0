"""What ranks compare of their operations, and how a difference is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.transports.nvlink.gpu.signature import difference, signature

BASE: dict[str, Any] = {
    "op": CollectiveOp.ALL_GATHER, "algorithm": Algorithm.KERNEL_PUSH, "dtype": torch.float32, "num_bytes": 32,
    "more": [256],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "theirs", "said"),
    [
        ("num_bytes", 16, "bytes 16, this rank 32"),
        ("num_bytes", (1 << 40) - 1, "bytes 1099511627775, this rank 32"),
        ("dtype", torch.int32, "dtype torch.int32, this rank torch.float32"),
        ("dtype", torch.float8_e4m3fn, "dtype torch.float8_e4m3fn, this rank torch.float32"),
        ("op", CollectiveOp.ALL_REDUCE, "operation all_reduce, this rank all_gather"),
        ("algorithm", Algorithm.TORCH, "algorithm torch, this rank kernel_push"),
        ("more", [512], "sizes of parts, places of registered tensors or multiprocessors "),
    ],
)
def test_the_first_difference_is_told(field: str, theirs: Any, said: str) -> None:
    mine, other = signature(**BASE), signature(**BASE | {field: theirs})
    assert 0 < mine < 1 << 63
    assert 0 < other < 1 << 63
    assert difference(mine, other).startswith(said)


def test_equal_operations_have_equal_signatures() -> None:
    assert signature(**BASE) == signature(**BASE)
    assert len({signature(**BASE | {"op": op, "num_bytes": 0, "more": None}) for op in CollectiveOp}) == 3


def test_every_dtype_has_a_number_of_its_own() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len({signature(**BASE | {"dtype": dtype}) for dtype in dtypes}) == len(dtypes)
