"""How ranks find out, once, that they can work together: every rank says hello, and a mismatch is refused by name.

AUTO sizes its buffers by the crossover, so ranks that were given none say hello once more, before anything is
allocated: the lowest rank whose machine has measured one decides for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from ep_kernels import tuning
from ep_kernels.config import MoEConfig
from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.transports.base import Transport
from ep_kernels.types import Mode


class Hello(msgspec.Struct, frozen=True):
    """What each rank sends to all others at bring-up.

    Attributes:
        abi: hash of the region's byte map.
        epoch: membership counter of its group.
        fields: its configuration, field by field, as text.
        measured: AUTO's crossover as its machine has measured it; None: it has not, or AUTO is not used.
        ticket: how peers redeem its region; opaque. Empty where only the crossover is to be agreed on.
        unable: why this rank cannot have a region; "" where it can. Then there is no ABI to compare.
    """

    abi: str
    epoch: int
    fields: dict[str, str]
    measured: int | None
    ticket: bytes
    unable: str = ""


def settle(config: MoEConfig, transport: Transport) -> MoEConfig:
    """The configuration with AUTO's crossover in it, equal on all ranks; collective where the crossover was not given,
    and then raises what `meet` raises. Ranks that differ in whether they ask also differ in a field, so neither waits
    in vain."""
    if config.mode is not Mode.AUTO or config.ll_max_tokens is not None:
        return config
    found = tuning.recall(tuning.cache_dir(config.kernel_cache_dir), tuning.key_of(config, transport.device_name()))
    hellos = _exchange(config, transport, None if found is None else found.ll_max_tokens, b"")
    crossover = next((hello.measured for hello in hellos if hello.measured is not None), transport.ll_max_tokens())
    return msgspec.structs.replace(config, ll_max_tokens=crossover)


def meet(config: MoEConfig, transport: Transport, ticket: bytes) -> tuple[bytes, ...]:
    """Exchange hellos (collective); everybody's ticket in rank order. Raises ConfigError where a field differs,
    TransportError where the ABI does.

    Every rank is compared with rank 0, so that all ranks raise the same error.
    """
    return tuple(hello.ticket for hello in _exchange(config, transport, None, ticket))


def _exchange(config: MoEConfig, transport: Transport, measured: int | None, ticket: bytes) -> list[Hello]:
    mine = Hello(transport.capabilities.abi, config.group.epoch, fingerprint(config), measured, ticket)
    return exchange_hellos(config.group, config.timeout_s, mine)


def exchange_hellos(group: Any, timeout_s: float, mine: Hello) -> list[Hello]:
    """Everybody's hello in rank order (collective), compared as `meet` says."""
    answers = group.all_gather(msgspec.msgpack.encode(mine), timeout_s)
    if len(answers) != group.size:
        raise TransportError(f"bring-up: expected {group.size} hellos, got {len(answers)}")
    hellos = [_decode(rank, answer) for rank, answer in enumerate(answers)]
    for rank, other in enumerate(hellos):
        _compare(hellos[0], rank, other)
    return hellos


def check_capabilities(config: MoEConfig, transport: Transport) -> None:
    """Refuse what this transport cannot do, before anything is allocated."""
    can = transport.capabilities
    if config.dtype not in can.dtypes:
        raise ConfigError("dtype", f"one of {can.dtypes} with transport {config.transport!r}", config.dtype)
    if config.quantize not in can.quantize:
        raise ConfigError("quantize", f"one of {can.quantize} with transport {config.transport!r}", config.quantize)
    wanted = (Mode.LL, Mode.HT) if config.mode is Mode.AUTO else (config.mode,)
    for mode in wanted:
        if mode not in can.modes:
            raise ConfigError("mode", f"one of {can.modes} with transport {config.transport!r}", config.mode)


def fingerprint(config: MoEConfig) -> dict[str, str]:
    """Every field that must be equal on all ranks, defaults resolved, as text."""
    own = ("group", "kernel_cache_dir", "network", "absent_id")
    fields = {name: str(getattr(config, name)) for name in config.__struct_fields__ if name not in own}
    # in the order of declaration: what others derive from (num_experts) is named before them (expert_map)
    fields["network"] = "none" if config.network is None else f"provider {config.network.provider}"
    fields["layout"] = str(config.resolved_layout)
    fields["output_dtype"] = str(config.resolved_output_dtype)
    fields["combine_dtype"] = str(config.resolved_combine_dtype)
    fields["expert_map"] = hashlib.sha256(repr(config.resolved_expert_map).encode()).hexdigest()[:16]
    return fields


def _decode(rank: int, answer: bytes) -> Hello:
    try:
        return msgspec.msgpack.decode(answer, type=Hello)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransportError(f"bring-up: rank {rank} sent no hello that this version understands: {error}") from error


def _compare(first: Hello, rank: int, other: Hello) -> None:
    if first.abi != other.abi and not (first.unable or other.unable):
        raise TransportError(
            f"bring-up: region ABI {other.abi} of rank {rank} differs from {first.abi} of rank 0; "
            "install the same version of crossdock everywhere"
        )
    if first.epoch != other.epoch:
        raise TransportError(f"bring-up: rank {rank} is in epoch {other.epoch}, rank 0 in epoch {first.epoch}")
    for name in _differing(first.fields, other.fields):
        want, got = first.fields.get(name, "nothing"), other.fields.get(name, "nothing")
        raise ConfigError(name, f"{want} as on rank 0", f"{got} on rank {rank}")


def _differing(first: dict[str, str], other: dict[str, str]) -> Sequence[str]:
    return [name for name in first | other if first.get(name) != other.get(name)]
