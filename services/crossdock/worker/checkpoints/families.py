"""The model families whose experts are served, as data: what a config.json means, and how tensors are named on disk.

A family is what is the same in all its checkpoints: which key holds a size, what the experts compute, how stacked
tensors lie. `NAMINGS` are the names that publishers and `transformers` (before and since 5) give to experts; any family
may use any of them, and each layer another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["gated", "ungated", "scaled", "softcapped"]
"""What an expert computes between its products; `gating.py` says how."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of E; the first that is set."""
TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Keys of K."""
NUM_LAYERS = ("num_hidden_layers", "num_layers")
PREFIXES = (
    "model.",
    "",
    "model.language_model.",
    "model.decoder.",
    "language_model.model.",
    "language_model.",
    "model.llm.",
    "backbone.",
    "thinker.model.",
)
"""Of `layers.{number}.`, in the order in which they are looked for: text before speech, decoder before drafts."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the checkpoints of one model_type have in common.

    Attributes:
        inner: key of I, the intermediate size of one routed expert.
        latent: key of the experts' width, where they do not work on rows of hidden_size.
        act: key of the activation's name; `hidden_act` where it is not set.
        rule: see `Gating`.
        limit, alpha, caps: keys of Gating's numbers.
        transposed: stacked float tensors are [E, H, 2I] and [E, I, H].
        interleaved: rows of a stacked gate_up alternate: gate 0, up 0, gate 1, ...
        bias: both products add one.
    """

    inner: str = "moe_intermediate_size"
    latent: str = ""
    act: str = "hidden_act"
    rule: Rule = "gated"
    limit: str = ""
    alpha: str = ""
    caps: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of one layer's expert tensors, after `layers.{number}.`; {e} is the expert where each has its own.

    Attributes:
        first: gate and up, or both stacked in one, or up alone.
        down: the second matrix.
        interleaved: rows of the stacked one alternate between gate and up.
    """

    first: tuple[str, ...]
    down: str
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        return "{e}" not in self.down


_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")
_ODD = (
    Naming(("experts.gate_up_proj",), "experts.down_proj"),
    Naming(("experts.{e}.w1.weight", "experts.{e}.w3.weight"), "experts.{e}.w2.weight"),
    Naming(("block_sparse_moe.input_linear.weight",), "block_sparse_moe.output_linear.weight"),
    Naming(("mlp.experts.fc1.weight",), "mlp.experts.fc2.weight"),
    Naming(("mlp.experts.w13_weight",), "mlp.experts.w2_weight", interleaved=True),
)
_GATED = tuple(
    naming
    for block in _BLOCKS
    for naming in (
        Naming((f"{block}.experts.gate_up_proj",), f"{block}.experts.down_proj"),
        *(
            Naming(
                tuple(f"{block}.experts.{{e}}.{name}.weight" for name in first), f"{block}.experts.{{e}}.{down}.weight"
            )
            for *first, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
        ),
    )
)
_UNGATED = tuple(
    Naming((f"{block}.experts.{each}up_proj{end}",), f"{block}.experts.{each}down_proj{end}")
    for block in _BLOCKS
    for each, end in (("", ""), ("{e}.", ".weight"))
)


def namings(family: Family) -> tuple[Naming, ...]:
    """The names that a checkpoint of the family may have, in the order in which they are looked for."""
    return _UNGATED if family.rule == "ungated" else _GATED + _ODD


_ROUTED = Family()
_FFN = Family(inner="intermediate_size")
_CLAMPED = Family(limit="swiglu_limit")
_SOFTCAPPED = Family(rule="softcapped", caps=("mlp_gate_softcap", "mlp_up_softcap"))

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3",
            "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flint", "glm4_moe",
            "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "hy_v3", "inkling_text", "kimi_k2", "kimi_linear",
            "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mellum", "mimo_v2_flash", "mistral4",
            "mistral_large4_text", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
            "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open",
            "unlimited_ocr_text", "zaya",
        ),
        _ROUTED,
    ),
    **dict.fromkeys(
        (
            "cohere2_moe", "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
            "hunyuan_v1_moe", "jamba", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe",
        ),
        _FFN,
    ),
    **dict.fromkeys(("glm5_next_text", "hy_v4", "hy_v4_vl_text"), _CLAMPED),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _SOFTCAPPED),
    "aria_text": Family(inner="intermediate_size", act="", transposed=True),
    "deepseek_v4": _CLAMPED,
    "diffusion_gemma_text": Family(act="hidden_activation"),
    "gemma4_text": Family(act="hidden_activation"),
    "gpt_oss": Family(
        inner="intermediate_size", rule="scaled", limit="swiglu_limit", alpha="swiglu_alpha", transposed=True,
        interleaved=True, bias=True,
    ),
    "llama4_text": Family(inner="intermediate_size", transposed=True),
    "minimax_m3_vl_text": Family(
        inner="intermediate_size", rule="scaled", limit="swiglu_limit", alpha="swiglu_alpha"
    ),
    "nemotron_h": Family(rule="ungated", act="mlp_hidden_act", latent="moe_latent_size"),
}  # fmt: skip
"""Families by model_type of config.json, or of its text_config."""

_ONE_DENSE = (
    "axk1", "axk2", "dots3_note_text", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "hy_v3", "hy_v4",
    "hy_v4_vl_text", "kimi_linear", "laguna", "mimo_v2_flash", "mistral_large4_text", "sarvam_mla", "sarvam_moe",
    "unlimited_ocr_text",
)  # fmt: skip
_THREE_DENSE = ("beam", "deepseek_v3", "deepseek_v32", "glm5_next_text", "glm_moe_dsa")
DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"first_k_dense_replace": 1} for name in _ONE_DENSE},
    **{name: {"first_k_dense_replace": 3} for name in _THREE_DENSE},
    "afmoe": {"num_dense_layers": 1},
    "bailing_hybrid": {"first_k_dense_replace": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "flint": {"mlp_only_layers": [0, 1]},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "jamba": {"expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"num_dense_layers": 2},
}
"""What a config.json may leave out: `transformers` takes these."""

NOT_SERVED: dict[str, str] = {
    "dbrx": "experts are slices of one flat matrix [E * I, H] per kind",
    "doge": "its experts are single rows of an embedding, found by keys",
    "dots3_note_vision_encoder": "an encoder of images",
    "ernie4_5_vl_moe_text": "two sets of experts per layer, for text and for images",
    "jetmoe": "attention is routed too, and its experts are half of it",
    "longcat_flash": "some of the routed experts are the identity, which nothing is sent away for",
    "muse_spark_text": "a norm follows each expert, before its weight",
    "nllb-moe": "experts of an encoder and of a decoder, with two-layer MLPs in modules of their own",
    "openai_privacy_filter": "a classifier of tokens, and not a language model",
    "qwen3_omni_moe_talker_text": "the speech half of a model whose text half is served",
    "step3p5": "the clamp differs from layer to layer and follows the activation",
    "switch_transformers": "experts of an encoder and of a decoder, with two-layer MLPs in modules of their own",
    "vitpose_backbone": "an encoder of images; its experts belong to datasets, and nothing is routed",
}
"""Families of `transformers` that are not served, and why."""
