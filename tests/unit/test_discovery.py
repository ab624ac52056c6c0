"""Facts of hosts on paper, joined: domains, rails, the transport of each pair, and why the others are off."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from google.protobuf import json_format
from rich.console import Console

from crossdock.common.config import ConfigFileError
from crossdock.control.group.ranks import NetworkPlace
from crossdock.control.placement.views import Limits, register_event
from crossdock.control.topology.discovery import CPU, Labels, Topology, gpu_index, join, place
from crossdock.protocol.v1 import control_pb2, topology_pb2
from crossdock.topo import listing, picture, sources
from crossdock.topo.facts import host_facts
from ep_kernels.topology import distance, probe
from tests.machines import KINDS, gb200_tray, hgx_h100, mig_h100, no_gpu, pages, pcie_box
from tests.machines.host import Host


def facts_of(host: Host, folder: Path) -> topology_pb2.HostFacts:
    return host_facts(facts=probe(*host.write(folder)))


def joined(folder: Path, *hosts: Host) -> Topology:
    return join([facts_of(host, folder) for host in hosts])


def test_the_probe_states_what_an_hgx_says(tmp_path: Path) -> None:
    proc, sys, nvml = hgx_h100().write(tmp_path)
    facts = probe(proc, sys, nvml)
    assert (facts.hostname, facts.driver_version, facts.cuda_version) == ("h100-0", "570.148.08", "12.8")
    assert nvml.open == 0, "NVML was left open"
    gpu = facts.gpus[4]
    assert (gpu.pci_address, gpu.numa_node, gpu.capability, gpu.mig) == ("0000:9d:00.0", 1, "9.0", False)
    assert gpu.pcie_path == ("pci0000:97", "0000:97:01.0", "0000:98:00.0", "0000:99:00.0", "0000:9d:00.0")
    assert gpu.pcie_gbps == pytest.approx(63.0)
    assert gpu.num_nvlinks == 18
    assert gpu.nvlink_gbps == pytest.approx(478.1, abs=0.1)
    assert {link.remote for link in gpu.nvlinks} == {"switch"}
    assert gpu.fabric is not None
    assert (gpu.fabric.state, gpu.fabric.cluster_uuid) == ("completed", "")
    assert {peer.index: peer.nvlink for peer in gpu.peers} == dict.fromkeys((0, 1, 2, 3, 5, 6, 7), "ok")
    assert facts.numa_nodes[1].distances == (21, 10)
    nics = {nic.device: nic for nic in facts.nics}
    assert list(nics)[:3] == ["mlx5_0", "mlx5_1", "mlx5_2"], "by number, not by letter"
    assert (nics["mlx5_2"].state, nics["mlx5_2"].physical_state) == ("DOWN", "Disabled")
    assert [gid.kind for gid in nics["mlx5_0"].gids] == ["IB/RoCE v1"], "entries of zeros are not in use"
    here = distance(gpu.pcie_path, nics["mlx5_6"].pcie_path, gpu.numa_node, nics["mlx5_6"].numa_node)
    assert here == ("PIX", 4)


def test_a_host_of_many_virtual_functions_is_told_as_far_as_it_is_taken(tmp_path: Path) -> None:
    """The control plane refused its workers for good."""
    facts = probe(*hgx_h100().write(tmp_path))
    port = next(nic for nic in facts.nics if nic.state == "ACTIVE")
    crowd = replace(port, state="DOWN", gids=port.gids * 300)
    facts = replace(facts, nics=(crowd,) * 150 + facts.nics + (crowd,) * 150)
    request = control_pb2.RegisterRequest(worker=control_pb2.WorkerId(uid="a"), host=host_facts(facts=facts))
    register_event(request, Limits.of(4), 1)
    told = [nic.name for nic in request.host.nics if nic.state == "ACTIVE"]
    assert told == [nic.name for nic in facts.nics if nic.state == "ACTIVE"]


@pytest.mark.parametrize(
    ("one", "other", "numa", "expected"),
    [
        pytest.param("a/p/s/x", "a/p/s/x", (0, 0), ("SELF", 0), id="itself"),
        pytest.param("a/p/x.0", "a/p/x.1", (0, 0), ("SELF", 0), id="two-functions-of-one-card"),
        pytest.param("a/p/u/d/x", "a/p/u/e/y", (0, 0), ("PIX", 4), id="one-switch"),
        pytest.param("a/p/u/d/v/f/x", "a/p/u/e/y", (0, 0), ("PXB", 6), id="two-switches"),
        pytest.param("a/p/x", "a/q/y", (0, 0), ("PHB", 4), id="host-bridge"),
        pytest.param("a/p/x", "b/q/y", (1, 1), ("NODE", 6), id="one-numa-node"),
        pytest.param("a/p/x", "b/q/y", (0, 1), ("SYS", 6), id="between-processors"),
        pytest.param("a/p/x", "b/q/y", (-1, -1), ("SYS", 6), id="numa-unknown"),
        pytest.param("", "b/q/y", (0, 0), ("", 0), id="unknown"),
    ],
)
def test_pcie_distances(one: str, other: str, numa: tuple[int, int], expected: tuple[str, int]) -> None:
    paths = [tuple(path.split("/")) if path else () for path in (one, other)]
    assert distance(paths[0], paths[1], *numa) == expected
    assert distance(paths[1], paths[0], *reversed(numa)) == expected


def test_two_hgx_hosts(tmp_path: Path) -> None:
    topology = joined(tmp_path, hgx_h100(0), hgx_h100(1))
    assert [len(members) for members in topology.domains.values()] == [8, 8]
    assert [device.rail for device in topology.devices] == [*range(8), *range(8)]
    assert {device.nic_distance for device in topology.devices} == {"PIX"}
    assert "mlx5_1/1" not in {device.nic for device in topology.devices}, "storage ports are farther away"
    inside, apart = topology.reach(0, 7), topology.reach(2, 10)
    assert (inside.transport, inside.hops, inside.served) == ("nvlink", 2, True)
    assert (apart.transport, apart.served) == ("none", False)
    assert dict(apart.off)["nvlink"] == "two NVLink domains: boot-h100-0 and boot-h100-1"
    assert dict(apart.off)["cpu"] == "two hosts: shared memory ends with the host"
    assert dict(apart.off)["tcp"] == "between CPU ranks only, with worker.network"
    assert "tcp" not in dict(inside.off), "nobody would take it"


def test_a_rack_is_one_domain(tmp_path: Path) -> None:
    topology = joined(tmp_path, *(gb200_tray(number) for number in range(18)))
    assert [len(members) for members in topology.domains.values()] == [72]
    far = topology.reach(0, 71)
    assert (far.transport, far.served) == ("nvlink", False)
    assert far.off[0] == ("nvlink", "across hosts: with worker.network only")
    network = NetworkPlace("tcp", "10.0.0.1:7500", "tray")
    joined_by = replace(topology, devices=tuple(replace(device, network=network) for device in topology.devices))
    assert (joined_by.reach(0, 71).transport, joined_by.reach(0, 71).served) == ("nvlink", True)


def test_gpus_without_nvlink(tmp_path: Path) -> None:
    topology = joined(tmp_path, pcie_box())
    assert not topology.domains
    assert {device.no_domain for device in topology.devices} == {"it has no NVLink"}
    assert (topology.reach(0, 1).transport, topology.reach(0, 1).served) == ("cpu", True)
    assert dict(topology.reach(0, 1).off)["nvlink"] == "l40s-0/0: it has no NVLink"
    assert {device.nic for device in topology.devices} == {"mlx5_0/1"}, "a RoCE port without GIDs cannot be used"


def test_one_gpu_in_mig_mode(tmp_path: Path) -> None:
    topology = joined(tmp_path, mig_h100())
    assert [sorted(members) for members in topology.domains.values()] == [[0, 1, 3, 4, 5, 6, 7]]
    assert dict(topology.reach(1, 2).off)["nvlink"].endswith("cut into MIG instances, which have no peer access")


def test_no_gpu(tmp_path: Path) -> None:
    topology = joined(tmp_path, no_gpu(0), no_gpu(1))
    assert [device.gpu for device in topology.devices] == [CPU, CPU]
    assert topology.devices[0].no_domain == "NVML: NVML Shared Library Not Found"
    assert topology.reach(0, 1).transport == "none"
    assert dict(topology.reach(0, 1).off)["tcp"] == "laptop-0: no network configured (worker.network)"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_nvlinks": 0, "nvlink_gbps": 0.0, "nvlink_domain": ""}, "0 of 18 NVLinks are up"),
        ({"fabric_state": "in progress"}, "NVLink fabric: in progress; is the fabric manager running?"),
        ({"fabric_error": "Unknown Error"}, "NVLink fabric: Unknown Error"),
        ({"capability": "8.0"}, "compute capability 8.0: the kernels need 9.0 (Hopper) or newer"),
    ],
)
def test_a_gpu_in_trouble_is_in_no_domain(tmp_path: Path, change: dict[str, object], why: str) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    for name, value in change.items():
        setattr(host.gpus[3], name, value)
    topology = join([host])
    assert topology.devices[3].no_domain == why
    assert [len(members) for members in topology.domains.values()] == [7]


def test_a_host_of_two_cliques(tmp_path: Path) -> None:
    """Two boards of four that do not reach each other are two domains."""
    host = facts_of(hgx_h100(), tmp_path)
    for gpu in host.gpus:
        for peer in gpu.peers:
            if (peer.index < 4) != (gpu.index < 4):
                peer.nvlink = "not supported"
    topology = join([host])
    assert list(topology.domains) == ["boot-h100-0:0", "boot-h100-0:1"]
    assert dict(topology.reach(0, 4).off)["nvlink"] == "driver: NVLink not supported, peer access ok"


def test_labels_fill_in_what_gpus_do_not_tell(tmp_path: Path) -> None:
    hosts = [facts_of(gb200_tray(number), tmp_path) for number in range(2)]
    for host in hosts:
        for gpu in host.gpus:
            gpu.fabric_cluster = ""
    assert len(join(hosts).domains) == 2
    labels = {host.hostname: Labels(clique="nvl.7", rack="r1") for host in hosts}
    assert [len(members) for members in join(hosts, labels).domains.values()] == [8]
    assert place("w", 2, hosts[0], 2, labels["gb200-0"]).area == ("", "", "r1")


def test_containers_that_see_one_gpu_each_share_the_domain_of_their_host(tmp_path: Path) -> None:
    hosts = []
    for index in range(2):
        host = facts_of(hgx_h100(), tmp_path / str(index))
        del host.gpus[index].peers[:]
        for other in [gpu for gpu in host.gpus if gpu.index != index]:
            host.gpus.remove(other)
        hosts.append(host)
    places = [place(f"w{n}", n, host, gpu_index(host, host.gpus[0].uuid, n)) for n, host in enumerate(hosts)]
    assert {one.nvlink_domain for one in places} == {"boot-h100-0"}
    assert join(hosts).reach(0, 1).transport == "nvlink"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown_in_every_way(tmp_path: Path, kind: str) -> None:
    make, count = KINDS[kind]
    hosts = [facts_of(make(number), tmp_path) for number in range(count)]
    paths = []
    for number, host in enumerate(hosts):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(sources.write_facts(host))
    read = sources.read_facts(paths)
    assert read == hosts
    shown = sources.of_hosts(read, None, kind)
    data = json.loads(json.dumps(listing.as_dict(shown)))
    devices = len(shown.topology.devices)
    assert sum(len(path["pairs"]) for path in data["paths"]) == devices * (devices - 1) // 2
    assert sorted(device["rank"] for device in data["devices"]) == list(range(devices))
    root = ElementTree.fromstring(picture.as_svg(shown))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert {f"rank {rank}" for rank in range(devices)} <= set(texts)
    assert all(host.hostname in texts for host in hosts)
    dot = picture.as_dot(shown)
    assert dot.count("{") == dot.count("}") == 1 + len(hosts)
    console = Console(width=200, file=open(tmp_path / "out", "w+"))  # noqa: SIM115
    console.print(listing.as_tables(shown))
    console.file.seek(0)
    text = console.file.read()
    assert "off, and why" in text or devices == 1
    assert text.count("\n") < 80, "a large topology is told in few lines"


def test_ranks_of_a_live_group_are_its_own(tmp_path: Path) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    answer = control_pb2.TopologyResponse(hosts=[host], epoch=3, world_size=4)
    for rank, gpu in ((0, 6), (2, 1)):
        answer.seats.add(rank=rank, uid=f"w{rank}", host=0, gpu=gpu, on_gpu=True)
    told = {"device": "mlx5_4/1", "device_why": "PIX", "boxes": "boxes in GPU memory, by dma-buf: in order"}
    answer.seats[1].network.CopyFrom(topology_pb2.Network(provider="verbs", address="h:1", domain="d", **told))
    answer.labels.add(hostname="h100-0", rack="r9")
    shown = sources.of_response(answer, "x:1")
    assert [shown.topology.name(number) for number in shown.in_order] == ["h100-0/6", "h100-0/1"]
    assert sorted(shown.ranks.values()) == [0, 2]
    assert "rack r9" in picture.as_svg(shown)
    assert listing.paths(shown) == {shown.topology.reach(0, 1): [(0, 2)]}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(listing.as_tables(shown))
    assert "network verbs at h:1, domain d, mlx5_4/1: PIX, boxes in GPU memory, by dma-buf: in" in console.export_text()


def live(tmp_path: Path, *networks: tuple[int, str] | None) -> sources.Picture:
    """Two CPU hosts; each worker as (host, domain), or on host 0 without a network."""
    answer = control_pb2.TopologyResponse(hosts=[facts_of(no_gpu(n), tmp_path) for n in range(2)], epoch=3)
    for rank, network in enumerate(networks):
        seat = answer.seats.add(rank=rank, uid=f"w{rank}", host=network[0] if network else 0)
        if network:
            seat.network.CopyFrom(topology_pb2.Network(provider="tcp", address=f"h{rank}:7700", domain=network[1]))
    return sources.of_response(answer, "x:1")


def test_cpu_ranks_of_two_hosts_reach_each_other_over_the_network(tmp_path: Path) -> None:
    shown = live(tmp_path, (0, "a"), (0, "a"), (1, "b"))
    far = shown.topology.reach(0, 1)
    assert (far.transport, far.served, far.over) == ("tcp", True, "sockets")
    assert dict(far.off)["cpu"] == "two hosts: shared memory ends with the host"
    assert listing.paths(shown) == {far: [(0, 2)]}
    (path,) = listing.as_dict(shown)["paths"]
    assert (path["transport"], path["served"]) == ("tcp", True)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(listing.as_tables(shown))
    words = console.export_text()
    assert "rank 2 on laptop-1: network tcp at h2:7700, domain b" in words
    assert "T tcp (sockets between hosts)" in words


def test_two_domains_of_one_host_do_not_share_memory(tmp_path: Path) -> None:
    shown = live(tmp_path, (0, "a"), (0, "b"))
    way = shown.topology.reach(0, 1)
    assert (way.transport, way.served) == ("tcp", True)
    assert dict(way.off)["cpu"].startswith("two domains of one host")


def test_without_a_network_hosts_are_apart(tmp_path: Path) -> None:
    shown = live(tmp_path, (1, "b"), None)
    way = shown.topology.reach(0, 1)
    assert (way.transport, way.served) == ("none", False)
    assert dict(way.off)["tcp"] == "laptop-0: no network configured (worker.network)"


def test_providers_of_both_ends_are_compared(tmp_path: Path) -> None:
    shown = live(tmp_path, (0, "a"), (1, "b"))
    other = shown.topology.devices[1].network
    assert other is not None
    devices = (shown.topology.devices[0], replace(shown.topology.devices[1], network=replace(other, provider="efa")))
    topology = replace(shown.topology, devices=devices)
    assert dict(topology.reach(0, 1).off)["tcp"] == "providers differ: tcp and efa"


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"crossdock-host-facts": 1}', '{"crossdock-host-facts": 2}', "[]"])
def test_a_file_that_holds_no_facts_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=r"odd\.json"):
        sources.read_facts([path])


def test_facts_of_a_newer_version_are_read(tmp_path: Path) -> None:
    host = json_format.MessageToDict(facts_of(no_gpu(), tmp_path), preserving_proto_field_name=True)
    path = tmp_path / "new.json"
    path.write_text(json.dumps({sources.FACTS: 1, "host": {**host, "quantum_links": 3}}))
    assert sources.read_facts([path])[0].hostname == "laptop-0"


def test_the_pages_show_what_the_command_shows(tmp_path: Path) -> None:
    made = pages.pages(tmp_path)
    kept = {path.name: path.read_text() for path in pages.PAGES.iterdir() if path.name in made}
    assert kept == made, "run python -m tests.machines.pages"
