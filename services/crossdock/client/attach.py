"""Replace the experts of a model by remote ones; the model keeps its routers, biases and shared experts.

    with attach(model, "127.0.0.1:7400"):
        model.generate(...)

Every module is replaced whose forward is (hidden_states, top_k_index, top_k_weights), or the same by other names, and
that is under a numbered layer, as `transformers` (>= 5) writes experts. The weights it is called with are final:
DeepSeek's routed_scaling_factor is already in, its shared experts are added by the block. Llama 4's experts take rows
that are weighted already, a copy for each expert with zeros where it was not chosen: those are not sent.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crossdock.client.blocking import Client
from crossdock.client.errors import ClientError, ModelMismatch
from crossdock.common.settings import SecurityConfig
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

SIGNATURE = ("hidden_states", "top_k_index", "top_k_weights")
"""Parameters of an experts module's forward."""
_ROUTED = (SIGNATURE, ("hidden_states", "router_indices", "routing_weights"))
_WEIGHTED = ("hidden_states",)
"""Parameters of `forward` of a module that is given all experts' rows; it has stacked matrices."""

MAX_PROBE_ERROR = 0.03
"""Largest root-mean-square difference between local and remote rows, relative to the local ones, that counts as the
same weights: far above rounding in any dtype, far below what other weights give."""


@dataclass(frozen=True, slots=True)
class Site:
    """An experts module of a model: `getattr(parent, name) is module`."""

    layer: int
    parent: nn.Module
    name: str
    module: nn.Module

    @property
    def weighted(self) -> bool:
        """Whether its rows come weighted, for all experts: [E * T, H] -> [E * T, H]."""
        return _parameters(self.module) == _WEIGHTED

    def local(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the module makes of [T, H], [T, K], [T, K] -> [T, H]."""
        if not self.weighted:
            return self.module(x, ids, weights.to(x.dtype))  # type: ignore[no-any-return]
        num_experts = _matrix(self.module, "down_proj").shape[0]
        dense = weights.new_zeros(x.shape[0], num_experts).scatter_(1, ids, weights)
        rows = dense.t()[..., None].to(x.dtype) * x
        return self.module(rows.flatten(0, 1)).view_as(rows).sum(0)  # type: ignore[no-any-return]


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _matrix(module: nn.Module, name: str) -> torch.Tensor:
    """A stacked matrix [E, ., .] of an experts module; an empty one if it has none."""
    found = getattr(module, name, None)
    if isinstance(found, torch.Tensor) and found.ndim == 3:
        return found
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _is_experts(module: nn.Module) -> bool:
    parameters = _parameters(module)
    return parameters in _ROUTED or (parameters == _WEIGHTED and _matrix(module, "down_proj").ndim == 3)


def find_experts(model: nn.Module) -> list[Site]:
    """The experts modules of a model, by layer.

    Raises:
        ModelMismatch: two of them under one layer number.
    """
    sites: dict[int, Site] = {}
    for path, module in model.named_modules():
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", path)
        if not numbers or not _is_experts(module):
            continue
        parent, _, name = path.rpartition(".")
        layer = int(numbers[-1])
        if layer in sites:
            raise ModelMismatch(f"layer {layer}: expected one experts module, got two, the second at {path}")
        sites[layer] = Site(layer, model.get_submodule(parent), name, module)
    return [sites[layer] for layer in sorted(sites)]


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[..., H], [T, K], [T, K] -> [..., H]. Raises ClientError."""
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            return _NoBackward.apply(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return self.call(hidden_states, top_k_index, top_k_weights)

    def call(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """`forward` without autograd."""
        if self._client is None:
            raise ClientError(f"layer {self.layer}: the model was detached, and its local experts were not kept")
        ids = top_k_index.masked_fill(top_k_index >= self.num_experts, -1)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = self._client.forward(self.layer, rows, ids, top_k_weights, timeout_s=self.timeout_s)
        return y.view(hidden_states.shape)

    def disconnect(self) -> None:
        """Drop the client; further calls raise."""
        self._client = None

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"layer={self.layer}, target={self._client.target if self._client else None}"


class _WeightedExperts(RemoteExperts):
    """Replaces a module that is given rows for all experts, weighted, and zeros where one was not chosen."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[E * T, H] -> [E * T, H]. Raises ClientError."""
        rows = hidden_states.flatten(0, -2)
        chosen = rows.any(-1).nonzero().squeeze(-1)
        y = torch.zeros_like(rows)
        if chosen.numel():
            ids = chosen.new_full((chosen.numel(), self._topk or 1), -1)
            ids[:, 0] = chosen // (rows.shape[0] // self.num_experts)
            y = y.index_copy(0, chosen, super().forward(rows[chosen], ids, torch.ones_like(ids, dtype=rows.dtype)))
        return y.view_as(hidden_states)


class _NoBackward(torch.autograd.Function):
    """Lets a model run outside `no_grad`; a backward pass raises a clear error."""

    @staticmethod
    def forward(ctx: Any, module: RemoteExperts, *args: torch.Tensor) -> torch.Tensor:
        return module.call(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ClientError("remote experts are for inference: they have no backward pass")


class Attached:
    """A model whose experts are remote. Use `attach`.

    Attributes:
        model: the model.
        client: of its experts.
        description: of the service.
        layers: numbers of the layers whose experts are remote.
        num_freed_bytes: bytes of freed local expert weights (0 with keep_local).
    """

    def __init__(
        self, model: nn.Module, client: Client, description: expert_pb2.DescribeResponse, sites: list[Site]
    ) -> None:
        self.model, self.client, self.description = model, client, description
        self.layers = tuple(site.layer for site in sites)
        self.num_freed_bytes = 0
        self._sites = sites
        self._remote: list[RemoteExperts] = []
        self._owns_client = False

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the local experts if they were kept (else further calls raise ClientError), and close the client if
        `attach` made it. Idempotent."""
        for site in self._sites:
            setattr(site.parent, site.name, site.module)
        self._sites = []
        for module in self._remote:
            module.disconnect()
        if self._owns_client:
            self.client.close()

    def _swap(self, timeout_s: float, keep_local: bool) -> None:
        about = self.description
        for site in self._sites:
            kind = _WeightedExperts if site.weighted else RemoteExperts
            remote = kind(self.client, site.layer, about.num_experts, timeout_s, about.topk)
            remote.train(site.module.training)
            setattr(site.parent, site.name, remote)
            self._remote.append(remote)
        if not keep_local:
            self.num_freed_bytes = sum(p.nbytes for site in self._sites for p in site.module.parameters())
            self._sites = []


def attach(
    model: nn.Module,
    target: str | Client,
    *,
    timeout_s: float = 60.0,
    verify: bool = True,
    keep_local: bool = False,
    fingerprint: str = "",
    security: SecurityConfig | None = None,
) -> Attached:
    """Replace a model's experts by remote ones, after checking that they are the same.

    Args:
        model: an unchanged model; its local experts may be on the meta device.
        target: host:port of a control plane or a worker, or a client, which the caller closes.
        timeout_s: deadline of each call of an experts module, and of connecting.
        verify: also compare the rows of every expert with available local ones: a service with the same shape but other
            weights is refused.
        keep_local: keep the local expert weights, so that `detach` can put them back; else their memory is freed.
        fingerprint: expected of the service (ModelSpec.fingerprint of the checkpoint); empty: any.
        security: with a `target` that is an address: certificates and token to reach it with.

    Raises:
        ModelMismatch: the service serves something else. ClientError: no connection. The model is unchanged then.
    """
    client = Client(target, security=security) if isinstance(target, str) else target
    try:
        sites = find_experts(model)
        description = client.describe(timeout_s)
        _check(model, sites, description, fingerprint)
        for site in sites if verify else ():
            _probe(site, client, description, timeout_s)
    except BaseException:
        if isinstance(target, str):
            client.close()
        raise
    attached = Attached(model, client, description, sites)
    attached._owns_client = isinstance(target, str)
    attached._swap(timeout_s, keep_local)
    return attached


def _check(model: nn.Module, sites: list[Site], description: expert_pb2.DescribeResponse, fingerprint: str) -> None:
    """Compare descriptions, without running anything."""

    def require(what: str, expected: object, got: object) -> None:
        if expected != got:
            raise ModelMismatch(f"{what}: the model has {expected}, the service has {got}")

    if not sites:
        raise ModelMismatch(f"model: expected modules with forward{SIGNATURE} under numbered layers, got none")
    if fingerprint:
        require("fingerprint", fingerprint, description.model)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    require("model_type", getattr(config, "model_type", description.family), description.family)
    require("experts per token", getattr(config, "num_experts_per_tok", description.topk), description.topk)
    require("layers with experts", [site.layer for site in sites], list(description.moe_layers))
    for site in sites:
        first, down = _matrix(site.module, "gate_up_proj"), _matrix(site.module, "down_proj")
        if down.ndim == 3:
            transposed = first.ndim == 3 and first.shape[2] != down.shape[1]
            require(f"layer {site.layer}: experts", down.shape[0], description.num_experts)
            require(f"layer {site.layer}: hidden size", down.shape[1 + transposed], description.hidden_size)
            require(f"layer {site.layer}: dtype", wire.NAMES.get(down.dtype, str(down.dtype)), description.dtype)


@torch.no_grad()
def _probe(site: Site, client: Client, description: expert_pb2.DescribeResponse, timeout_s: float) -> None:
    """Compare local and remote rows, with at least one row per expert."""
    example = next(site.module.parameters(), None)
    if example is None or example.is_meta:
        return
    topk, num_experts = description.topk, description.num_experts
    num_tokens = -(-num_experts // topk)
    generator = torch.Generator().manual_seed(site.layer)
    shape = num_tokens, description.hidden_size
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(example.device, example.dtype)
    ids = (torch.arange(num_tokens * topk, device="cpu") % num_experts).view(num_tokens, topk).to(example.device)
    weights = torch.full(ids.shape, 1.0 if site.weighted else 1 / topk, device=example.device)
    local = site.local(x, ids, weights).float()
    remote = client.forward(site.layer, x, ids, weights, timeout_s=timeout_s).float()
    error = float((remote - local).square().mean().sqrt() / local.square().mean().sqrt().clamp_min(1e-30))
    if not error <= MAX_PROBE_ERROR:
        raise ModelMismatch(
            f"layer {site.layer}: the service's experts give other rows than the model's own: relative difference "
            f"{error:.3g}, expected at most {MAX_PROBE_ERROR}: are these the same weights?"
        )
