"""Program configs: files, overrides, and what is said about a wrong one."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from crossdock.common import transports
from crossdock.common.addresses import family_of, format_address, is_loopback, reachable_from_here, split_address
from crossdock.common.announce import seen_from_outside
from crossdock.common.config import (
    ConfigFileError,
    ControlConfig,
    FrameworkConfig,
    HostConfig,
    Identity,
    LogConfig,
    WorkerConfig,
    dump,
    load,
)
from crossdock.common.settings import PROVIDER_PATTERN, AccessConfig, SecurityConfig, WorkerNetworkConfig
from crossdock.host.run import _log_dir_of, check_network, check_transport
from crossdock.worker.group import data_network
from crossdock.worker.group.data_network import announced, network_of
from crossdock.worker.process import _Process
from ep_kernels import ConfigError
from ep_kernels.network import NetworkConfig


@pytest.mark.parametrize("kind", [ControlConfig, WorkerConfig, HostConfig])
@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("security.access.operator_names=[alice]", "access"),
        ("security.ca_file=ca.pem", "ca_file"),
        ("security.require_client_cert=false", "require_client_cert"),
        ("security.control_name=x", "control_name"),
        ("security.worker_name=x", "worker_name"),
    ],
)
def test_a_server_with_security_but_no_certificate_is_refused(
    kind: type[ControlConfig] | type[WorkerConfig] | type[HostConfig], override: str, given: str
) -> None:
    model = {ControlConfig: [], WorkerConfig: ["model=/m"], HostConfig: ["worker.model=/m"]}[kind]
    for part in ("worker.", "control.") if kind is HostConfig else ("",):
        with pytest.raises(ConfigFileError, match=f"security: expected cert_file and key_file beside {given}") as said:
            load(kind, None, [*model, f"{part}{override}"])
        assert f" {part}security: expected" in str(said.value)


def test_a_server_with_a_certificate_or_without_any_security_is_not() -> None:
    pair = {"cert_file": "a", "key_file": "b", "ca_file": "c"}
    assert ControlConfig(security=SecurityConfig(**pair, access=AccessConfig(operator_names=("alice",))))
    assert WorkerConfig(model="/m", security=SecurityConfig())


@pytest.mark.parametrize(
    ("address", "only_here"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("gpu-1:1", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_which_addresses_only_this_host_reaches(address: str, only_here: bool) -> None:
    assert is_loopback(address) is only_here


def test_defaults_are_a_whole_config() -> None:
    assert load(ControlConfig, None) == ControlConfig()


@pytest.mark.parametrize(
    "config",
    [
        ControlConfig(listen="[::1]:9", log=LogConfig(level="debug", file="x.log")),
        WorkerConfig(model="/m", uid="7", dtype="bfloat16"),
        HostConfig(worker=WorkerConfig(model="/m"), control=None),
    ],
)
def test_a_dumped_config_loads_as_an_equal_one(
    config: ControlConfig | WorkerConfig | HostConfig, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(dump(config))
    assert load(type(config), path) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lisen: a:1", ["lisen"]),
        (
            "log: {levl: info}",
            ["log.levl: expected a field that there is (`crossdock config`), got an unknown one"],
        ),
        ("log: {level: loud}", ["log.level: expected one of 'debug', 'info', 'warning', 'error', got 'loud'"]),
        ("world_size: four", ["world_size: expected int | null, got 'four'"]),
        ("world_size: 0", ["world_size: expected int >= 1, got 0"]),
        ("lease_s: -1", ["lease_s: expected float > 0.0, got -1"]),
        ("listen: nowhere", ["listen", "host:port", "nowhere"]),
        ("http_listen: a:70000", ["http_listen", "65535"]),
        ("listen: ''", ["listen", "host:port"]),
        ("- a", ["mapping", "list"]),
        ("a: [", ["c.yaml"]),
        ("log: {}\nlease_s: 1\nlog: {level: debug}", ["'log' is given twice", "line 3"]),
        ("log: {level: info, level: debug}", ["'level' is given twice"]),
        ("listen: 2026-13-01", ["expected YAML", "month"]),
        (f"world_size: {'9' * 5000}", ["expected YAML", "digits"]),
        ("[" * 3000, ["nested too deeply"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        load(ControlConfig, path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"gone\.yaml: No such file or directory$"):
        load(ControlConfig, tmp_path / "gone.yaml")
    with pytest.raises(ConfigFileError, match="/dev/zero: expected at most 1048576 bytes, got more"):
        load(ControlConfig, "/dev/zero")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigFileError, match=r"b\.yaml"):
        load(ControlConfig, tmp_path / "b.yaml")


def test_overrides_win_and_take_the_type_of_their_field(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: /a\nlog: {level: info}\n")
    got = load(WorkerConfig, path, ["model=7", "uid=null", "torch_threads=3", "log.level=debug", "step_timeout_s=2"])
    assert (got.model, got.uid, got.torch_threads, got.log.level) == ("7", "null", 3, "debug")
    assert got.step_timeout_s == 2.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("listen", "--set: expected path.to.field=value, got 'listen'"),
        ("=x", "path.to.field=value"),
        ("lisen=x", "lisen"),
        ("log.levl=x", "levl"),
        ("world_size=[", "YAML"),
        ("listen.port=3", "listen: expected str, got {'port': 3}"),
        ("log=3", "log: expected object, got 3"),
    ],
)
def test_a_wrong_override_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigFileError, match=words):
        load(ControlConfig, None, [override])


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ControlConfig, "world_size"),
        (ControlConfig, "max_message_bytes"),
        (HostConfig, "num_workers"),
        *((WorkerConfig, field) for field in ("max_message_bytes", "torch_threads", "local_rank", "device")),
    ],
)
def test_a_number_that_no_part_could_use_is_refused_by_name(kind: type[msgspec.Struct], field: str) -> None:
    """Foreign libraries take 32 bits, and would end the process with words of their own."""
    needed = ["model=/m"] if kind is WorkerConfig else ["worker.model=/m"] if kind is HostConfig else []
    with pytest.raises(ConfigFileError, match=rf" {field}: expected int.* got {1 << 33}"):
        load(kind, None, [*needed, f"{field}={1 << 33}"])


def test_a_required_field_is_named() -> None:
    with pytest.raises(ConfigFileError, match="model"):
        load(WorkerConfig, None)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "host:65535", "[::1]:80"])
def test_addresses_split_and_join(address: str) -> None:
    assert format_address(*split_address(address)) == address
    assert (family_of(split_address(address)[0]) == socket.AF_INET6) == address.startswith("[")


@pytest.mark.parametrize(
    "address", ["", ":", "a", "a:", ":1", "::1:80", "a:65536", "a:-1", "a:x", "a:٣", "a: 1", f"a:{'1' * 5000}"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


def test_configs_check_addresses_when_made_in_code() -> None:
    with pytest.raises(ValueError, match="advertise"):
        WorkerConfig(model="m", advertise="x")
    for make in (lambda: WorkerConfig(model="m", advertise="0.0.0.0:7500"), lambda: ControlConfig(advertise="[::]:1")):
        with pytest.raises(ValueError, match=r"advertise: expected an address that others reach, got every interface"):
            make()


def test_a_worker_that_listens_everywhere_registers_an_address_that_others_reach() -> None:
    def registered(advertise: str) -> str:
        model = SimpleNamespace(
            device=SimpleNamespace(type="cpu"),
            capabilities=SimpleNamespace(abi="v1"),
            nic=None,
            boxes="",
            spec=SimpleNamespace(fingerprint="f", num_experts=4, moe_layers=(0,)),
            communicator_settings=dict,
        )
        identity = SimpleNamespace(pod_name="", hostname="node-a")
        config = WorkerConfig(model="m", listen="0.0.0.0:7500", advertise=advertise)
        worker: Any = SimpleNamespace(_config=config, _identity=identity, _model=model, _giver=None)
        http: Any = SimpleNamespace(address="0.0.0.0:7600", https=False)
        return _Process._registration(worker, "0.0.0.0:7500", http).address

    assert registered("") == "node-a:7500"
    assert registered("10.0.0.9:5") == "10.0.0.9:5"


@pytest.mark.parametrize(("ip", "address"), [("10.0.0.1", "10.0.0.1:7400"), ("fd00::7", "[fd00::7]:7400")])
def test_brackets_fit_an_address_of_either_family(ip: str, address: str) -> None:
    """What the chart writes, which does not know the family of the pod's address; grpc refuses [10.0.0.1]."""
    assert load(ControlConfig, None, [f"advertise=[{ip}]:7400"]).advertise == address
    assert WorkerConfig(model="m", advertise=f"[{ip}]:7400").advertise == address


def test_identity_reads_what_it_is_given_and_nothing_else() -> None:
    got = Identity.from_env({"NODE_NAME": "n", "POD_NAME": "p"})
    assert got == Identity(hostname="n", pod_name="p")
    assert Identity.from_env({}).hostname


def test_the_workers_of_a_host_differ_in_rank_uid_and_ports() -> None:
    shared = WorkerConfig(
        model="m", uid="h", listen="0.0.0.0:7500", advertise="n:7500", http_listen="0.0.0.0:0", request_port=7800
    )
    workers = HostConfig(worker=shared, num_workers=3).worker_configs()
    assert [w.local_rank for w in workers] == [0, 1, 2]
    assert [w.uid for w in workers] == ["h/0", "h/1", "h/2"]
    assert [w.listen for w in workers] == ["0.0.0.0:7500", "0.0.0.0:7501", "0.0.0.0:7502"]
    assert [w.advertise for w in workers] == ["n:7500", "n:7501", "n:7502"]
    assert [w.request_port for w in workers] == [7800, 7801, 7802]
    assert {w.http_listen for w in workers} == {"0.0.0.0:0"}
    with pytest.raises(ValueError, match=r"a port in 0..65535, got 'request_port:65536'"):
        HostConfig(worker=WorkerConfig(model="m", request_port=65535), num_workers=2)
    for port in (0, None):
        last = HostConfig(worker=WorkerConfig(model="m", request_port=port), num_workers=2).worker_configs()[1]
        assert last.request_port == port


def test_the_group_of_a_host_has_as_many_ranks_as_it_has_workers() -> None:
    host = HostConfig(worker=WorkerConfig(model="m"), num_workers=3, control=ControlConfig(lease_s=2))
    assert host.control_config() == ControlConfig(lease_s=2, world_size=3)
    assert HostConfig(worker=WorkerConfig(model="m"), control=None).control_config() is None


def test_a_group_of_several_hosts_is_larger_than_the_workers_of_one(tmp_path: Path) -> None:
    given = ["worker.model=m", "num_workers=2", "worker.network.provider=tcp", "control.world_size=6"]
    control = load(HostConfig, None, given).control_config()
    assert control is not None
    assert control.num_ranks == 6
    assert ControlConfig().num_ranks == 4
    with pytest.raises(ConfigFileError, match=r"control.world_size: expected num_workers, 2, or more, got 1"):
        load(HostConfig, None, [*given, "control.world_size=1"])
    with pytest.raises(ConfigFileError, match=r"control.world_size: expected num_workers, 2, or worker.network .*6"):
        load(HostConfig, None, [*given[:2], "control.world_size=6"])


def test_the_network_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\nnetwork: {listen: '10.0.0.1:7700', cpus: [1, 2]}\n")
    from_file = load(WorkerConfig, tmp_path / "c.yaml", ["network.domain=7", "network.lanes=4"])
    expected = WorkerNetworkConfig(listen="10.0.0.1:7700", cpus=(1, 2), domain="7", lanes=4)
    assert from_file.network == expected
    assert load(WorkerConfig, None, ["model=m"]).network is None
    workers = HostConfig(worker=from_file, num_workers=2).worker_configs()
    assert [worker.network and worker.network.listen for worker in workers] == ["10.0.0.1:7700", "10.0.0.1:7701"]
    workers = load(HostConfig, None, ["worker.model=m", "worker.network={}"]).worker_configs()
    assert {worker.network and worker.network.listen for worker in workers} == {"0.0.0.0:0"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("network.provider=udp", "network.provider: expected tcp, verbs, .*got .udp."),
        ("network.listen=7700", "network.listen: expected host:port .* got '7700'"),
        ("network.advertise=a:1", "network.advertise: expected an address without port, got 'a:1'"),
        ("network.advertise=0.0.0.0", "network.advertise: expected an address that others reach"),
        ("network.lanes=17", "<= 16"),
        ("network.spin_us=-1", ">= 0"),
        ("network.devises=[a]", "devises"),
    ],
)
def test_a_wrong_network_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigFileError, match=words):
        load(WorkerConfig, None, ["model=m", override])


def of_one_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """That transport does not leave a host."""
    known = transports.installed()
    changed = {**known, name: replace(known[name], cross_host=False)}
    monkeypatch.setattr(transports, "installed", lambda: changed)
    monkeypatch.setattr(data_network, "installed", lambda: changed)


def test_the_service_s_network_is_that_of_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (
        {field.name: field.default for field in msgspec.structs.fields(kind)}
        for kind in (WorkerNetworkConfig, NetworkConfig)
    )
    assert ours == theirs
    config = import_module(NetworkConfig.__module__)
    assert config.PROVIDER_PATTERN == PROVIDER_PATTERN
    assert get_args(get_type_hints(WorkerNetworkConfig)["mtu"]) == config.MTUS
    provider = "shuffle(libfabric(tcp;ofi_rxm))"
    full = WorkerNetworkConfig(provider=provider, advertise="fd00::7", listen="[::1]:7", devices=("a",), seed=3)
    made = network_of(WorkerConfig(model="m", network=full))
    assert made is not None
    assert (made.advertise, made.listen, made.devices, made.seed) == ("[fd00::7]", "[::1]:7", ("a",), 3)
    assert network_of(WorkerConfig(model="m")) is None
    of_one_host(monkeypatch, "nvlink")
    with pytest.raises(ConfigError, match=r"worker.network: expected null, or transport cpu, got .* transport nvlink"):
        network_of(WorkerConfig(model="m", transport="nvlink", network=WorkerNetworkConfig()))


@pytest.mark.parametrize(
    ("network", "address", "domain"),
    [
        ({}, "node-a:*", None),
        ({"listen": "10.0.0.1:7700"}, "10.0.0.1:7700", None),
        ({"listen": "[::]:7700", "advertise": "fd00::7"}, "[fd00::7]:7700", None),
        ({"domain": "a"}, "node-a:*", "a"),
    ],
)
def test_what_the_control_plane_is_told_of_a_network(network: dict[str, Any], address: str, domain: str | None) -> None:
    told = announced(WorkerNetworkConfig(**network), "node-a:7500", "boot")
    assert told is not None
    assert (told.provider, told.address) == ("tcp", address)
    assert told.domain == (domain or f"boot/{Path('/proc/self/ns/pid').stat().st_ino}/{os.geteuid()}")
    assert announced(None, "node-a:7500", "boot") is None


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        (["control.world_size=4"], "control.listen 127.0.0.1:7400, worker.listen 127.0.0.1:0"),
        (["control.world_size=4", "control.listen=0.0.0.0:7400"], "worker.listen 127.0.0.1:0"),
        (["control=null"], "worker.listen 127.0.0.1:0"),
        (
            ["control=null", "worker.listen=0.0.0.0:0", "worker.network.advertise=127.0.0.1"],
            r"worker.network.advertise \[127.0.0.1\]:0",
        ),
        (["control.world_size=4", "control.listen=0.0.0.0:7400", "worker.listen=0.0.0.0:0"], None),
        (["control=null", "worker.advertise=node-a:7500"], None),
        (["control.world_size=4", "worker.network.listen=127.0.0.1:0"], None),
        ([], None),
    ],
)
def test_a_group_of_several_hosts_listens_where_they_reach_it(given: list[str], closed: str | None) -> None:
    config = load(HostConfig, None, ["worker.model=m", "num_workers=2", "worker.network.provider=tcp", *given])
    if closed is None:
        check_network(config)
        return
    with pytest.raises(ConfigFileError, match=f"worker.network: expected addresses .* got {closed}; set"):
        check_network(config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("num_workers=65", "num_workers: expected at most 64, the most ranks of transport cpu, got 65"),
        ("control.world_size=65", "control.world_size: expected at most 64, .*, got 65"),
        ("worker.transport=pigeons", "worker.transport: expected one of cpu, nvlink, got 'pigeons'"),
    ],
)
def test_a_group_that_the_transport_cannot_have_is_refused(given: str, words: str) -> None:
    config = load(HostConfig, None, ["worker.model=m", "num_workers=64", "worker.network={}"])
    check_transport(config)
    with pytest.raises(ConfigFileError, match=words):
        check_transport(load(HostConfig, None, ["worker.model=m", "worker.network={}", given]))


def test_ports_of_all_workers_are_checked_before_one_starts() -> None:
    with pytest.raises(ConfigFileError, match=r"listen: expected host:port .*, got '0.0.0.0:65536'"):
        load(HostConfig, None, ["worker.model=m", "num_workers=2", "worker.listen=0.0.0.0:65535"])


@pytest.mark.parametrize("folder", ["/dev/null/logs", "/proc"])
def test_logs_that_cannot_be_written_are_refused_by_name(folder: str, tmp_path: Path) -> None:
    config = load(HostConfig, None, [f"worker.model={tmp_path}", f"log_dir={folder}"])
    with pytest.raises(ConfigFileError, match=f"log_dir: expected a directory to write files in, got '{folder}'"):
        _log_dir_of(config)


def test_a_network_is_refused_where_the_transport_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one_host(monkeypatch, "nvlink")
    check_network(load(HostConfig, None, ["worker.model=m", "worker.transport=nvlink"]))
    with pytest.raises(ConfigFileError, match=r"worker.network: expected null, or transport cpu, got transport nvlink"):
        check_network(load(HostConfig, None, ["worker.model=m", "worker.transport=nvlink", "worker.network={}"]))


@pytest.mark.parametrize(
    ("address", "reached"),
    [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("10.0.0.1:7", "10.0.0.1:7")],
)
def test_a_server_on_every_interface_is_reached_over_loopback(address: str, reached: str) -> None:
    assert reachable_from_here(address) == reached


@pytest.mark.parametrize(
    ("address", "advertised", "seen"),
    [
        ("0.0.0.0:7", "10.0.0.9:5", "10.0.0.9:7"),
        ("[::]:7", "[fd00::1]:5", "[fd00::1]:7"),
        ("0.0.0.0:7", "", "node-a:7"),
        ("10.0.0.1:7", "10.0.0.9:5", "10.0.0.1:7"),
    ],
)
def test_others_are_told_an_address_that_is_not_every_interface(address: str, advertised: str, seen: str) -> None:
    assert seen_from_outside(address, advertised, "node-a") == seen


def test_inside_an_engine_the_environment_names_the_file(tmp_path: Path) -> None:
    assert FrameworkConfig.from_env({}) == FrameworkConfig()
    assert FrameworkConfig.from_env({"CROSSDOCK_VLLM": "native"}).vllm == "native"
    path = tmp_path / "c.yaml"
    path.write_text("vllm: deep_ep\ntimeout_s: 7\nhttp_listen: 127.0.0.1:9100\n")
    got = FrameworkConfig.from_env({"CROSSDOCK_CONFIG": str(path)})
    assert (got.vllm, got.timeout_s, got.listen_of(3), FrameworkConfig().listen_of(3)) == (
        "deep_ep",
        7,
        "127.0.0.1:9103",
        "",
    )
    assert FrameworkConfig.from_env({"CROSSDOCK_CONFIG": str(path), "CROSSDOCK_VLLM": "off"}).vllm == "off"


@pytest.mark.parametrize("text", ["vllm: on\n", "timeout_s: 0\n", "http_listen: nowhere\n", "time: 3\n"])
def test_a_wrong_engine_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=r"c\.yaml"):
        FrameworkConfig.from_env({"CROSSDOCK_CONFIG": str(path)})
