"""Tiny models of images, sounds and text around a text model with experts, as `transformers` builds them."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import torch
from transformers.models.auto import configuration_auto

from crossdock.demo.every import tiny_model

OUTER = {
    "aria_text": "aria", "diffusion_gemma_text": "diffusion_gemma", "gemma4_text": "gemma4",
    "glm4v_moe_text": "glm4v_moe", "glm5_next_text": "glm5_next", "hy_v4_vl_text": "hy_v4_vl",
    "inkling2_loop_text": "inkling2_loop", "inkling2_text": "inkling2", "llama4_text": "llama4",
    "minimax_m3_vl_text": "minimax_m3_vl", "mistral_large4_text": "mistral_large4",
    "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text": "qwen3_vl_moe", "qwen4_exp_text": "qwen4_exp",
}  # fmt: skip
"""model_type of the outer model, by family; those that are built tiny."""
_HIDDEN = 64
"""Columns of the text model's rows, into which the other parts project."""
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "image_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("patch_size", "head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("out_hidden_size", "output_dim", "text_hidden_size", "projection_dim"), _HIDDEN),
}
"""Sizes of the other parts, for the keys that they have."""


def outer_model(family: str, **fields: Any) -> Any:
    """A float32 model with drawn weights around the family's tiny text model; fields: of its config."""
    config_type = configuration_auto.CONFIG_MAPPING[OUTER[family]]
    base, parts = config_type(), {}
    for name in config_type.sub_configs:
        part = getattr(base, name, None)
        if name == "text_config":
            parts[name] = tiny_model(family, **fields).config.to_dict() | {"pad_token_id": 0}
        elif part is not None:
            parts[name] = {key: size for key, size in _SMALL.items() if hasattr(part, key)}
            parts[name] |= {"model_type": part.model_type}
    config = config_type(**parts)
    module = importlib.import_module(config_type.__module__.replace("configuration_", "modeling_"))
    made = [
        each for each in vars(module).values()
        if inspect.isclass(each) and getattr(each, "config_class", None) is config_type
        and re.search("For(Conditional|Block|Causal)", each.__name__)
    ]  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = made[0]._from_config(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "norm" not in name and "conv" not in name:
                    parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model
