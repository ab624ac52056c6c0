"""LL is refused where GPUs are joined by PCIe alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ep_kernels.config import MoEConfig
from ep_kernels.errors import TransportError
from ep_kernels.topology import Gpu, Peer, nvml
from ep_kernels.transports.nvlink.memory import links, ticket
from ep_kernels.transports.nvlink.memory.ticket import Host, RegionTicket
from ep_kernels.types import Mode
from tests.gpu.loopback_group import LoopGroup

PLACES = [links.pci_number(0, bus, 0) for bus in (0x1B, 0x3B, 0x5C)]


def gpus(statuses: dict[tuple[int, int], str]) -> tuple[Gpu, ...]:
    """Three GPUs; of pairs that are not named, NVML says ok."""

    def peers(index: int) -> tuple[Peer, ...]:
        others = [other for other in range(3) if other != index]
        pairs = {other: (min(index, other), max(index, other)) for other in others}
        return tuple(Peer(other, statuses.get(pairs[other], "ok"), "ok", "ok", "ok") for other in others)

    addresses = ("0000:1b:00.0", "0000:3b:00.0", "0000:5c:00.0")
    return tuple(Gpu(i, f"GPU-{i}", "any", 1, address, 0, peers=peers(i)) for i, address in enumerate(addresses))


def test_nvlink_between_all_and_ranks_of_one_gpu_are_taken() -> None:
    links.require_nvlink(PLACES, gpus({}))
    links.require_nvlink([PLACES[0], PLACES[0]], gpus({(0, 1): "not supported"}))


def test_a_pair_without_nvlink_is_named() -> None:
    with pytest.raises(TransportError, match=r"rank 1 .0000:3b:00\.0. and rank 2 .0000:5c:00\.0. .NVML: not supported"):
        links.require_nvlink(PLACES, gpus({(1, 2): "not supported"}))


@pytest.mark.parametrize("known", [(), gpus({(0, 2): "unknown"})])
def test_what_nvml_does_not_know_is_allowed_with_a_warning(
    known: tuple[Gpu, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        links.require_nvlink(PLACES, known)
    assert "ranks 0 and 2 is unknown" in caplog.text


def published(place: int, host: str) -> bytes:
    return RegionTicket("abi", "posix_fd", 1, place, b"", b"", Host(host)).encode()


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"mode": Mode.LL}, True),
        ({"mode": Mode.AUTO, "ll_max_tokens": 64}, True),
        ({"mode": Mode.AUTO, "ll_max_tokens": 0}, False),
        ({"mode": Mode.HT}, False),
    ],
)
def test_only_configurations_that_may_run_ll_are_refused(
    fields: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {
        "num_experts": 4,
        "hidden_size": 256,
        "topk": 2,
        "max_tokens_per_rank": 16,
        "transport": "nvlink",
    }
    config = MoEConfig(group=LoopGroup(0, 2), **shape, **fields)
    tickets = [published(place, "here") for place in PLACES[:2]]
    monkeypatch.setattr(nvml, "read", lambda sys: nvml.Found(gpus=gpus({(0, 1): "chipset not supported"})))
    if refused:
        with pytest.raises(TransportError, match="got none between rank 0"):
            links.check(config, tickets)
    else:
        links.check(config, tickets)
    links.check(config, [tickets[0], published(PLACES[1], "elsewhere")])


def test_tickets_come_back_as_they_were() -> None:
    given = RegionTicket("abi", "fabric", 4096, PLACES[0], b"nonce\0name", bytes(range(256)), Host("a"))
    assert ticket.read(0, given.encode()) == given
    with pytest.raises(TransportError, match="rank 3 has a ticket that cannot be read"):
        ticket.read(3, b"nope")
