"""Static facts about each transport: whether it needs GPUs, by which links it moves rows, and how far.

They come from `transport.toml` in each folder of `ep_kernels/transports`, for code that runs without torch: the control
plane, `crossdock up`, the chart. Capabilities of a loaded transport are in `ep_kernels.types.Capabilities`. A new
transport needs only its folder: there is no table to edit.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GPU_LINKS, MEMORY = "gpu links", "memory"
"""What joins two ranks, the best first: NVLink; memory of one host."""
LINKS = (GPU_LINKS, MEMORY)
SOCKETS = "sockets"
"""What joins two hosts in a transport over MEMORY with `cross_host`, if `worker.network` is set."""
CPU_RANKS = 4
"""Default number of ranks on a host without GPUs."""
FILE_NAME = "transport.toml"


@dataclass(frozen=True, slots=True)
class Expected:
    """Minimum performance of a healthy host.

    Attributes:
        pair_us: of one token, dispatch and combine together.
        share_of_links: of what a GPU's links carry on paper, in a dispatch of many tokens; 0 = not judged.
        gbps: gigabytes per second that leave a rank in that dispatch, where there are no links to compare with.
    """

    pair_us: float
    share_of_links: float = 0.0
    gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """One transport; the fields of its `transport.toml`.

    Attributes:
        name: of its folder.
        device_type: torch device type of payload tensors, as in `Capabilities`.
        over: by which it moves rows, one of LINKS.
        cross_host: ranks may live on several hosts, given a network. `Capabilities` says whether one is given.
        max_ranks: of a group, over all hosts.
        preference: of those that a host can run, "auto" takes the one with the smallest number.
        largest_step: tokens per rank up to which `crossdock tune` measures.
        expected: reference of `crossdock doctor`.
        oldest_gpu: major compute capability from which on its kernels run; 0 = any.
        about: a remark about the links, for people.
    """

    name: str
    device_type: str
    over: str
    cross_host: bool
    max_ranks: int
    preference: int
    largest_step: int
    expected: Expected
    oldest_gpu: int = 0
    about: str = ""

    @property
    def needs_gpu(self) -> bool:
        return self.device_type != "cpu"

    def default_world(self, num_gpus: int, without: int = CPU_RANKS) -> int:
        """Default number of ranks: one for each GPU here, or `without`."""
        return num_gpus if self.needs_gpu else without


def names() -> list[str]:
    """Names of the transports installed here. Reads no file."""
    return sorted(path.parent.name for path in _files())


@cache
def installed() -> dict[str, TransportFacts]:
    """Transports installed here, by name, in the order of preference."""
    found = [_parsed(path.parent.name, tomllib.loads(path.read_text(encoding="utf-8"))) for path in _files()]
    return {facts.name: facts for facts in sorted(found, key=lambda facts: (facts.preference, facts.name))}


def needs_gpu(name: str) -> bool:
    """Whether a transport needs GPUs. One that is not installed here counts as needing none."""
    facts = installed().get(name)
    return facts is not None and facts.needs_gpu


def cross_host_names() -> list[str]:
    """Names of the transports installed here whose ranks may run on several hosts, given a network."""
    return [facts.name for facts in installed().values() if facts.cross_host]


def automatic(num_gpus: int) -> TransportFacts:
    """The transport of "auto" on a host with `num_gpus` connected GPUs. Raises LookupError if none is installed."""
    for facts in installed().values():
        if not facts.needs_gpu or num_gpus > 1:
            return facts
    raise LookupError("transports: expected one that needs no GPU, found none installed")


def of_device(device_type: str) -> TransportFacts:
    """The preferred one whose payload tensors are on such a device. Raises LookupError."""
    for facts in installed().values():
        if facts.device_type == device_type:
            return facts
    raise LookupError(f"transports: expected one for tensors on {device_type!r}, found none installed")


def _files() -> list[Path]:
    """`ep_kernels` is found, not imported: that would load torch."""
    spec = find_spec("ep_kernels")
    folders = (spec.submodule_search_locations if spec else None) or []
    return [path for folder in folders for path in Path(folder).glob(f"transports/*/{FILE_NAME}")]


def _parsed(name: str, said: dict[str, Any]) -> TransportFacts:
    """Raises ValueError naming the field."""
    known = {field.name for field in fields(TransportFacts)} - {"name"}
    if unknown := sorted(set(said) - known):
        raise ValueError(f"{name}/{FILE_NAME}: expected fields of {sorted(known)}, got {unknown}")
    if said.get("over") not in LINKS:
        raise ValueError(f"{name}/{FILE_NAME}: over: expected one of {LINKS}, got {said.get('over')!r}")
    try:
        return TransportFacts(name=name, **{**said, "expected": Expected(**said["expected"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}/{FILE_NAME}: {error}") from None
