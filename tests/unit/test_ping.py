"""The loop-back ping: real bytes through ring, proxy and provider, and a clear error where they do not get through."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import torch

from crossdock.common.settings import WorkerNetworkConfig
from crossdock.doctor import ping as doctor_ping
from crossdock.doctor import trial
from crossdock.doctor.findings import Level
from crossdock.doctor.ping import main
from ep_kernels import EpError, TransportError
from ep_kernels.network import NetworkConfig, providers
from ep_kernels.transports.nvlink.network import gpu_direct


@pytest.mark.parametrize("provider", ["tcp", "shuffle(tcp)"])
def test_a_ping_beside_a_port_that_is_taken(provider: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = NetworkConfig(provider=provider, listen=listen, advertise="198.51.100.7", lanes=2)
        came = providers.ping(config, rounds=20)
    assert (came.provider, came.address) == (provider, "127.0.0.1")
    assert 0 < came.median_us <= came.most_us


def test_what_cannot_be_pinged() -> None:
    with pytest.raises(TransportError, match=r"network\.listen: cannot listen on 198\.51\.100\.7:0"):
        providers.ping(NetworkConfig(listen="198.51.100.7:0"))
    with pytest.raises(ValueError, match="num_bytes: expected 1 to 4096, got 5000"):
        providers.ping(NetworkConfig(), num_bytes=5000)


def test_dropped_connections_end_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_MESSAGE_S", 0.5)
    with pytest.raises(EpError):
        providers.ping(NetworkConfig(provider="shuffle(tcp)", listen="127.0.0.1:0", drop_after=3, seed=1))


def test_the_doctor_pings_in_a_process_of_its_own() -> None:
    assert trial.judge_ping(trial.run_ping(WorkerNetworkConfig(listen="127.0.0.1:0"))).level is Level.OK
    refused = trial.judge_ping(main(json.dumps({"listen": "198.51.100.7:0"})))
    assert (refused.check, refused.level) == ("network-ping", Level.FAIL)
    assert "cannot listen on 198.51.100.7:0" in refused.what


@pytest.mark.parametrize("way", ["auto", "dma-buf"])
def test_the_doctor_says_where_boxes_lie(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider's own ping has passed; of this GPU the driver says no."""
    monkeypatch.setattr(doctor_ping, "ping", lambda _: providers.Ping("verbs", "10.0.0.1", 256, 5.0, 9.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor_ping, "boxes", lambda _, config, __: str(gpu_direct.probe(config, Refuses())))
    answer = main(json.dumps({"provider": "verbs", "gpu_direct": way}))
    assert trial.judge_ping(answer).level is Level.OK
    (found,) = trial.judge_boxes(answer)
    assert (found.check, found.level) == ("network-boxes", Level.OK if way == "auto" else Level.FAIL)
    expected = (
        "boxes in pinned host memory: no order" if way == "auto" else "gpu_direct dma-buf cannot be had: no order"
    )
    assert expected in found.what
    assert list(trial.judge_boxes(main(json.dumps({"provider": "tcp"})))) == []


class Refuses:
    """A GPU that NICs do not reach."""

    def order(self) -> Any:
        """See `gpu_direct.GpuMemory`."""
        raise TransportError("no order")

    def boxes(self, way: Any, flush: Any) -> Any:
        """See `gpu_direct.GpuMemory`."""
