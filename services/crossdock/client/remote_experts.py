"""The module that takes the place of a model's experts: it sends their rows to the service."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from crossdock.client.blocking import Client
from crossdock.client.errors import ClientError

_DETACHED = "the model was detached, and its local experts were not kept"


@functools.cache
def _uncompiled(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same, which torch.compile leaves alone. A decorator would load the compiler, seconds, with this module."""
    return torch.compiler.disable(call)  # type: ignore[no-any-return, no-untyped-call]


class RemoteExperts(nn.Module):
    """Remote experts of one layer. Inference only: a backward pass raises.

    Args:
        client: connected to the service.
        layer: the layer's number in the model.
        num_experts: E; ids from E on (padding of some routers) count as no expert.
        timeout_s: deadline of one call.
        topk: K of the service; None: that of the calls.
    """

    def __init__(self, client: Client, layer: int, num_experts: int, timeout_s: float, topk: int | None = None) -> None:
        super().__init__()
        self._client: Client | None = client
        self.layer, self.num_experts, self.timeout_s, self._topk = layer, num_experts, timeout_s, topk
        self._serve = _uncompiled(type(self).serve)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[..., H], [T, K], [T, K] -> [..., H]. Raises ClientError."""
        return self._serve(self, hidden_states, top_k_index, top_k_weights)

    def serve(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`forward`, where nothing compiles."""
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            return _NoBackward.apply(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return self.call(hidden_states, top_k_index, top_k_weights)

    def call(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """`forward` without autograd."""
        if self._client is None:
            raise ClientError(f"layer {self.layer}: {_DETACHED}")
        ids = top_k_index.masked_fill(top_k_index >= self.num_experts, -1)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = self._client.forward(self.layer, rows, ids, top_k_weights, timeout_s=self.timeout_s)
        return y.view(hidden_states.shape)

    def disconnect(self) -> None:
        """Drop the client; further calls raise."""
        self._client = None

    @property
    def reason(self) -> str:
        """Why a model that has this module cannot be attached."""
        if self._client is None:
            return f"layer {self.layer}: {_DETACHED}: load the model again"
        return f"layer {self.layer}: the model is attached already, to {self._client.target}: detach it first"

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ClientError: a checkpoint of the model would have no experts."""
        raise ClientError(
            f"layer {self.layer}: the experts are remote, and a state_dict of the model would be without them: save or "
            "load adapters before `attach`, or detach a model that was attached with keep_local=True; "
            "named_parameters() has the other weights"
        )

    def __getstate__(self) -> NoReturn:
        """Raises ClientError: a client stays with its process, and there are no weights to copy."""
        raise ClientError(
            f"layer {self.layer}: a model with remote experts can be neither copied nor pickled: copy it before "
            "`attach`, or load the model again and attach that too"
        )

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"layer={self.layer}, target={self._client.target if self._client else None}"


class WeightedExperts(RemoteExperts):
    """Replaces a module that is given rows for all experts, weighted, and zeros where one was not chosen."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[E * T, H] -> [E * T, H]. Raises ClientError."""
        return self._serve(self, hidden_states)

    def serve(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """`forward`, where nothing compiles."""
        rows = hidden_states.flatten(0, -2)
        chosen = rows.any(-1).nonzero().squeeze(-1)
        y = torch.zeros_like(rows)
        if chosen.numel():
            ids = chosen.new_full((chosen.numel(), self._topk or 1), -1)
            ids[:, 0] = chosen // (rows.shape[0] // self.num_experts)
            y = y.index_copy(0, chosen, super().serve(rows[chosen], ids, torch.ones_like(ids, dtype=rows.dtype)))
        return y.view_as(hidden_states)


class _NoBackward(torch.autograd.Function):
    """Lets a model run outside `no_grad`; a backward pass raises a clear error."""

    @staticmethod
    def forward(ctx: Any, module: RemoteExperts, *args: torch.Tensor) -> torch.Tensor:
        return module.call(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ClientError("remote experts are for inference: they have no backward pass")
