"""Remote experts in a compiled model: the compiler leaves their calls alone."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from crossdock.client import Client, ClientError, RemoteExperts
from crossdock.client.remote_experts import WeightedExperts

T, E, H = 3, 4, 8


class Doubling:
    """A client whose service doubles rows."""

    target = "nowhere"

    def __init__(self) -> None:
        self.was_compiled: list[bool] = []

    def forward(self, layer: int, rows: torch.Tensor, *_: torch.Tensor, timeout_s: float) -> torch.Tensor:
        self.was_compiled.append(torch.compiler.is_compiling() or type(rows) is not torch.Tensor)
        return rows * 2


class Layer(nn.Module):
    """What a compiled graph has before and behind experts."""

    def __init__(self, experts: RemoteExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> Any:
        return self.experts(x + 1, *routing) * 3


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_compiled_model_calls_them_as_they_are(is_weighted: bool) -> None:
    client = Doubling()
    kind = WeightedExperts if is_weighted else RemoteExperts
    layer = Layer(kind(cast(Client, client), 0, E, 1.0))
    x = torch.randn(E * T if is_weighted else T, H)
    routing = () if is_weighted else (torch.zeros(T, 2, dtype=torch.int64), torch.rand(T, 2))
    run = torch.compile(layer, backend="eager")
    with torch.no_grad():
        assert torch.equal(run(x, *routing), (x + 1) * 6)
    z = run(x.requires_grad_(), *routing)
    with pytest.raises(ClientError, match="they have no backward pass"):
        z.sum().backward()
    assert client.was_compiled == [False, False]
