"""Replace the experts of a model by remote ones; the model keeps its routers, biases and shared experts.

    with attach(model, "127.0.0.1:7400"):
        model.generate(...)

Every module is replaced whose forward is (hidden_states, top_k_index, top_k_weights), or the same by other names, and
that is under a numbered layer, as `transformers` (>= 5) writes experts. The weights it is called with are final:
DeepSeek's routed_scaling_factor is already in, its shared experts are added by the block. Llama 4's experts take rows
that are weighted already, a copy for each expert with zeros where it was not chosen: those are not sent.
"""

from __future__ import annotations

import torch
from torch import nn

from crossdock.client.blocking import Client
from crossdock.client.errors import ModelMismatch
from crossdock.client.remote_experts import RemoteExperts, WeightedExperts
from crossdock.client.sites import SIGNATURE, Site, find_experts, matrix
from crossdock.common.settings import SecurityConfig
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

MAX_ERROR = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 0.02}
"""Largest difference between a local and a remote row, relative to the local one, that counts as the same weights, by
the rows' dtype: rounding gave up to 6.4e-7, 0.0011 and 0.0080 (64 families, K 1 to 22, H 64 to 2048, on CPUs)."""
MAX_FP8_ERROR = 0.1
"""The same where experts are fp8: GPUs quantise rows before each product, which gave 0.043 on average."""


class Attached:
    """A model whose experts are remote: saved, copied or pickled it raises ClientError. Use `attach`.

    Attributes:
        model: the model.
        client: of its experts.
        description: of the service.
        layers: numbers of the layers whose experts are remote.
        num_freed_bytes: bytes of freed local expert weights (0 with keep_local).
    """

    def __init__(
        self,
        model: nn.Module,
        client: Client,
        description: expert_pb2.DescribeResponse,
        sites: list[Site],
        *,
        owns_client: bool,
    ) -> None:
        self.model, self.client, self.description = model, client, description
        self.layers = tuple(site.layer for site in sites)
        self.num_freed_bytes = 0
        self._sites = sites
        self._remote: list[RemoteExperts] = []
        self._owns_client = owns_client

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
            kind = WeightedExperts if site.weighted else RemoteExperts
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
        model: not attached, its experts without adapters; these may be on the meta device.
        target: host:port of a control plane or a worker, or a client, which the caller closes.
        timeout_s: deadline of each call of an experts module, and of connecting.
        verify: also compare a row of every expert with available local ones, within `MAX_ERROR` and `MAX_FP8_ERROR`.
        keep_local: keep the local expert weights, so that `detach` can put them back; else their memory is freed.
        fingerprint: expected of the service (ModelSpec.fingerprint of the checkpoint); empty: any.
        security: with a `target` that is an address: certificates and token to reach it with.

    Raises:
        ModelMismatch: the service serves something else, or these experts are remote or wrapped.
        ClientError: no connection. The model is unchanged then.
    """
    sites = find_experts(model)
    client = Client(target, security=security) if isinstance(target, str) else target
    try:
        description = client.describe(timeout_s)
        _check(model, sites, description, fingerprint)
        for site in sites if verify else ():
            _probe(site, client, description, timeout_s)
    except BaseException:
        if isinstance(target, str):
            client.close()
        raise
    attached = Attached(model, client, description, sites, owns_client=isinstance(target, str))
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
        first, down = matrix(site.module, "gate_up_proj"), matrix(site.module, "down_proj")
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
    norms = local.norm(dim=-1)
    error = float(((remote - local).norm(dim=-1) / norms.clamp_min(1e-3 * float(norms.mean()) + 1e-30)).max())
    is_fp8 = dict(zip(description.moe_layers, description.formats, strict=False)).get(site.layer) == "fp8"
    most = MAX_FP8_ERROR if is_fp8 else MAX_ERROR.get(x.dtype, MAX_ERROR[torch.bfloat16])
    if not error <= most:
        words = "; transformers dequantises fp8 wrongly where blocks do not divide a matrix" if is_fp8 else ""
        raise ModelMismatch(
            f"layer {site.layer}: the service's experts give other rows than the model's own: relative difference of "
            f"the worst row {error:.3g}, expected at most {most}: are these the same weights?{words}"
        )
