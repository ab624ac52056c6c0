"""Which tensors of a checkpoint are experts: for each layer the one of `families.namings` that its names follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crossdock.worker.checkpoints.families import PREFIXES, Family, Naming, namings
from crossdock.worker.checkpoints.packings import PACKINGS, named
from crossdock.worker.checkpoints.shards import CheckpointError

_IN_A_LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>[0-9]{1,9})\.(?P<rest>.*)")
_OF_EXPERTS = re.compile(r"\bexperts\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
NOT_COMPUTED = {"_weight_scale_2": "NVFP4 of ModelOpt in one tensor for all experts", ".absmax": "bitsandbytes"}
"""Formats by the end of a tensor's name."""
HINT = "serve this model in another format of docs/models.md, or write a checkpoint with the weights dequantised"
"""What to do about weights that are not computed here."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one layer's experts.

    Attributes:
        start: of each name, `layers.{number}.` included.
    """

    start: str
    naming: Naming

    def first(self, expert: int) -> tuple[str, ...]:
        """Names of gate and up, or of the tensor that holds both."""
        return tuple(self._named(name, expert) for name in self.naming.first)

    def down(self, expert: int) -> str:
        return self._named(self.naming.down, expert)

    def _named(self, name: str, expert: int) -> str:
        return f"{self.start}{name.replace('{e}', str(expert))}"


def find_names(
    names: Iterable[str], family: Family, layers: Sequence[int], num_layers: int, where: object
) -> dict[int, Names]:
    """The names of the experts, by layer.

    Args:
        family: whose namings are looked for.
        layers: those of `num_layers` that have experts according to config.json, ascending.
        where: named by errors.

    Raises:
        CheckpointError: one of them has no experts under a known name, or another one has some.
    """
    kinds, found = _by_layer(names), {}
    for prefix in PREFIXES:
        every = {layer: _names_of(kinds.get((prefix, layer), set()), family) for layer in range(num_layers)}
        found = {layer: Names(f"{prefix}layers.{layer}.", naming) for layer, naming in every.items() if naming}
        if found:
            break
    missing = next((layer for layer in layers if layer not in found), None)
    packed = [packed for (_, layer), rests in kinds.items() if layer == missing and (packed := packed_as(rests))]
    if packed:
        raise CheckpointError(f"{where}: experts of layer {missing} are {packed[0]}, not computed here: {HINT}")
    if not found:
        some = [f"{PREFIXES[0]}layers.N.{name}" for naming in namings(family)[:3] for name in naming.first]
        raise CheckpointError(f"{where}: none of the {num_layers} layers has experts; looked for {some} and others")
    if missing is not None:
        raise CheckpointError(f"{where}: layer {missing} has no experts, and config.json does not name it as dense")
    if extra := found.keys() - set(layers):
        raise CheckpointError(f"{where}: layer {min(extra)} has experts, and config.json names it as dense")
    return found


def _names_of(rests: set[str], family: Family) -> Naming | None:
    for naming in namings(family):
        if any(named(name, each.data) in rests for name in (*naming.first, naming.down) for each in PACKINGS):
            return naming
    return None


def packed_as(names: Iterable[str]) -> str:
    """In words, the format of experts' tensors among these names that is not computed here; "": there are none."""
    experts = [name for name in names if _OF_EXPERTS.search(name)]
    return next((words for end, words in NOT_COMPUTED.items() if any(name.endswith(end) for name in experts)), "")


def _by_layer(names: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """(prefix, layer) -> names after it, with {e} for the expert."""
    found: dict[tuple[str, int], set[str]] = {}
    for name in names:
        match = _IN_A_LAYER.fullmatch(name)
        if match:
            rest = _EXPERT.sub("experts.{e}.", match["rest"])
            found.setdefault((match["prefix"], int(match["layer"])), set()).add(rest)
    return found
