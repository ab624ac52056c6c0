"""Small random-weight checkpoints of the supported families, written by `transformers` itself. No download.

Weights are drawn so that the numbers mean something: every matrix is scaled by its fan-in, so activations stay near 1
through all layers, experts contribute about as much as the residual they are added to, and logits spread over several
units, so that the best token usually leads by far more than rounding noise.

Routing is drawn to be clear. In a random router near-ties are everywhere, and at a near-tie any rounding, also the
plain model's own, swaps an expert and with it the token's logits: a comparison would measure luck. Here the last E
columns of the residual stream belong to the router: the embedding gives each byte a random ranking of the experts
there, in even steps, no layer writes them, and the router of each layer reads them. So experts differ from byte to
byte and the choice survives bf16. (With E > H / 4 there is no room, and routers stay random.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
"""config.json's model_type of each family that can be written."""

VOCAB_SIZE = 256
"""Byte-level ids: a token is a byte of text."""

_GAINS = (
    ("embed_tokens", 1.0),
    ("lm_head", 3.0),
    ("mlp.gate.", 2.0),
    ("gate_up_proj", 1.0),
    ("down_proj", 2.0),
)
"""Standard deviation of a parameter's outputs for unit inputs, by the first name it contains; others 1."""

_ROUTER_SPREAD = 1.5
"""The routers' columns of an embedding lie in -spread..spread."""
_ROUTER_GAIN = 4.0


def write_checkpoint(
    family: str,
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_layers: int = 3,
    hidden_size: int = 256,
    intermediate_size: int = 128,
    num_experts: int = 16,
    topk: int = 4,
    fused: bool = False,
    max_shard_bytes: int | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and safetensors of a random model; equal arguments give equal files.

    Args:
        directory: made if missing.
        dtype: of the weights on disk.
        num_layers: decoder layers; the first one of a DeepSeek model is dense.
        hidden_size: H, a multiple of 32.
        intermediate_size: I of one routed expert.
        num_experts: E, a multiple of 2.
        fused: expert tensors stacked per layer (how transformers 5 holds them) instead of one by one (as published).
        max_shard_bytes: None: one file; else several of about this size, with an index.
        fields: of config.json, in the place of what this function would choose.

    Returns:
        The directory.
    """
    sizes = {"layers": num_layers, "hidden": hidden_size, "inner": intermediate_size, "experts": num_experts, "k": topk}
    model = build(family, sizes, seed, fields).to(dtype)
    shard = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory, save_original_format=not fused, **shard)
    return Path(directory)


def build(family: str, sizes: dict[str, int], seed: int, fields: Mapping[str, Any] | None = None) -> Any:
    """A float32 model of the family with drawn weights; `fields` as in `write_checkpoint`."""
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {FAMILIES}, got {family!r}")
    config = transformers.AutoConfig.for_model(family, **{**_config(family, sizes), **(fields or {})})
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                gain = next((gain for part, gain in _GAINS if part in name), 1.0)
                fan_in = 1 if "embed_tokens" in name else parameter.shape[-1]
                parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
        if 4 * sizes["experts"] <= sizes["hidden"]:
            _route_clearly(model, sizes["experts"], generator)
    return model.eval()


def _route_clearly(model: Any, num_experts: int, generator: torch.Generator) -> None:
    """Give the last E columns of the residual stream to the routers: see the head of this page."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter[..., -num_experts:, :] = 0.0
        elif "embed_tokens" in name:
            rankings = [_ranking(num_experts, generator) for _ in range(parameter.shape[0])]
            parameter[:, -num_experts:] = (torch.stack(rankings) / (num_experts - 1) - 0.5) * 2 * _ROUTER_SPREAD
        elif "mlp.gate." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            parameter.zero_()
            each = torch.eye(num_experts, dtype=torch.float32, device="cpu")
            parameter[:, -num_experts:] = _ROUTER_GAIN * each.roll(layer * num_experts // 2, 1)


def _ranking(num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """A random permutation of 0..E-1 whose two best lie in one half, so that group-limited routers have no ties."""
    order = torch.randperm(num_experts, generator=generator, device="cpu")
    best, half = int(order.argmax()), num_experts // 2
    second, partner = int((order == num_experts - 2).nonzero()), best // half * half + (best + 1) % half
    order[[second, partner]] = order[[partner, second]]
    return order


def _config(family: str, sizes: dict[str, int]) -> dict[str, Any]:
    hidden, num_heads = sizes["hidden"], max(2, sizes["hidden"] // 64)
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_experts_per_tok": sizes["k"],
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if family == "mixtral":
        return config | {"num_local_experts": sizes["experts"], "intermediate_size": sizes["inner"]}
    config["moe_intermediate_size"] = sizes["inner"]
    if family == "qwen3_moe":
        return config | {
            "num_experts": sizes["experts"],
            "head_dim": hidden // num_heads,
            "num_key_value_heads": num_heads // 2,
            "norm_topk_prob": True,
        }
    return config | {
        "n_routed_experts": sizes["experts"],
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1 if sizes["k"] <= sizes["experts"] // 2 else 2,
        "topk_method": "group_limited_greedy",
        "kv_lora_rank": hidden // 4,
        "q_lora_rank": hidden // 2,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }
