"""Which tensors of a checkpoint are experts: the one of `families.NAMINGS` that its names follow."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from crossdock.worker.families import PREFIXES, Family, Naming, namings
from crossdock.worker.shards import CheckpointError

_IN_A_LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>[0-9]{1,9})\.(?P<rest>.*)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_SUFFIXES = ("", "_blocks")
"""Suffixes of a matrix' name: none, or MXFP4's."""
_PACKED = ("_packed", "qweight")
"""What int4 formats call a matrix instead."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of all experts.

    Attributes:
        prefix: before `layers.{number}.`.
        naming: after it.
        layers: numbers of the layers that have experts, ascending.
    """

    prefix: str
    naming: Naming
    layers: tuple[int, ...]

    @staticmethod
    def find(names: Iterable[str], family: Family, num_layers: int, dense: Collection[int], where: object) -> Names:
        """dense: layers that need not be there. Raises CheckpointError: no layer below `num_layers` has experts under a
        known name, or one has no tensor."""
        found = _by_kind(names, num_layers)
        for prefix in PREFIXES:
            for naming in namings(family):
                kinds = [(prefix, name + end) for name in (*naming.first, naming.down) for end in _SUFFIXES]
                layers = set().union(*(found.get(kind, ()) for kind in kinds))
                if layers:
                    _check_all_there(found, prefix, set(range(num_layers)) - set(dense), where)
                    return Names(prefix, naming, tuple(sorted(layers)))
        packed = next((rest for _, rest in found if rest.endswith(_PACKED)), None)
        if packed is not None:
            raise CheckpointError(f"{where}: {packed}: int4 weights are not computed here; {HINT}")
        some = [f"{PREFIXES[0]}layers.N.{name}" for naming in namings(family)[:3] for name in naming.first]
        raise CheckpointError(f"{where}: none of the {num_layers} layers has experts; looked for {some} and others")

    def first(self, layer: int, expert: int) -> tuple[str, ...]:
        """Names of gate and up, or of the tensor that holds both."""
        return tuple(self._named(name, layer, expert) for name in self.naming.first)

    def down(self, layer: int, expert: int) -> str:
        """Name of the second matrix."""
        return self._named(self.naming.down, layer, expert)

    def _named(self, name: str, layer: int, expert: int) -> str:
        return f"{self.prefix}layers.{layer}.{name.replace('{e}', str(expert))}"


HINT = "serve this model's bfloat16, fp8 or MXFP4 checkpoint, or write one with the weights dequantised"
"""What to do about weights that are not computed here."""


def _check_all_there(found: dict[tuple[str, str], set[int]], prefix: str, wanted: set[int], where: object) -> None:
    """A layer without experts is dense; one without any tensor is missing, unless config.json names it as dense."""
    there = set().union(*(layers for (before, _), layers in found.items() if before == prefix))
    missing = sorted(wanted - there)
    if missing:
        raise CheckpointError(f"{where}: layer {missing[0]} has no tensors, and config.json does not name it as dense")


def _by_kind(names: Iterable[str], num_layers: int) -> dict[tuple[str, str], set[int]]:
    """(prefix, name after the layer with {e} for the expert) -> layers below `num_layers` that have it."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _IN_A_LAYER.fullmatch(name)
        if match and int(match["layer"]) < num_layers:
            kind = match["prefix"], _EXPERT.sub("experts.{e}.", match["rest"])
            found.setdefault(kind, set()).add(int(match["layer"]))
    return found
