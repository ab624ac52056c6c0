"""A Hugging Face MoE checkpoint directory, opened for its routed experts only.

Reads `config.json` and the safetensors headers, checks that every routed expert is there in the right shape, and hands
out one expert at a time. Families: Qwen3-MoE, Mixtral, DeepSeek-V2, DeepSeek-V3. On disk an expert may be three named
matrices (Qwen and DeepSeek: gate_proj, up_proj, down_proj; Mixtral: w1, w3, w2) or a slice of two stacked ones
(`experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I], as transformers 5 holds them), each in float or in
fp8 e4m3 with block scales (`..._scale_inv`). Routers, biases and shared experts are the client's: they are not read.

Letters: E experts, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossdock.worker.shards import CheckpointError, Shards, read_json

__all__ = ["Checkpoint", "CheckpointError", "ModelSpec"]

_FLOATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PREFIXES = ("model.", "")
_PER_EXPERT = (
    ("mlp.experts.{e}.{m}.weight", ("gate_proj", "up_proj", "down_proj")),
    ("block_sparse_moe.experts.{e}.{m}.weight", ("w1", "w3", "w2")),
    ("mlp.experts.{e}.{m}.weight", ("w1", "w3", "w2")),
)
_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_SAMPLE_BYTES = 256
"""Bytes of one matrix of each expert that go into the fingerprint, and of its scales: two fine-tunes, or quantisations,
of one model differ. DeepSeek-V3 has 58 layers of 256 experts: 30,000 reads of a page, 120 MB."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a model.

    Attributes:
        family: config.json's model_type: "qwen3_moe" | "mixtral" | "deepseek_v2" | "deepseek_v3".
        num_layers: decoder layers, dense ones included.
        moe_layers: numbers of the layers with routed experts, ascending.
        num_experts: E, routed experts per layer.
        hidden_size: H.
        intermediate_size: I of one routed expert.
        topk: K, experts per token.
        hidden_act: activation between the two matrix products.
        dtype: what the model computes in (fp8 weights: the dtype they are dequantised to).
        fingerprint: hash of all of the above, the expert tensors' names, types and shapes, and a sample of every
            expert's bytes and scales.
    """

    family: str
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    topk: int
    hidden_act: str
    dtype: torch.dtype
    fingerprint: str


class _Config:
    """config.json with typed look-ups that name the key."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, read_json(path)

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set; an int > 0, or >= 0 where there is a default."""
        for name in names:
            value = self.data.get(name)
            if value is not None:
                if type(value) is not int or value < (default is None):
                    raise CheckpointError(f"{self.path}: {name}: expected a positive int, got {value!r}")
                return value
        if default is None:
            raise CheckpointError(f"{self.path}: {names[0]} is missing")
        return default

    def text(self, name: str, default: str | None = None) -> str:
        """A string value."""
        value = self.data.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {name}: expected a string, got {value!r}")
        return value


def _qwen3_layers(config: _Config, num_layers: int) -> tuple[int, ...]:
    step = config.number("decoder_sparse_step", default=1)
    dense = config.data.get("mlp_only_layers") or ()
    return tuple(i for i in range(num_layers) if step > 0 and (i + 1) % step == 0 and i not in dense)


def _mixtral_layers(config: _Config, num_layers: int) -> tuple[int, ...]:
    return tuple(range(num_layers))


def _deepseek_layers(config: _Config, num_layers: int) -> tuple[int, ...]:
    first = config.number("first_k_dense_replace", default=0)
    every = max(1, config.number("moe_layer_freq", default=1))
    return tuple(i for i in range(first, num_layers) if i % every == 0)


_FAMILIES: dict[str, tuple[Callable[[_Config, int], tuple[int, ...]], tuple[str, ...], str]] = {
    "qwen3_moe": (_qwen3_layers, ("num_experts", "num_local_experts"), "moe_intermediate_size"),
    "mixtral": (_mixtral_layers, ("num_local_experts", "num_experts"), "intermediate_size"),
    "deepseek_v2": (_deepseek_layers, ("n_routed_experts",), "moe_intermediate_size"),
    "deepseek_v3": (_deepseek_layers, ("n_routed_experts",), "moe_intermediate_size"),
}
"""Per family: which layers route, the key of E, the key of I."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one layer's experts are named: three names per expert, or two stacked tensors per layer."""

    prefix: str
    pattern: str = ""
    matrices: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        return not self.matrices

    def names(self, layer: int, expert: int) -> tuple[str, ...]:
        """(gate, up, down), or (gate_up, down) when fused."""
        at = f"{self.prefix}layers.{layer}."
        if self.fused:
            return tuple(at + name for name in _FUSED)
        return tuple(at + self.pattern.format(e=expert, m=matrix) for matrix in self.matrices)


def _scale_name(weight: str) -> str:
    return f"{weight}_scale_inv"


class Checkpoint:
    """An opened checkpoint directory. Use `Checkpoint.open`; one thread at a time."""

    def __init__(self, shards: Shards, config: _Config) -> None:
        self._shards, self._config = shards, config
        self._block = _quantisation_block(config)
        fields = _config_fields(config)
        self._layout = self._find_layout(fields["moe_layers"][0])
        self._shape = (fields["num_experts"], fields["hidden_size"], fields["intermediate_size"])
        tensors = list(self._check_tensors(fields["moe_layers"]))
        fields["dtype"] = _compute_dtype(config, tensors[0][1])
        self.spec = ModelSpec(**fields, fingerprint=self._fingerprint(fields, tensors))

    @staticmethod
    def open(directory: str | Path) -> Checkpoint:
        """Open and check a directory; no weights are read beyond a sample.

        Raises:
            CheckpointError: missing directory, config, shard or tensor; truncated or corrupt shard; wrong shape;
                unknown model_type or quantisation.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory")
        config = _Config(path / "config.json")
        return Checkpoint(Shards(path), config)

    def close(self) -> None:
        """Unmap the files."""
        self._shards.close()

    def read_expert(self, layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Copy one expert's weights out of the mapped files, dequantised where they are fp8.

        Args:
            layer, expert: which; the layer's number in the model, the logical expert id.
            gate_up: [2I, H] of any float dtype and device, written: gate rows first, then up rows.
            down: [H, I], written.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        names = self._layout.names(layer, expert)
        index = expert if self._layout.fused else None
        targets = (gate_up, down) if self._layout.fused else (*gate_up.chunk(2), down)
        for name, target in zip(names, targets, strict=True):
            weight = self._shards.read(name, index)
            if weight.dtype is torch.float8_e4m3fn:
                scales = self._shards.read(_scale_name(name), index)
                weight = _dequantise(weight, scales, self._block)
            target.copy_(weight)

    def _find_layout(self, layer: int) -> _Layout:
        tried = []
        for prefix in _PREFIXES:
            for layout in (_Layout(prefix), *(_Layout(prefix, *per_expert) for per_expert in _PER_EXPERT)):
                names = layout.names(layer, 0)
                if any(name in self._shards for name in names):
                    return layout
                tried.append(names[0])
        raise CheckpointError(f"{self._config.path.parent}: layer {layer} has no expert tensors; looked for {tried}")

    def _check_tensors(self, layers: tuple[int, ...]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        num_experts, hidden, inner = self._shape
        fused = self._layout.fused
        shapes: tuple[tuple[int, ...], ...] = ((inner, hidden), (inner, hidden), (hidden, inner))
        if fused:
            shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
        for layer in layers:
            for expert in range(1 if fused else num_experts):
                for name, shape in zip(self._layout.names(layer, expert), shapes, strict=True):
                    yield name, self._check_tensor(name, shape), shape

    def _check_tensor(self, name: str, expected: tuple[int, ...]) -> torch.dtype:
        dtype, shape = self._shards.describe(name)
        if shape != expected:
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected {list(expected)}, got {list(shape)}")
        if dtype is torch.float8_e4m3fn:
            scale, (rows, columns) = _scale_name(name), self._block
            grid = (*expected[:-2], -(-expected[-2] // rows), -(-expected[-1] // columns))
            _, got = self._shards.describe(scale)
            if got != grid:
                raise CheckpointError(f"{self._shards.file(scale)}: {scale}: expected {list(grid)}, got {list(got)}")
        return dtype

    def _fingerprint(self, fields: dict[str, Any], tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> str:
        digest = hashlib.sha256(json.dumps({key: str(value) for key, value in sorted(fields.items())}).encode())
        for tensor in tensors:
            digest.update(repr(tensor).encode())
        for sample in self._shards.samples(self._sampled(fields["moe_layers"]), _SAMPLE_BYTES):
            digest.update(sample)
        return digest.hexdigest()[:32]

    def _sampled(self, layers: tuple[int, ...]) -> Iterator[tuple[str, int | None]]:
        """Of each expert one matrix, another one in the next layer and expert, and its scales."""
        for layer in layers:
            for expert in range(self._shape[0]):
                names = self._layout.names(layer, expert)
                name, index = names[(layer + expert) % len(names)], expert if self._layout.fused else None
                yield name, index
                if self._shards.describe(name)[0] is torch.float8_e4m3fn:
                    yield _scale_name(name), index


def _config_fields(config: _Config) -> dict[str, Any]:
    """ModelSpec's fields from config.json (all but dtype and fingerprint)."""
    family = config.text("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(f"{config.path}: model_type: expected one of {sorted(_FAMILIES)}, got {family!r}")
    layers, experts, inner = _FAMILIES[family]
    num_layers = config.number("num_hidden_layers")
    fields = {
        "family": family,
        "num_layers": num_layers,
        "moe_layers": layers(config, num_layers),
        "num_experts": config.number(*experts),
        "hidden_size": config.number("hidden_size"),
        "intermediate_size": config.number(inner),
        "topk": config.number("num_experts_per_tok"),
        "hidden_act": config.text("hidden_act", "silu"),
    }
    if not fields["moe_layers"]:
        raise CheckpointError(f"{config.path}: none of the {num_layers} layers has routed experts")
    return fields


def _quantisation_block(config: _Config) -> tuple[int, int]:
    """Rows and columns that share one fp8 scale."""
    quantisation = config.data.get("quantization_config") or {}
    method = quantisation.get("quant_method", "fp8") if isinstance(quantisation, dict) else quantisation
    if method != "fp8":
        raise CheckpointError(f"{config.path}: quant_method: expected none or 'fp8' with block scales, got {method!r}")
    block = quantisation.get("weight_block_size") or [128, 128]
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(f"{config.path}: weight_block_size: expected [rows, columns], got {block!r}")


def _compute_dtype(config: _Config, stored: torch.dtype) -> torch.dtype:
    name = config.data.get("dtype") or config.data.get("torch_dtype")
    if name is None:
        return stored if stored in _FLOATS.values() else torch.bfloat16
    if name not in _FLOATS:
        raise CheckpointError(f"{config.path}: dtype: expected one of {sorted(_FLOATS)}, got {name!r}")
    return _FLOATS[name]


def _dequantise(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp8 [rows, columns] times its block scales [ceil(rows / bh), ceil(columns / bw)], in fp32."""
    rows, columns = weight.shape
    scales = scales.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * scales.repeat_interleave(block[1], 1)[:, :columns]
