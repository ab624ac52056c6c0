"""What a model's config.json says about its experts: layers, sizes, activation, dtype, how weights are quantised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crossdock.worker.checkpoints.families import DEFAULTS, FAMILIES, NOT_SERVED, NUM_EXPERTS, NUM_LAYERS, TOPK, Family
from crossdock.worker.checkpoints.gating import ACTIVATIONS, Gating
from crossdock.worker.checkpoints.shards import CheckpointError, read_json
from crossdock.worker.checkpoints.weights import Format

_MOST = 1 << 20
"""Most of any size or number: loops go over layers and experts."""
_PER_TENSOR = Format("fp8")
_INTEGERS = {"awq": ("version", ["gemm"]), "gptq": ("checkpoint_format", ["gptq", "gptq_v2"])}
"""By method: the key of its packing, and those that are read; the first one where the key is not there."""
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_KINDS = {
    "mlp_layer_types": ("sparse", "moe", "hash_moe"),
    "layers_block_type": ("moe",),
    "hybrid_override_pattern": ("E",),
}
"""Keys with a kind for each layer, and the kinds with experts; a key that names none of these says nothing."""
_FIRST = ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx", "moe_layer_start_index")
"""Keys of the first layer that may have experts."""
_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Keys of n: each n-th layer has experts, beginning with layer n - 1."""


def sparse_layers(keys: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers with experts, ascending. Reads the keys as `transformers` does.

    Args:
        keys: of config.json, with the family's defaults.

    Raises:
        ValueError: key, expected, got.
    """
    for name, sparse in _KINDS.items():
        kinds = keys.get(name)
        if isinstance(kinds, list | str) and any(kind in sparse for kind in kinds):
            return tuple(layer for layer in _numbers(name, kinds, num_layers) if kinds[layer] in sparse)
    if keys.get("moe_layers") is not None:
        return tuple(sorted(set(_list(keys, "moe_layers")) & set(range(num_layers))))
    first = max(_int(keys, name, 0, low=0) for name in _FIRST)
    last, dense = _int(keys, "moe_layer_end_index", -1, low=-1), _list(keys, "mlp_only_layers")
    period, offset = _int(keys, "expert_layer_period", 1), _int(keys, "expert_layer_offset", 0, low=0)
    steps, often = [_int(keys, name, 1) for name in _STEPS], _often(keys, num_layers)
    return tuple(
        layer
        for layer in range(first, num_layers if last < 0 else min(num_layers, last + 1))
        if layer not in dense and often[layer] and layer % period == offset % period
        and not any((layer + 1) % step for step in steps)
    )  # fmt: skip


def _often(keys: Mapping[str, Any], num_layers: int) -> list[bool]:
    """By layer: moe_layer_freq, which is n for each n-th layer beginning with 0, or a list of flags."""
    if isinstance(keys.get("moe_layer_freq"), list):
        flags = _list(keys, "moe_layer_freq")
        return [bool(flags[layer]) for layer in _numbers("moe_layer_freq", flags, num_layers)]
    step = _int(keys, "moe_layer_freq", 1)
    return [layer % step == 0 for layer in range(num_layers)]


def _numbers(name: str, values: list[Any] | str, num_layers: int) -> range:
    if len(values) < num_layers:
        raise ValueError(f"{name}: expected one for each of {num_layers} layers, got {len(values)}")
    return range(num_layers)


def _int(keys: Mapping[str, Any], name: str, default: int, *, low: int = 1) -> int:
    value = keys.get(name, default)
    if type(value) is not int or value < low:
        raise ValueError(f"{name}: expected an int of at least {low}, got {value!r}")
    return value


def _list(keys: Mapping[str, Any], name: str) -> list[int]:
    value = keys.get(name, [])
    if not isinstance(value, list) or any(type(each) not in (int, bool) for each in value):
        raise ValueError(f"{name}: expected a list of ints, got {value!r}")
    return value


class ModelConfig:
    """config.json with typed look-ups that name the key; the text model's part of it where it is nested.

    Attributes:
        model_type: of the text model.
        family: what that means.

    Raises:
        CheckpointError: unreadable, or a family that is not served.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._whole = path, read_json(path)
        self._data, self.model_type = self._text_model()
        if self.model_type not in FAMILIES:
            why = NOT_SERVED.get(self.model_type)
            served = f"{self.model_type!r}, which is not served: {why}" if why else repr(self.model_type)
            if {"auto_map", "llm_config", "language_config"} & self._whole.keys():
                served += ", a model of custom code: convert it to the one that transformers itself has, and serve that"
            raise CheckpointError(f"{path}: model_type: expected one of {sorted(FAMILIES)}, got {served}")
        self.family: Family = FAMILIES[self.model_type]

    def _text_model(self) -> tuple[dict[str, Any], str]:
        data, model_type = self._whole, self.text("model_type", self._whole, None)
        while (nested := data.get("thinker_config", data.get("text_config"))) is not None:
            if not isinstance(nested, dict):
                raise CheckpointError(f"{self.path}: text_config: expected an object, got {nested!r}")
            model_type = self.text("model_type", nested, model_type)
            data = nested
        if model_type not in FAMILIES and f"{model_type}_text" in FAMILIES:
            model_type += "_text"
        return data, model_type

    def text(self, name: str, data: dict[str, Any], default: str | None) -> str:
        value = data.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {name}: expected a string, got {value!r}")
        return value

    def number(self, *names: str) -> int:
        """The first of `names` that is set: an int in 1.._MOST, or a list with the same one for each layer."""
        for name in names:
            value = self._data.get(name)
            if value is not None:
                first = value[0] if isinstance(value, list) and value else value
                if isinstance(value, list) and any(each != first for each in value):
                    raise CheckpointError(f"{self.path}: {name}: expected the same in all layers, got {value!r}")
                if type(first) is not int or not 1 <= first <= _MOST:
                    raise CheckpointError(f"{self.path}: {name}: expected a positive int up to {_MOST}, got {value!r}")
                return first
        raise CheckpointError(f"{self.path}: {names[0]} is missing")

    @property
    def num_layers(self) -> int:
        """Decoder layers, by number or by a list of their kinds."""
        kinds = self._data.get("layers_block_type")
        return len(kinds) if isinstance(kinds, list) and kinds else self.number(*NUM_LAYERS)

    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts. Raises CheckpointError."""
        keys = DEFAULTS.get(self.model_type, {}) | {
            key: value for key, value in self._data.items() if value is not None
        }
        try:
            return sparse_layers(keys, self.num_layers)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def fields(self) -> dict[str, Any]:
        """ModelSpec's fields, but for those that depend on the tensors."""
        latent = self.family.latent
        return {
            "family": self.model_type,
            "num_layers": self.num_layers,
            "num_experts": self.number(*NUM_EXPERTS),
            "hidden_size": self.number(*([latent] if latent else []), "hidden_size"),
            "intermediate_size": self.number(self.family.inner),
            "topk": self.number(*TOPK),
            "gating": self.gating(),
            "bias": self.family.bias,
        }

    def gating(self) -> Gating:
        """What lies between the products. Raises CheckpointError: an activation that is not supported."""
        family = self.family
        act = self.text(family.act, self._data, "silu") if family.act else "silu"
        if act not in ACTIVATIONS:
            raise CheckpointError(f"{self.path}: {family.act}: expected one of {sorted(ACTIVATIONS)}, got {act!r}")
        limit = self._real(family.limit, optional=True) if family.limit else None
        alpha = self._real(family.alpha) if family.alpha else 1.0
        caps = [self._real(name) for name in family.caps] or [1.0, 1.0]
        return Gating(family.rule, act, limit, alpha, (caps[0], caps[1]))

    def _real(self, name: str, *, optional: bool = False) -> Any:
        value: Any = self._data.get(name, DEFAULTS.get(self.model_type, {}).get(name))
        if value is None and optional:
            return None
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: {name}: expected a finite number above 0, got {value!r}")
        return float(value)

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """What the model computes in; `stored`: dtype of its experts."""
        for data in (self._data, self._whole):
            name = data.get("dtype") or data.get("torch_dtype")
            if name is not None:
                break
        if name is None:
            return stored if stored in _FLOATS.values() else torch.bfloat16
        if not isinstance(name, str) or name not in _FLOATS:
            raise CheckpointError(f"{self.path}: dtype: expected one of {sorted(_FLOATS)}, got {name!r}")
        return _FLOATS[name]

    def _quantisation(self) -> dict[str, Any]:
        found = self._data.get("quantization_config") or self._whole.get("quantization_config") or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path}: quantization_config: expected an object, got {found!r}")
        return found

    def one_less(self) -> bool:
        """Zeros of GPTQ are stored one less than they mean. Raises CheckpointError: a packing that is not read."""
        found = self._quantisation()
        name, known = _INTEGERS.get(str(found.get("quant_method")), ("", [""]))
        value = found.get(name) or known[0]
        if str(value).lower() not in known:
            raise CheckpointError(f"{self.path}: {name}: expected one of {known}, got {value!r}")
        return bool(value != "gptq_v2")

    def fp8_formats(self) -> list[Format]:
        """The formats that fp8 experts may have; empty: it does not say. Raises CheckpointError."""
        found = self._quantisation()
        method = found.get("quant_method", "fp8")
        if method == "modelopt":
            return [_PER_TENSOR]
        if method == "compressed-tensors":
            return self._compressed(found)
        if method != "fp8":
            return []
        size = found.get("weight_block_size")
        return [_PER_TENSOR, Format("fp8", (128, 128))] if size is None else [Format("fp8", self._block(size))]

    def _block(self, size: object) -> tuple[int, int]:
        match size:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise CheckpointError(f"{self.path}: weight_block_size: expected [rows, columns], got {size!r}")

    def _compressed(self, found: dict[str, Any]) -> list[Format]:
        """Of compressed-tensors: of each group with fp8 weights. Which of them experts have, their scales' shapes say,
        since a group's targets are names that a server gives to modules."""
        groups, formats = found.get("config_groups"), []
        for group in groups.values() if isinstance(groups, dict) else ():
            match group:
                case {"weights": {"type": "float", "num_bits": 8, "strategy": "block", **more}}:
                    formats.append(Format("fp8", self._block(more.get("block_structure"))))
                case {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}:
                    formats.append(Format("fp8", (1, 0)))
                case {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}:
                    formats.append(_PER_TENSOR)
        return formats
