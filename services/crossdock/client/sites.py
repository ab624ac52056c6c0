"""Finds the experts modules of a model: those whose forward is (hidden_states, top_k_index, top_k_weights), or the same
by other names, under a numbered layer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from crossdock.client.errors import ModelMismatch
from crossdock.client.remote_experts import RemoteExperts

SIGNATURE = ("hidden_states", "top_k_index", "top_k_weights")
"""Parameters of an experts module's forward."""
_ROUTED = (SIGNATURE, ("hidden_states", "router_indices", "routing_weights"))
_WEIGHTED = ("hidden_states",)
"""Parameters of `forward` of a module that is given all experts' rows; it has stacked matrices."""


@dataclass(frozen=True, slots=True)
class Site:
    """An experts module of a model: `getattr(parent, name) is module`."""

    layer: int
    parent: nn.Module
    name: str
    module: nn.Module

    @property
    def weighted(self) -> bool:
        """Whether its rows come weighted, for all experts: [E * T, H] -> [E * T, H]."""
        return _parameters(self.module) == _WEIGHTED

    def local(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the module makes of [T, H], [T, K], [T, K] -> [T, H]."""
        if not self.weighted:
            return self.module(x, ids, weights.to(x.dtype))  # type: ignore[no-any-return]
        num_experts = matrix(self.module, "down_proj").shape[0]
        dense = weights.new_zeros(x.shape[0], num_experts).scatter_(1, ids, weights)
        rows = dense.t()[..., None].to(x.dtype) * x
        return self.module(rows.flatten(0, 1)).view_as(rows).sum(0)  # type: ignore[no-any-return]


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def matrix(module: nn.Module, name: str) -> torch.Tensor:
    """A stacked matrix [E, ., .] of an experts module; an empty one if it has none."""
    found = getattr(module, name, None)
    if isinstance(found, torch.Tensor) and found.ndim == 3:
        return found
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _is_experts(module: nn.Module) -> bool:
    parameters = _parameters(module)
    return parameters in _ROUTED or (parameters == _WEIGHTED and matrix(module, "down_proj").ndim == 3)


def find_experts(model: nn.Module) -> list[Site]:
    """The experts modules of a model, by layer.

    Raises:
        ModelMismatch: two of them under one layer number, remote ones, or ones that are wrapped or parametrized.
    """
    sites: dict[int, Site] = {}
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, RemoteExperts):
            raise ModelMismatch(module.reason)
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", path)
        if not numbers or not _is_experts(module):
            continue
        above, _, name = path.rpartition(".")
        layer, parent = int(numbers[-1]), model.get_submodule(above)
        first = paths.setdefault(layer, path)
        changed = above if above == first or _takes_anything(parent) else _changed_within(module, path)
        if changed:
            raise ModelMismatch(
                f"layer {layer}: expected plain experts, got ones with an adapter, a parametrization or a wrapper, at "
                f"{changed}: merge it into the weights, save the model, and `crossdock load` that; or unwrap them"
            )
        if path != first:
            raise ModelMismatch(
                f"layer {layer}: expected one experts module, got {first} and {path}: attach the part that is served, "
                f"as model.{_part(first, path)}"
            )
        sites[layer] = Site(layer, parent, name, module)
    return [sites[layer] for layer in sorted(sites)]


def _takes_anything(module: nn.Module) -> bool:
    """Whether this passes its arguments on, whatever they are, as adapters and wrappers do."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:  # a container
        return False
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _changed_within(experts: nn.Module, path: str) -> str:
    """Path of the first module within that is parametrized or wrapped; "": none is."""
    modules: Iterator[tuple[str, nn.Module]] = experts.named_modules(prefix=path)
    return next((name for name, module in modules if is_parametrized(module) or _takes_anything(module)), "")


def _part(first: str, second: str) -> str:
    """The part of the model that has the first of two modules and not the second."""
    names = first.split(".")
    shared = [a == b for a, b in zip(names, second.split("."), strict=False)].index(False)
    return ".".join(names[: shared + 1])
