"""Which layers of a model have experts, as its config.json says. Reads the keys as `transformers` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Numbers of the layers with experts, ascending.

    Args:
        keys: of config.json, with the family's defaults.
        num_layers: decoder layers.

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
