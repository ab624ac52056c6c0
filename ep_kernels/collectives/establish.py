"""How ranks find out, together, whether their transport can serve them, or torch.distributed has to.

Each step that may fail on one rank alone is followed by an exchange of who failed, so all ranks take the same way.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_kernels import bringup
from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import CollectiveCapabilities
from ep_kernels.collectives.fallback import TorchCollectives
from ep_kernels.errors import TransportError
from ep_kernels.transports import collective_base
from ep_kernels.transports.collective_base import CollectiveTransport


def establish(config: CollectiveConfig) -> CollectiveTransport:
    """A transport whose ranks have met. Collective.

    Raises:
        ConfigError: a field that differs between ranks, or that this transport cannot do.
        TransportError: a rank did not come; or the transport cannot serve and there is nothing to fall back on.
    """
    transport, unable = _attempt(lambda: collective_base.create(config), None)
    try:
        with torch.inference_mode(False):  # what is kept is written later, from threads that are in no such mode
            reason = _bring_up(config, transport, unable)
    except BaseException:
        if transport is not None:
            transport.close()
        raise
    if not reason:
        return transport  # type: ignore[no-any-return]
    if transport is not None:
        transport.close()
    return _fallen_back(config, "" if transport is None else transport.capabilities.device_type, reason)


def _bring_up(config: CollectiveConfig, transport: CollectiveTransport | None, unable: str) -> str:
    """Why the transport cannot serve, the same on all ranks; "" where it can."""
    ticket = b""
    if transport is not None:
        ticket, unable = _attempt(transport.allocate, b"")
    tickets, reason = _meet(config, transport, ticket, unable)
    if reason or transport is None:
        return reason
    reason = _agree(config, _attempt(lambda: transport.import_regions(tickets), None)[1], config.timeout_s)
    # A rank that cannot even begin the barrier is here a whole deadline before those that wait for it there.
    return reason or _agree(config, _attempt(transport.barrier, None)[1], 2 * config.timeout_s)


def process_group_of(group: Any) -> Any:
    """The group's torch process group; None where it has none."""
    return getattr(group, "process_group", None)


def warn_once(warned: list[str], reason: str) -> None:
    """Say once, for one object, why torch.distributed does the work; "": nothing is to be said. `warned`: what was."""
    if reason and not warned:
        warned.append(reason)
        warnings.warn(f"collectives by torch.distributed: {reason}", RuntimeWarning, stacklevel=4)


def _attempt(call: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """(what it gives, "") or (otherwise, why not)."""
    try:
        return call(), ""
    except TransportError as error:
        return otherwise, str(error)


def _meet(
    config: CollectiveConfig, transport: CollectiveTransport | None, ticket: bytes, unable: str
) -> tuple[Sequence[bytes], str]:
    """Everybody's ticket, and why the transport cannot serve."""
    abi = "" if transport is None else _abi(transport.capabilities)
    fields = config.shared_fields()
    if config.fallback:  # who hands an operation over must not be alone
        fields["group"] = "no process group" if process_group_of(config.group) is None else "a process group"
    mine = bringup.Hello(abi, config.group.epoch, fields, None, ticket, unable)
    hellos = bringup.exchange_hellos(config.group, config.timeout_s, mine)
    return [hello.ticket for hello in hellos], _first([hello.unable for hello in hellos])


def _abi(can: CollectiveCapabilities) -> str:
    """Of the region and of what algorithms are chosen by, which another version may have other limits for."""
    return f"{can.abi}-{zlib.crc32(repr(can).encode()):08x}"


def _agree(config: CollectiveConfig, why: str, timeout_s: float) -> str:
    answers = config.group.all_gather(why.encode(), timeout_s)
    return _first([answer.decode(errors="replace") for answer in answers])


def _first(reasons: Sequence[str]) -> str:
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")


def _fallen_back(config: CollectiveConfig, device_type: str, reason: str) -> CollectiveTransport:
    if not config.fallback:
        raise TransportError(f"{reason}; set fallback=True to let torch.distributed serve this group")
    if process_group_of(config.group) is None:
        raise TransportError(f"{reason}; give a TorchGroup to let torch.distributed serve this group")
    return TorchCollectives(config.group, device_type, reason)
