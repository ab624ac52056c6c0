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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.model_config import ModelConfig
from crossdock.worker.checkpoints.names import find_names
from crossdock.worker.checkpoints.shards import CheckpointError, Shards
from crossdock.worker.checkpoints.stored_layer import LayerSizes, StoredLayer
from crossdock.worker.checkpoints.weights import Format, Stack

__all__ = ["Checkpoint", "CheckpointError", "ModelSpec"]

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
        gating: what an expert computes between its products.
        bias: both products add one.
        formats: of the experts' matrices, by layer as in moe_layers.
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
    formats: tuple[Format, ...]
    dtype: torch.dtype
    fingerprint: str


class Checkpoint:
    """An opened checkpoint directory. Use `Checkpoint.open`; one thread at a time."""

    def __init__(self, shards: Shards, config: ModelConfig) -> None:
        self._shards, self._config = shards, config
        fields = config.fields()
        self._layers = self._find_layers(fields)
        self._num_experts: int = fields["num_experts"]
        fields["formats"] = tuple(layer.format for layer in self._layers.values())
        fields["dtype"] = config.compute_dtype(next(iter(self._layers.values())).dtype)
        tensors = [tensor for layer in self._layers.values() for tensor in layer.check()]
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
        self._shards.close()

    def stacks(
        self, layer: int, num: int, dtype: torch.dtype, device: str | torch.device, *, widen: bool = False
    ) -> tuple[Stack, Stack]:
        """Room for the two matrices of `num` experts of one layer, gate rows before up rows.

        Args:
            layer: number of the layer in the model.
            num: how many.
            dtype: of float weights and of biases.
            device: "meta" for sizes alone.
            widen: float where weights are quantised; else these have their own format.
        """
        return self._layers[layer].stacks(num, dtype, device, widen=widen)

    def read_expert(self, layer: int, expert: int, first: Stack, down: Stack) -> None:
        """Copy one expert's weights out of the mapped files; they become floats where the stacks are float.

        Args:
            layer, expert: which; the layer's number in the model, the logical expert id.
            first, down: one expert's part of `stacks`, written.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        self._layers[layer].read_expert(expert, first, down)

    def digest(self, layer: int, expert: int) -> int:
        """64 bits of an expert's place, the CRC-32 of all its stored bytes, and the fingerprint. Any thread; its bytes
        are read once.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        found = self._digests.get((layer, expert))
        if found is None:
            crc = 0
            for name, index in self._layers[layer].stored(expert):
                stored = self._shards.read(name, index).reshape(-1)
                crc = zlib.crc32(stored.view(torch.uint8).numpy().data, crc)
            text = f"{self.spec.fingerprint} {layer} {expert} {crc}"
            found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
            self._digests[layer, expert] = found
        return found

    def known_digest(self, layer: int, expert: int) -> int:
        """The digest, without reading anything; 0: it is not known."""
        return self._digests.get((layer, expert), 0)

    def learn_digest(self, layer: int, expert: int, digest: int) -> None:
        """Of an expert whose weights another worker gave, which has read its bytes."""
        self._digests.setdefault((layer, expert), digest)

    @property
    def is_read(self) -> bool:
        """Whether the digests of all experts are known."""
        return len(self._digests) == len(self.spec.moe_layers) * self.spec.num_experts

    def _find_layers(self, fields: dict[str, Any]) -> dict[int, StoredLayer]:
        """By layer; adds `moe_layers` to the fields."""
        config, family, shards = self._config, self._config.family, self._shards
        wanted = config.moe_layers()
        names = find_names(shards, family, wanted, fields["num_layers"], config.path.parent)
        fields["moe_layers"] = tuple(names)
        shape = fields["num_experts"], fields["hidden_size"], fields["intermediate_size"]
        sizes, fp8 = LayerSizes(*shape, fields["gating"].halves, fields["bias"]), config.fp8_formats()
        turned = {"alternates": family.interleaved, "transposed": family.transposed, "one_less": config.one_less()}
        return {layer: StoredLayer(shards, each, sizes, fp8, **turned) for layer, each in names.items()}

    def _fingerprint(self, fields: dict[str, Any], tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> str:
        digest = hashlib.sha256(json.dumps({key: str(value) for key, value in sorted(fields.items())}).encode())
        for tensor in tensors:
            digest.update(repr(tensor).encode())
        for sample in self._shards.samples(self._sampled(), _SAMPLE_BYTES):
            digest.update(sample)
        return digest.hexdigest()[:32]

    def _sampled(self) -> Iterator[tuple[str, int | None]]:
        """Of each expert one matrix, another one in the next layer and expert, and its scales."""
        for number, layer in self._layers.items():
            for expert in range(self._num_experts):
                yield from layer.sampled(expert, number + expert)
