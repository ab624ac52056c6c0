"""`crossdock demo --families all`: each MoE family of the installed `transformers` with its experts in other processes.

A tiny random model of each family is written to disk, served by real workers, and compared token by token with the
plain model; families that are not served are printed with the reason. Half a minute for each on two cores.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.models.auto import configuration_auto, modeling_auto

from crossdock.client import attach
from crossdock.demo import hosts
from crossdock.demo.stage import FORM_TIMEOUT_S, Stage, serving
from crossdock.worker.checkpoints.families import FAMILIES, NOT_SERVED

NUM_EXPERTS, TOPK, VOCAB_SIZE = 8, 2, 256

_COUNTS_EXPERTS = re.compile(r"\b((moe_)?num_(local_|routed_)?experts|n_routed_experts)\b")
_TINY: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), TOPK),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "qk_head_dim"), 32),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("first_k_dense_replace", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    "vocab_size": VOCAB_SIZE, "unpadded_vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 64, "hidden_size_per_layer_input": 16, "num_hidden_layers": 4, "intermediate_size": 96,
    "q_lora_rank": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "enable_moe_block": True, "index_head_dim": 32,
}  # fmt: skip
"""Sizes, for the keys that a family has."""
_INDEXER = {"budget": 32, "compress_ratio": 8, "n_heads": 4, "kv_heads": 1, "head_dim": 16}
_SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "head_dim": 32}
_SLIDING |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 6},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots3_note_text": {"head_dim": 32, **{f"swa_{name}": size for name, size in _SLIDING.items()}},
    "granitemoehybrid": {"layer_types": ["attention", "mamba", "attention", "mamba"], "mamba_n_heads": 8},
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hy_v4_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", *["full_attention"] * 3], "num_dense_layers": 1},
    "nemotron_h": {"moe_latent_size": 32},
    "qwen4_exp_text": {f"indexer_{name}": size for name, size in _INDEXER.items()},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""
_MAX_PARAMETERS = 40_000_000


def known_to_transformers() -> list[str]:
    """model_type of every MoE text model in the registry of the installed `transformers`."""
    folder, found = Path(inspect.getfile(transformers)).parent / "models", []
    for model_type, name in vars(configuration_auto)["CONFIG_MAPPING_NAMES"].items():
        module = configuration_auto.model_type_to_module_name(model_type)
        file = folder / module / f"configuration_{module}.py"
        if not file.exists() or not _COUNTS_EXPERTS.search(file.read_text()):
            continue
        config = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        nested = {"text_config", "thinker_config"} & set(getattr(config, "sub_configs", {}))
        if not nested and any(_COUNTS_EXPERTS.fullmatch(key) for key in _keys(config)):
            found.append(model_type)
    return sorted(found)


def tiny_model(model_type: str, **fields: Any) -> Any:
    """A float32 model with a few layers and drawn weights: a language model where `transformers` has one, else what is
    inside of it.

    Raises:
        ValueError: it is not tiny: a size that _TINY does not know.
    """
    config_type, keys = configuration_auto.CONFIG_MAPPING[model_type], config_keys(model_type)
    sizes = {key: value for key, value in _TINY.items() if key in keys}
    if "kv_lora_rank" in keys:  # MLA: one key per head, and the width of a head follows from its parts
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    config = config_type(**sizes | _OWN.get(model_type, {}) | fields)
    with torch.device("meta"):
        num = sum(parameter.numel() for parameter in _made(config).parameters())
    if num > _MAX_PARAMETERS:
        raise ValueError(f"{model_type}: expected a tiny model, got {num} parameters: {sizes}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _drawn(_made(config))


def config_keys(model_type: str) -> set[str]:
    return _keys(configuration_auto.CONFIG_MAPPING[model_type])


def next_tokens(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and the best token at each place [B, S]. A model without a head gets its embedding as one."""
    with torch.no_grad():
        said = model(input_ids=ids, use_cache=False)
        logits = said.logits if hasattr(said, "logits") else said[0] @ model.get_input_embeddings().weight.t()
    return logits, logits.argmax(-1)


def _made(config: Any) -> Any:
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is not None:
        automatic: Any = transformers.AutoModelForCausalLM
        return automatic.from_config(config, dtype=torch.float32)
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    made: list[Any] = [
        each for each in vars(module).values()
        if inspect.isclass(each) and getattr(each, "config_class", None) is type(config)
        and re.search(r"(ForCausalLM|Model)$", each.__name__) and "PreTrained" not in each.__name__
    ]  # fmt: skip
    return sorted(made, key=lambda each: "CausalLM" not in each.__name__)[0](config)


def _drawn(model: Any) -> Any:
    """Matrices scaled by their fan-in, so that experts matter; routers as `transformers` initialises them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name and "conv" not in name:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "expert" in name or name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model.eval()


def _keys(config: Any) -> set[str]:
    own = {key for each in config.__mro__ for key in getattr(each, "__annotations__", {})}
    return own | set(getattr(config, "attribute_map", {}))


NUM_PROMPTS, NUM_TOKENS = 4, 64
MAX_DIFFERENCE = 1e-3
"""Largest difference of logits whose standard deviation is between 0.5 and 10."""


@dataclass(frozen=True, slots=True)
class Served:
    """One family.

    Attributes:
        family: model_type.
        tokens: "equal/compared"; empty: not served.
        difference: largest |remote - plain| of any logit.
        reason: why it is not served, or what failed; empty: all tokens are equal.
        failed: served, and not equal.
    """

    family: str
    tokens: str = ""
    difference: float = 0.0
    reason: str = ""
    failed: bool = False


def run_every(where: Stage, console: Console, *, as_json: bool) -> int:
    """Print one row per family; returns 0 if every family is served with equal tokens or listed with a reason."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(tempfile.mkdtemp(prefix="crossdock-demo-"))
    found = []
    for family in known_to_transformers():
        found.append(_run(family, folder / family, where))
        console.print(f"{family}: {found[-1].tokens or 'not served'} {found[-1].reason}", soft_wrap=True)
        if not found[-1].failed:
            shutil.rmtree(folder / family, ignore_errors=True)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    console.print(_table(found))
    failed = [each.family for each in found if each.failed]
    console.print(
        f"failed: {', '.join(failed)}; logs: {folder}" if failed else "[green]every family equal or listed[/]"
    )
    return bool(failed)


def _run(family: str, folder: Path, where: Stage) -> Served:
    if family not in FAMILIES:
        reason = NOT_SERVED.get(family, "unknown: neither served nor listed")
        return Served(family, reason=reason, failed=family not in NOT_SERVED)
    try:
        return _compare(family, folder, where)
    except Exception as error:  # one family must not end the others
        return Served(family, reason=f"{type(error).__name__}: {error}", failed=True)


def _compare(family: str, folder: Path, where: Stage) -> Served:
    model = tiny_model(family)
    model.save_pretrained(folder)
    model = model.to(where.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_PROMPTS, NUM_TOKENS), generator=generator, device="cpu").to(where.device)
    logits, tokens = next_tokens(model, ids)
    with serving(folder, "float32", where, hosts.LOOPBACK) as group:
        group.wait_serving(FORM_TIMEOUT_S)
        with attach(model, group.control_address, security=where.security):
            remote_logits, remote_tokens = next_tokens(model, ids)
    num_equal, difference = int((remote_tokens == tokens).sum()), float((remote_logits - logits).abs().max())
    good = num_equal == tokens.numel() and difference <= MAX_DIFFERENCE
    reason = "" if good else f"logits differ by {difference:.3g}"
    return Served(family, f"{num_equal}/{tokens.numel()}", difference, reason, not good)


def _table(found: Sequence[Served]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption=f"transformers {transformers.__version__}, float32")
    for heading in ("family", "tokens equal", "max logit diff", "reason"):
        made.add_column(heading)
    for each in found:
        colour = "red" if each.failed else "green" if each.tokens else "dim"
        difference = f"{each.difference:.1g}" if each.tokens else ""
        made.add_row(each.family, f"[{colour}]{each.tokens or 'not served'}[/]", difference, each.reason)
    return made
