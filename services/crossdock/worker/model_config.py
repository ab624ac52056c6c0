"""What a model's config.json says about its experts: sizes, activation, dtype, how weights are quantised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from crossdock.worker.families import DEFAULTS, FAMILIES, NOT_SERVED, NUM_EXPERTS, NUM_LAYERS, TOPK, Family
from crossdock.worker.gating import ACTIVATIONS, Gating
from crossdock.worker.names import HINT
from crossdock.worker.shards import CheckpointError, read_json
from crossdock.worker.weights import Format

_MOST = 1 << 20
"""Most of any size or number: loops go over layers and experts."""
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelConfig:
    """config.json with typed look-ups that name the key; the text model's part of it where it is nested.

    Attributes:
        path: of the file.
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
        """A string value."""
        value = data.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {name}: expected a string, got {value!r}")
        return value

    def number(self, *names: str) -> int:
        """The first of `names` that is set; an int in 1.._MOST."""
        for name in names:
            value = self._data.get(name)
            if value is not None:
                if type(value) is not int or not 1 <= value <= _MOST:
                    raise CheckpointError(f"{self.path}: {name}: expected a positive int up to {_MOST}, got {value!r}")
                return value
        raise CheckpointError(f"{self.path}: {names[0]} is missing")

    @property
    def num_layers(self) -> int:
        """Decoder layers, by number or by a list of their kinds."""
        kinds = self._data.get("layers_block_type")
        return len(kinds) if isinstance(kinds, list) and kinds else self.number(*NUM_LAYERS)

    def named_dense(self) -> set[int]:
        """Layers without experts as far as config.json names them, which not every family's does."""
        numbers = range(self.num_layers)
        first, step, every = (
            self._data.get(key) for key in ("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq")
        )
        kinds, named = self._data.get("mlp_layer_types"), self._data.get("mlp_only_layers")
        dense = {layer for layer in numbers if type(first) is int and layer < first}
        dense |= {layer for layer in numbers if type(step) is int and step > 0 and (layer + 1) % step}
        dense |= {layer for layer in numbers if type(every) is int and every > 0 and layer % every}
        dense |= {layer for layer, kind in enumerate(kinds if isinstance(kinds, list) else ()) if kind == "dense"}
        return dense | {layer for layer in (named if isinstance(named, list) else ()) if type(layer) is int}

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

    def quantised(self) -> Format:
        """The format of those of the experts' matrices that are not float. Raises CheckpointError."""
        found = self._data.get("quantization_config") or self._whole.get("quantization_config") or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path}: quantization_config: expected an object, got {found!r}")
        method = found.get("quant_method", "fp8")
        if method == "fp8":
            return Format("fp8", self._block(found.get("weight_block_size", [128, 128])), "_scale_inv")
        if method == "mxfp4":
            return Format("mxfp4", suffix="_scales")
        if method == "compressed-tensors":
            return self._compressed(found)
        raise CheckpointError(
            f"{self.path}: quant_method: expected none, fp8, mxfp4 or compressed-tensors, got {method!r}: {HINT}"
        )

    def _block(self, size: object) -> tuple[int, int]:
        match size:
            case None:
                return 0, 0
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise CheckpointError(f"{self.path}: weight_block_size: expected [rows, columns], got {size!r}")

    def _compressed(self, found: dict[str, Any]) -> Format:
        """Of compressed-tensors: one group, its weights fp8."""
        groups = found.get("config_groups")
        each_group = groups.values() if isinstance(groups, dict) else ()
        all_weights = [group.get("weights") if isinstance(group, dict) else None for group in each_group]
        weights = all_weights[0] if all_weights else None
        if not isinstance(weights, dict) or any(each != weights for each in all_weights):
            raise CheckpointError(f"{self.path}: config_groups: expected groups with equal weights, got {groups!r}")
        kind = weights.get("type"), weights.get("num_bits")
        strategy = weights.get("strategy")
        if kind != ("float", 8) or strategy not in ("channel", "tensor", "block"):
            got = f"{kind[1]}-bit {kind[0]} by {strategy}"
            raise CheckpointError(f"{self.path}: expected 8-bit float by channel, block or tensor, got {got}: {HINT}")
        block = {"channel": (1, 0), "tensor": (0, 0)}.get(strategy) or self._block(weights.get("block_structure"))
        return Format("fp8", block, "_scale")
