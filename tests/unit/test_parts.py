"""Which containers a config means: ports, folders, what runs in them, and who keeps them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossdock.common.addresses import split_address
from crossdock.common.config import ConfigFileError, ControlConfig, HostConfig, WorkerConfig, dump, load
from crossdock.common.settings import AccessConfig, DockerConfig, SecurityConfig, WorkerNetworkConfig
from crossdock.host.container_specs import ContainerSpec, Owner, changed, control_address, parts_of, with_ports


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def host(model: Path, worker: dict[str, Any] | None = None, **fields: Any) -> HostConfig:
    given = {"listen": "127.0.0.1:7500", "http_listen": "127.0.0.1:7600", **(worker or {})}
    return HostConfig(**{"worker": WorkerConfig(model=str(model), **given), "num_workers": 2, **fields})


def both(config: HostConfig) -> tuple[ContainerSpec, ContainerSpec]:
    control, worker = parts_of(config)
    return control, worker


def test_a_port_is_the_same_inside_and_published_where_the_config_listens(model: Path) -> None:
    control, worker = both(host(model, http_listen="0.0.0.0:7402"))
    assert control.ports == {7400: "127.0.0.1", 7401: "127.0.0.1"}
    assert worker.ports == {7402: "0.0.0.0", **dict.fromkeys((7500, 7501, 7600, 7601), "127.0.0.1")}
    assert isinstance(control.config, ControlConfig)
    assert (control.config.listen, control.config.http_listen) == ("0.0.0.0:7400", "0.0.0.0:7401")
    assert control.config.world_size == 2


def test_workers_find_the_control_plane_in_the_network_and_clients_find_workers_on_this_host(model: Path) -> None:
    _, worker = both(host(model))
    assert isinstance(worker.config, HostConfig)
    assert worker.config.control is None
    inside = worker.config.worker_configs()
    assert [one.control for one in inside] == ["control:7400"] * 2
    assert [one.listen for one in inside] == ["0.0.0.0:7500", "0.0.0.0:7501"]
    assert [one.advertise for one in inside] == ["127.0.0.1:7500", "127.0.0.1:7501"]


def test_what_a_container_is_told_can_be_read_back_and_names_only_what_is_not_by_default(
    model: Path, tmp_path: Path
) -> None:
    for part in both(host(model, {"dtype": "bfloat16"}, docker=DockerConfig(gpus=1))):
        told = changed(part.config)
        assert "docker" not in told
        assert "log" not in told
        (tmp_path / "told.yaml").write_text(dump(told))
        assert load(type(part.config), tmp_path / "told.yaml") == part.config


@pytest.mark.parametrize(("transport", "gpus", "given"), [("cpu", None, 0), ("nvlink", None, 2), ("nvlink", 8, 8)])
def test_gpus_are_asked_for_where_they_are_used(model: Path, transport: str, gpus: int | None, given: int) -> None:
    control, worker = both(host(model, {"transport": transport}, docker=DockerConfig(gpus=gpus)))
    assert (control.gpus, worker.gpus) == (0, given)


def test_a_joined_control_plane_gets_no_container_and_must_be_reachable_from_one(model: Path) -> None:
    (worker,) = parts_of(host(model, {"control": "10.1.2.3:7400"}, control=None))
    assert isinstance(worker.config, HostConfig)
    assert worker.config.worker.control == "10.1.2.3:7400"
    for here in ("127.0.0.1:7400", "localhost:7400", "[::1]:7400", "10.1.2.3:7400,127.0.0.1:7400"):
        with pytest.raises(ConfigFileError, match="expected an address that a container reaches"):
            parts_of(host(model, {"control": here}, control=None))


def test_data_ports_are_published_and_told_as_this_host_s(model: Path) -> None:
    network = WorkerNetworkConfig(listen="10.0.0.1:7700", lanes=2)
    _, worker = both(host(model, {"network": network}))
    assert isinstance(worker.config, HostConfig)
    assert {7700: "10.0.0.1", 7701: "10.0.0.1"}.items() <= worker.ports.items()
    told = worker.config.worker.network
    assert told == WorkerNetworkConfig(listen="0.0.0.0:7700", advertise="10.0.0.1", lanes=2)
    fixed = with_ports(host(model, {"network": WorkerNetworkConfig(listen="127.0.0.1:0")})).worker.network
    assert fixed is not None
    assert split_address(fixed.listen)[1] > 0
    with pytest.raises(ConfigFileError, match=r"network.advertise: expected this host.s address for a container"):
        parts_of(host(model, {"network": WorkerNetworkConfig(listen="0.0.0.0:7700")}))
    with pytest.raises(ConfigFileError, match=r"network.devices: expected none for a container, got \('eth0',\)"):
        parts_of(host(model, {"network": WorkerNetworkConfig(listen="10.0.0.1:7700", devices=("eth0",))}))


def test_links_of_a_model_cache_are_mounted_where_they_lead(tmp_path: Path) -> None:
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    revision.mkdir(parents=True)
    (blobs / "b1").write_text("")
    (revision / "model.safetensors").symlink_to("../../blobs/b1")
    link = tmp_path / "by-another-name"
    link.symlink_to(revision)
    _, worker = both(host(link))
    assert isinstance(worker.config, HostConfig)
    assert worker.mounts == (str(blobs), str(revision))
    assert worker.config.worker.model == str(revision)


@pytest.mark.parametrize("cached", [False, True])
def test_a_link_out_of_the_checkpoint_is_not_followed(cached: bool, tmp_path: Path) -> None:
    model, outside = tmp_path / ("snapshots" if cached else "models") / "abc", tmp_path / "elsewhere"
    model.mkdir(parents=True)
    outside.mkdir()
    (outside / "shadow").write_text("")
    (model / "inside").symlink_to("config.json")
    assert both(host(model))[1].mounts == (str(model),)
    if cached:  # nor by way of the cache's own folder
        (tmp_path / "blobs").symlink_to(outside)
    (model / "model.safetensors").symlink_to("../../blobs/shadow" if cached else "../../elsewhere/shadow")
    with pytest.raises(ConfigFileError, match=rf"worker.model: expected links into .*, got .* -> {outside}/shadow"):
        parts_of(host(model))
    allowed = DockerConfig(mounts={str(outside): str(outside)})
    assert both(host(model, docker=allowed))[1].mounts == (str(model),)


@pytest.mark.parametrize("place", ["model", "more"])
def test_a_folder_with_a_private_key_is_not_mounted(place: str, model: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (tmp_path / place / "ca.key").write_text("")
    with pytest.raises(ConfigFileError, match=f"expected a folder without private keys, got .*{place}/ca.key"):
        parts_of(host(model, docker=DockerConfig(mounts={str(more): "/more"})))


def test_of_certificates_only_the_files_of_the_config_are_mounted_and_named_absolutely(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "ca.key").write_text("")
    guards = SecurityConfig(
        cert_file="certs/host.pem",
        key_file="keys/host.key",
        ca_file="certs/ca.pem",
        access=AccessConfig(client_tokens="tokens"),
    )
    control, worker = both(host(model, {"security": guards}, control=ControlConfig(security=guards)))
    named = [str(tmp_path / name) for name in ("certs/ca.pem", "certs/host.pem", "keys/host.key", "tokens")]
    assert control.mounts == tuple(named)
    assert worker.mounts == tuple(sorted([*named, str(model)]))
    assert isinstance(control.config, ControlConfig)
    assert control.config.security.key_file == str(tmp_path / "keys" / "host.key")


def test_a_folder_that_would_hide_the_images_own_is_refused(model: Path) -> None:
    guards = SecurityConfig(cert_file="/etc/a.pem", key_file="/etc/a.key", ca_file="/etc/ca.pem")
    with pytest.raises(ConfigFileError, match=r"got \['/etc'\]"):
        parts_of(host(model, control=ControlConfig(security=guards)))


def test_an_address_must_be_one_of_this_host_and_a_port_is_published_once(model: Path) -> None:
    with pytest.raises(ConfigFileError, match="expected an IP address of this host to publish, got 'gpu-7'"):
        parts_of(host(model, {"listen": "gpu-7:7500"}))
    with pytest.raises(ConfigFileError, match="got 7501 twice"):
        parts_of(host(model, {"http_listen": "127.0.0.1:7501"}))


def test_each_port_0_becomes_one_that_is_free(model: Path) -> None:
    anywhere = "127.0.0.1:0"
    control = ControlConfig(listen=anywhere, http_listen=anywhere)
    fixed = with_ports(host(model, {"listen": anywhere, "http_listen": anywhere}, control=control, num_workers=3))
    ports = {port for part in parts_of(fixed) for port in part.ports}
    assert len(ports) == 2 + 3 * 3
    assert 0 not in ports
    assert control_address(fixed) == fixed.control.listen if fixed.control else False
    assert fixed.http_listen == ""


def test_ports_that_are_given_stay(model: Path) -> None:
    for worker in (
        {"request_port": 7800},
        {"request_port": 7800, "security": SecurityConfig(cert_file="c", key_file="k", ca_file="a")},
    ):
        config = host(model, worker)
        assert with_ports(config) == config
    _, worker_part = both(host(model, {"request_port": 7800}))
    assert {7800: "127.0.0.1", 7801: "127.0.0.1"}.items() <= worker_part.ports.items()


def test_a_port_in_use_is_not_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        fixed = with_ports(host(model, {"listen": "127.0.0.1:0"}, num_workers=2))
        assert used.getsockname()[1] not in {split_address(one.listen)[1] for one in fixed.worker_configs()}


def test_an_owner_is_known_again_and_lives_as_long_as_its_process() -> None:
    me = Owner.this_process()
    assert Owner.of(str(me)) == me
    assert me.lives()
    assert not Owner(me.host, me.pid, "1").lives(), "a later process with the same id"
    assert not Owner("another-host", me.pid, me.begun).lives()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        fields = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
        child = Owner(me.host, other.pid, fields[19])
        assert child.lives()
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not child.lives(), "what is left is an exit status"


@pytest.mark.parametrize("text", ["", "host", "host x 1", "host 1 2 3"])
def test_a_label_of_somebody_else_is_an_owner_that_lives_nowhere(text: str) -> None:
    assert Owner.of(text) == Owner("", 0, "")
    assert not Owner.of(text).lives()
