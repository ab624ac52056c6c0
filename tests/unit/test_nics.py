"""The RDMA port and GID of each rank: nearest first, spread over equally near ones, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossdock.control.topology.discovery import join
from crossdock.doctor import rdma, reach
from crossdock.doctor.findings import Level
from crossdock.topo.facts import host_facts
from crossdock.worker.group import data_network
from ep_kernels import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.nics import best_gid, nic_of_gpus, nic_of_rank, resolved
from ep_kernels.topology import Gid, HostFacts, probe
from tests.machines import KINDS, gb200_tray, hgx_h100, no_gpu, pcie_box
from tests.machines.host import Host, PaperNic

ALLOWED = rdma.RdmaFacts(peermem=True, open_driver=False, locked_bytes=-1, ipc_lock=False)


class Rail(msgspec.Struct, frozen=True):
    """The fields of a network that decide about ports, of a provider that takes them."""

    provider: str
    devices: tuple[str, ...] = ()
    gid_index: int = -1


def facts_of(host: Host, folder: Path) -> HostFacts:
    return probe(*host.write(folder))


def names(host: Host, folder: Path, *devices: str) -> list[str]:
    """Of the ports, by GPU."""
    facts = facts_of(host, folder)
    choices = nic_of_gpus(facts, devices)
    return [choices[gpu.pci_address].nic.name for gpu in facts.gpus]


def two_ports_each(host: Host) -> Host:
    """Every NIC a second time, behind the same bridge: two equally near ports for each GPU."""
    twins = [replace(nic, name=f"twin_{nic.name}", bus=(*nic.bus[:-1], nic.bus[-1][:-1] + "1")) for nic in host.nics]
    return replace(host, nics=(*host.nics, *twins))


def test_each_gpu_of_an_hgx_has_the_port_below_its_switch(tmp_path: Path) -> None:
    found = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    assert names(hgx_h100(), tmp_path) == [f"{name}/1" for name in found]
    choice = nic_of_gpus(facts_of(hgx_h100(1), tmp_path))["0000:43:00.0"]
    assert (choice.distance, choice.why) == ("PIX", "PIX from GPU 1, 400 Gb/s")
    assert choice.gid_why == "the first one: InfiniBand"


def test_gpus_spread_over_equally_near_ports(tmp_path: Path) -> None:
    """Two GPUs and two ports on one bridge, and eight GPUs whose PCIe paths a virtual machine hides."""
    host = pcie_box()
    near = replace(host.nics[0], name="mlx5_7", gids=("0000:0000:0000:0000:0000:ffff:0a00:0063",))
    assert names(replace(host, nics=(host.nics[0], near)), tmp_path) == ["mlx5_0/1", "mlx5_7/1", "mlx5_0/1", "mlx5_7/1"]
    flat = hgx_h100(1)
    gpus = tuple(replace(gpu, bus=("pci0000:00", f"0000:00:{9 + i:02x}.0"), numa=-1) for i, gpu in enumerate(flat.gpus))
    nics = tuple(PaperNic(f"mlx5_{i}", ("pci0000:00", f"0000:00:2{i}.0"), -1) for i in range(4))
    found = names(replace(flat, gpus=gpus, nics=nics), tmp_path)
    assert found == [f"mlx5_{i % 4}/1" for i in range(8)]


def test_twins_leave_no_gpu_a_second_hand_port(tmp_path: Path) -> None:
    host = two_ports_each(gb200_tray())
    found = names(host, tmp_path)
    assert len(set(found)) == 4
    choice = nic_of_gpus(facts_of(host, tmp_path / "again"))["0000:01:00.0"]
    assert choice.why.endswith("2 ports are as near, fewest GPUs use this one")


def test_a_configured_device_wins_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert names(hgx_h100(), tmp_path, "mlx5_1")[0] == "mlx5_1/1"
    assert names(hgx_h100(), tmp_path / "2", "mlx5_0", "mlx5_6:1") == ["mlx5_0/1"] * 4 + ["mlx5_6/1"] * 4
    facts = facts_of(hgx_h100(), tmp_path / "3")
    assert (
        nic_of_gpus(facts, ["mlx5_6/1"])["0000:1b:00.0"].why == "SYS from GPU 0, 400 Gb/s, of network.devices mlx5_6/1"
    )
    with pytest.raises(TransportError, match=r"network\.devices: expected RDMA ports .*mlx5_0/1.*, got eth0"):
        nic_of_gpus(facts, ["mlx5_0", "eth0"])
    with pytest.raises(TransportError, match="no usable RDMA port: mlx5_2/1 is DOWN, Disabled"):
        nic_of_gpus(facts, ["mlx5_2"])
    with pytest.raises(TransportError, match=r"expected a GPU of this host.*got GPU-of-another"):
        nic_of_rank(facts, "GPU-of-another")
    with pytest.raises(TransportError, match="this host has no RDMA device"):
        nic_of_rank(facts_of(no_gpu(), tmp_path / "4"))


def test_ranks_without_gpus_take_the_ports_in_turn(tmp_path: Path) -> None:
    facts = facts_of(replace(gb200_tray(), gpus=(), driver=False), tmp_path)
    assert [nic_of_rank(facts, local_rank=rank).nic.device for rank in range(6)] == [
        "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1",
    ]  # fmt: skip
    assert nic_of_rank(facts, local_rank=5).why == "no GPU: local rank 5 takes port 1 of 4"


LINK_LOCAL, GLOBAL, IPV4 = "fe80::1", "2001:db8::1", "::ffff:10.0.0.1"


@pytest.mark.parametrize(
    ("gids", "expected", "why"),
    [
        ([("RoCE v2", LINK_LOCAL), ("IB/RoCE v1", IPV4), ("RoCE v2", GLOBAL), ("RoCE v2", IPV4)], 3, "RoCE v2, IPv4"),
        ([("IB/RoCE v1", IPV4), ("RoCE v2", LINK_LOCAL), ("RoCE v2", GLOBAL)], 2, "RoCE v2, IPv6"),
        ([("RoCE v2", LINK_LOCAL), ("RoCE v2", LINK_LOCAL)], 0, "RoCE v2, link-local"),
        ([("IB/RoCE v1", IPV4)], 0, "IB/RoCE v1, IPv4; no entry is RoCE v2, so it is not routed"),
    ],
)
def test_gids_of_roce(tmp_path: Path, gids: list[tuple[str, str]], expected: int, why: str) -> None:
    nic = facts_of(pcie_box(), tmp_path).nics[0]
    table = tuple(Gid(index, kind, gid, "") for index, (kind, gid) in enumerate(gids))
    found, reason = best_gid(replace(nic, gids=table))
    assert found is not None
    assert (found.index, reason) == (expected, why)
    asked, reason = best_gid(replace(nic, gids=table), 0)
    assert asked is not None
    assert (asked.index, reason) == (0, "network.gid_index")
    with pytest.raises(TransportError, match=r"network\.gid_index: expected an entry of mlx5_0/1, 0.*got 9"):
        best_gid(replace(nic, gids=table), 9)
    assert best_gid(replace(nic, gids=())) == (None, "no GID: addressed by LID")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_control_plane_shows_what_the_data_plane_takes(kind: str, tmp_path: Path) -> None:
    facts = facts_of(two_ports_each(KINDS[kind][0](0)), tmp_path)
    shown = {device.gpu: device.nic for device in join([host_facts(facts=facts)]).devices if device.nic}
    taken = nic_of_gpus(facts) if facts.nics and facts.gpus else {}
    assert shown == {gpu.index: taken[gpu.pci_address].nic.name for gpu in facts.gpus if taken}


def test_the_worker_resolves_its_port_and_says_why(tmp_path: Path) -> None:
    facts = facts_of(hgx_h100(), tmp_path)
    tcp = NetworkConfig()
    assert data_network.with_device(None, "", 0, facts) == (None, None)
    assert data_network.with_device(tcp, facts.gpus[3].uuid, 3, facts) == (tcp, None)
    rail: Any = Rail("verbs")
    made, choice = data_network.with_device(rail, facts.gpus[3].uuid, 3, facts)
    assert made == Rail("verbs", ("mlx5_5:1",))
    assert choice is not None
    told = data_network.announced(data_network.WorkerNetworkConfig(), "10.0.0.1:7500", "boot", choice, "b" * 999)
    assert told is not None
    assert (told.device, told.device_why) == ("mlx5_5/1", "PIX from GPU 3, 400 Gb/s")
    assert told.boxes == "b" * 256, "longer texts are refused"


@pytest.mark.parametrize(
    ("provider", "devices", "taken"),
    [
        ("libfabric(efa)", (), ("mlx5_4", "mlx5_4-rdm")),
        ("libfabric(efa)", ("mlx5_9-rdm",), ("mlx5_9", "mlx5_9-rdm")),
        ("shuffle(verbs)", ("mlx5_9", "mlx5_4"), ("mlx5_4:1",)),
    ],
)
def test_devices_are_named_as_the_provider_names_them(
    tmp_path: Path, provider: str, devices: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    facts = facts_of(hgx_h100(), tmp_path)
    config: Any = Rail(provider, devices)
    made, choice = resolved(config, facts.gpus[2].pci_address, 2, facts)
    assert made.devices == taken
    assert choice is not None
    for untouched in (Rail("libfabric(tcp;ofi_rxm)"), Rail("libfabric(cxi)", ("cxi0",)), Rail("tcp", ("eth0",))):
        given: Any = untouched
        assert resolved(given, facts.gpus[2].pci_address, 2, facts) == (untouched, None)
    slingshot: Any = Rail("libfabric(cxi)")
    assert resolved(slingshot, "", 0, facts_of(no_gpu(), tmp_path)) == (slingshot, None)


def test_the_configured_gid_is_the_one_that_is_announced(tmp_path: Path) -> None:
    """In the log, and by the doctor: the provider takes no other, and refuses one that is not there."""
    facts = facts_of(pcie_box(), tmp_path)
    nic = facts.nics[0]
    gids = tuple(Gid(index, "RoCE v2", IPV4, "") for index in range(4))
    facts = replace(facts, nics=(replace(nic, gids=gids),))
    given: Any = Rail("verbs", (), 3)
    _, choice = resolved(given, facts.gpus[0].pci_address, 0, facts)
    assert choice is not None
    assert choice.gid is not None
    assert (choice.gid.index, choice.gid_why) == (3, "network.gid_index")
    assert "GID 3 " in next(iter(rdma.judge_nics(facts, ALLOWED, (), 3))).what
    (missing,) = rdma.judge_nics(facts, ALLOWED, (), 9)
    assert (missing.level, "expected an entry of" in missing.what) == (Level.FAIL, True)
    ignored: Any = Rail("libfabric", (), 9)
    assert resolved(ignored, facts.gpus[0].pci_address, 0, facts)[1] is not None
    config = data_network.WorkerNetworkConfig
    providers = "verbs", "shuffle(verbs)", "libfabric(verbs)", "tcp"
    chosen = [config(provider=provider, gid_index=3) for provider in providers]
    assert [reach.rdma_gid_index(one) for one in chosen] == [3, 3, -1, -1]
    assert reach.rdma_gid_index(None) == -1


def test_the_doctor_shows_ports_and_what_is_missing(tmp_path: Path) -> None:
    facts = facts_of(hgx_h100(), tmp_path)
    found = list(rdma.judge_nics(facts, ALLOWED))
    assert [finding.level for finding in found] == [Level.OK] * 9
    assert found[2].what.startswith("mlx5_4/1: PIX from GPU 2, 400 Gb/s; GID 0 fe80")
    nothing = replace(ALLOWED, peermem=False)
    assert list(rdma.judge_nics(facts, nothing))[-1].what.startswith("neither nvidia_peermem")
    assert list(rdma.judge_nics(facts, replace(nothing, open_driver=True)))[-1].level is Level.OK
    few = {one.check: one for one in rdma.judge_nics(facts_of(pcie_box(), tmp_path), ALLOWED)}
    assert few["rdma-shared"].what == "mlx5_0/1: 4 GPUs"
    (wrong,) = rdma.judge_nics(facts, ALLOWED, ["mlx5_2"])
    assert (wrong.check, wrong.level) == ("rdma-nic", Level.FAIL)
    assert not list(rdma.judge_nics(facts_of(no_gpu(), tmp_path), ALLOWED))


def test_a_step_outlasts_the_retries_of_a_queue_pair() -> None:
    (good,) = rdma.judge_retries("shuffle(verbs)", 10.0)
    assert (good.level, good.what) == (Level.OK, "a queue pair gives up after 1.9 s at most, a step after 10 s")
    (short,) = rdma.judge_retries("verbs", 1.5)
    assert (short.check, short.level) == ("rdma-retry", Level.WARN)
    assert not list(rdma.judge_retries("tcp", 1.0))


def test_locked_memory(tmp_path: Path) -> None:
    limited = replace(ALLOWED, locked_bytes=8 << 20)
    assert rdma.judge_memlock("shuffle(tcp)", limited).level is Level.OK
    assert rdma.judge_memlock("verbs", ALLOWED).what == "unlimited"
    assert rdma.judge_memlock("verbs", replace(limited, ipc_lock=True)).what == "CAP_IPC_LOCK"
    refused = rdma.judge_memlock("libfabric", limited)
    assert (refused.level, refused.what) == (Level.WARN, "8192 KiB")
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    seen = rdma.read(tmp_path, tmp_path)
    assert (seen.peermem, seen.open_driver, seen.ipc_lock) == (True, True, True)
    gone = rdma.read(tmp_path / "none", tmp_path / "none")
    assert (gone.peermem, gone.open_driver, gone.ipc_lock) == (False, False, False)
    assert reach.rdma_devices(data_network.WorkerNetworkConfig(devices=("eth0",))) == ()
