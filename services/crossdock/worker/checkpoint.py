"""A Hugging Face MoE checkpoint directory, opened for its routed experts only.

Reads `config.json` and the safetensors headers, checks that every routed expert is there in the right shape, and hands
out one expert at a time, in the bytes that are stored (`weights.py`) or as floats. The families and the names of their
tensors are data (`families.py`). Routers, their biases and shared experts are the client's: they are not read.

Letters: E experts, H hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossdock.worker.gating import Gating
from crossdock.worker.model_config import ModelConfig
from crossdock.worker.names import Names
from crossdock.worker.shards import CheckpointError, Shards
from crossdock.worker.weights import FLOAT, MX_BLOCK, Format, Stack, from_fp8, from_mxfp4

__all__ = ["Checkpoint", "CheckpointError", "ModelSpec"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DATA = {"float": _FLOATS, "fp8": (torch.float8_e4m3fn,), "mxfp4": (torch.uint8,)}
_SCALES = {"fp8": (*_FLOATS, torch.float8_e8m0fnu), "mxfp4": (torch.uint8,)}
"""dtypes of matrices and of their scales, by format."""
_SAMPLE_BYTES = 256
"""Bytes of one matrix of each expert that go into the fingerprint, and of its scales: two fine-tunes, or quantisations,
of one model differ. DeepSeek-V3 has 58 layers of 256 experts: 30,000 reads of a page, 120 MB."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a model.

    Attributes:
        family: model_type of config.json, or of its text_config: a key of `families.FAMILIES`.
        num_layers: decoder layers, dense ones included.
        moe_layers: numbers of the layers with routed experts, ascending.
        num_experts: E, routed experts per layer.
        hidden_size: H, columns of the rows that experts take.
        intermediate_size: I of one routed expert.
        topk: K, experts per token.
        gating: what an expert computes between its products.
        bias: both products add one.
        format: of the experts' matrices.
        dtype: what the model computes in.
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
    gating: Gating
    bias: bool
    format: Format
    dtype: torch.dtype
    fingerprint: str


class Checkpoint:
    """An opened checkpoint directory. Use `Checkpoint.open`; one thread at a time."""

    def __init__(self, shards: Shards, config: ModelConfig) -> None:
        self._shards, self._config = shards, config
        fields = config.fields()
        self._names = Names.find(shards, config.family, fields["num_layers"], config.named_dense(), config.path.parent)
        fields["moe_layers"] = self._names.layers
        self._shape = (fields["num_experts"], fields["hidden_size"], fields["intermediate_size"])
        self._halves, self._bias = fields["gating"].halves, fields["bias"]
        stored, self._format = self._find_format()
        self._transposed = self._is_transposed()
        fields["format"] = self._format
        fields["dtype"] = config.compute_dtype(stored)
        tensors = list(self._check_tensors())
        self._digests: dict[tuple[int, int], int] = {}
        self.spec = ModelSpec(**fields, fingerprint=self._fingerprint(fields, tensors))

    @staticmethod
    def open(directory: str | Path) -> Checkpoint:
        """Open and check a directory; no weights are read beyond a sample.

        Raises:
            CheckpointError: missing directory, config, shard or tensor, or one that the system refuses; truncated or
                corrupt shard; wrong shape; unknown model_type, activation or quantisation.
        """
        path = Path(directory)
        try:
            if not path.is_dir():
                raise CheckpointError(f"{path}: no such directory")
            config = ModelConfig(path / "config.json")
            return Checkpoint(Shards(path), config)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error

    def close(self) -> None:
        """Unmap the files."""
        self._shards.close()

    def stacks(
        self, num: int, dtype: torch.dtype, device: str | torch.device, *, widen: bool = False
    ) -> tuple[Stack, Stack]:
        """Room for the two matrices of `num` experts of one layer, gate rows before up rows.

        Args:
            num: how many.
            dtype: of float weights and of biases.
            device: "meta" for sizes alone.
            widen: float where weights are quantised; else these have their own format.
        """
        format, parts = FLOAT if widen else self._format, len(self._names.naming.first)
        _, hidden, inner = self._shape
        return (
            Stack.empty(format, (num, self._halves * inner, hidden), dtype, device, bias=self._bias, parts=parts),
            Stack.empty(format, (num, hidden, inner), dtype, device, bias=self._bias),
        )

    def read_expert(self, layer: int, expert: int, first: Stack, down: Stack) -> None:
        """Copy one expert's weights out of the mapped files; they become floats where the stacks are float.

        Args:
            layer, expert: which; the layer's number in the model, the logical expert id.
            first, down: one expert's part of `stacks`, written.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        names, index = self._names, expert if self._names.naming.stacked else None
        of_first = names.first(layer, expert)
        for part, name in enumerate(of_first):
            rows = first.rows // len(of_first)
            self._read(name, index, first, slice(part * rows, (part + 1) * rows), part, split=self._alternates)
        self._read(names.down(layer, expert), index, down, slice(None), 0, split=False)

    def digest(self, layer: int, expert: int) -> int:
        """64 bits of an expert's place, the CRC-32 of all its stored bytes, and the fingerprint. Any thread; its bytes
        are read once.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        found = self._digests.get((layer, expert))
        if found is None:
            index, crc = expert if self._names.naming.stacked else None, 0
            for matrix in (*self._names.first(layer, expert), self._names.down(layer, expert)):
                for name in self._parts(matrix):
                    stored = self._shards.read(name, index).reshape(-1)
                    crc = zlib.crc32(stored.view(torch.uint8).numpy().data, crc)
            text = f"{self.spec.fingerprint} {layer} {expert} {crc}"
            found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
            self._digests[layer, expert] = found
        return found

    @property
    def is_read(self) -> bool:
        """Whether the digests of all experts are known."""
        return len(self._digests) == len(self.spec.moe_layers) * self.spec.num_experts

    def _parts(self, matrix: str) -> Iterator[str]:
        """Names of the tensors of a matrix: its weights, scales and biases."""
        yield matrix + self._data_suffix
        if self._format.kind != "float":
            yield matrix + self._format.suffix
        if self._bias:
            yield f"{matrix}_bias"

    def _read(self, name: str, index: int | None, into: Stack, rows: slice, part: int, *, split: bool) -> None:
        """One matrix into rows of `into`. split: its rows alternate between gate and up."""
        weight = self._shards.read(name + self._data_suffix, index)
        scales = self._shards.read(name + self._format.suffix, index) if self._format.kind != "float" else None
        if self._format.kind == "mxfp4":
            weight = weight.flatten(1)
        if self._transposed:
            weight = weight.t()
        if into.format.kind == "float":
            weight = self._as_float(weight, scales, into.data.dtype)
        elif scales is not None and into.scales is not None:
            into_scales = into.scales[part] if into.format.kind == "fp8" else into.scales[rows]
            into_scales.copy_(_gate_first(scales, split).view_as(into_scales))
        into.data[rows].copy_(_gate_first(weight, split))
        if into.bias is not None:
            into.bias[rows].copy_(_gate_first(self._shards.read(f"{name}_bias", index), split))

    def _as_float(self, weight: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if scales is None:
            return weight
        if self._format.kind == "mxfp4":
            return from_mxfp4(
                weight, scales, torch.empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.float32, device="cpu")
            )
        block = tuple(size or whole for size, whole in zip(self._format.block, weight.shape, strict=True))
        grid = scales.float().view(self._format.grid(*weight.shape))
        return from_fp8(
            weight, grid, (block[0], block[1]), torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        ).to(dtype)

    @property
    def _data_suffix(self) -> str:
        return "_blocks" if self._format.kind == "mxfp4" else ""

    @property
    def _alternates(self) -> bool:
        """Rows of gate and up alternate in the tensor that holds both."""
        naming = self._names.naming
        return naming.interleaved or (self._config.family.interleaved and len(naming.first) == 1)

    def _find_format(self) -> tuple[torch.dtype, Format]:
        """dtype of the first expert tensor, and the format of all of them."""
        name, format = self._names.first(self._names.layers[0], 0)[0], self._config.quantised()
        if f"{name}_blocks" in self._shards:
            return torch.uint8, Format("mxfp4", suffix="_scales")
        dtype, _ = self._shards.describe(name)
        if dtype is not torch.float8_e4m3fn:
            return dtype, FLOAT
        if format.kind != "fp8":
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected {format}, got fp8")
        if self._alternates and format.block[0] > 1:
            raise CheckpointError(f"{self._shards.file(name)}: {name}: gate and up alternate within blocks of {format}")
        return dtype, format

    def _is_transposed(self) -> bool:
        """Stacked float tensors are [E, H, 2I] and [E, I, H]; where H = I, by family."""
        if not self._names.naming.stacked or self._format.kind != "float":
            return False
        num_experts, hidden, inner = self._shape
        if hidden == inner:
            return self._config.family.transposed
        name = self._names.down(self._names.layers[0], 0)
        return self._shards.describe(name)[1] == (num_experts, inner, hidden)

    def _check_tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        num_experts, hidden, inner = self._shape
        names, stacked = self._names, self._names.naming.stacked
        rows = self._halves * inner // len(names.naming.first)
        for layer in names.layers:
            for expert in range(1 if stacked else num_experts):
                for name in names.first(layer, expert):
                    yield from self._check_tensor(name, rows, hidden)
                yield from self._check_tensor(names.down(layer, expert), hidden, inner)

    def _check_tensor(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        stack, format = self._shape[:1] if self._names.naming.stacked else (), self._format
        expected = {
            "float": (columns, rows) if self._transposed else (rows, columns),
            "fp8": (rows, columns),
            "mxfp4": (rows, columns // MX_BLOCK, MX_BLOCK // 2),
        }[format.kind]
        data = name + self._data_suffix
        if format.kind == "mxfp4" and columns % MX_BLOCK:
            where = self._shards.file(data)
            raise CheckpointError(f"{where}: {data}: expected a multiple of {MX_BLOCK} columns in mxfp4, got {columns}")
        dtype = self._check_shape(data, (*stack, *expected))
        self._check_dtype(data, _DATA[format.kind], f"{format} as in other experts")
        yield data, dtype, expected
        if format.kind != "float":
            grid = format.grid(rows, columns) if format.kind == "fp8" else (rows, columns // MX_BLOCK)
            self._check_scales(name + format.suffix, (*stack, *grid))
        if self._bias:
            self._check_shape(f"{name}_bias", (*stack, rows))
            self._check_dtype(f"{name}_bias", _FLOATS)

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> torch.dtype:
        dtype, shape = self._shards.describe(name)
        if shape != expected:
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected {list(expected)}, got {list(shape)}")
        return dtype

    def _check_dtype(self, name: str, expected: Sequence[torch.dtype], words: str = "") -> None:
        dtype, _ = self._shards.describe(name)
        if dtype not in expected:
            words = words or f"one of {', '.join(map(str, expected))}"
            raise CheckpointError(f"{self._shards.file(name)}: {name}: expected {words}, got {dtype}")

    def _check_scales(self, name: str, expected: tuple[int, ...]) -> None:
        """A scale of a whole tensor may have fewer dimensions."""
        self._check_dtype(name, _SCALES[self._format.kind])
        fewer = (expected[:-1], expected[:-2]) if self._format.block == (0, 0) and self._format.kind == "fp8" else ()
        if self._shards.describe(name)[1] not in fewer:
            self._check_shape(name, expected)

    def _fingerprint(self, fields: dict[str, Any], tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> str:
        digest = hashlib.sha256(json.dumps({key: str(value) for key, value in sorted(fields.items())}).encode())
        for tensor in tensors:
            digest.update(repr(tensor).encode())
        for sample in self._shards.samples(self._sampled(), _SAMPLE_BYTES):
            digest.update(sample)
        return digest.hexdigest()[:32]

    def _sampled(self) -> Iterator[tuple[str, int | None]]:
        """Of each expert one matrix, another one in the next layer and expert, and its scales."""
        for layer in self._names.layers:
            for expert in range(self._shape[0]):
                names = (*self._names.first(layer, expert), self._names.down(layer, expert))
                name, index = names[(layer + expert) % len(names)], expert if self._names.naming.stacked else None
                yield name + self._data_suffix, index
                if self._format.kind != "float":
                    yield name + self._format.suffix, index


def _gate_first(tensor: torch.Tensor, alternating: bool) -> torch.Tensor:
    """[2I, ...] with alternating rows -> all gate rows, then all up rows."""
    return torch.cat([tensor[::2], tensor[1::2]]) if alternating else tensor
