"""The doctor's network: the data port and its address, and a trial of two doctors that meet at an address."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from crossdock.cli import app as cli
from crossdock.common.addresses import split_address
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.doctor import rank, reach, trial
from crossdock.doctor.findings import Finding, Level
from ep_kernels.network import address

TRIAL_S = 240.0


def findings_of(num_workers: int = 1, **network: Any) -> dict[str, Finding]:
    return {one.check: one for one in reach.judge_network(WorkerNetworkConfig(**network), num_workers)}


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number = int(first.getsockname()[1])
            try:
                for step in range(1, count):
                    socket.create_server(("127.0.0.1", number + step)).close()
            except (OSError, OverflowError):
                continue
        return number


def test_ports_are_tried_for_every_worker() -> None:
    port = free_ports(3)
    assert findings_of(3, listen=f"127.0.0.1:{port}")["data-port"].what == (
        f"ports {port} to {port + 2} of 127.0.0.1 can be listened on"
    )
    with socket.create_server(("127.0.0.1", port + 2)):
        taken = findings_of(3, listen=f"127.0.0.1:{port}")["data-port"]
        assert (taken.level, taken.what) == (Level.FAIL, f"127.0.0.1:{port + 2}: Address already in use")
        assert findings_of(2, listen=f"127.0.0.1:{port}")["data-port"].level is Level.OK
    assert findings_of(2)["data-port"].what == "any port of 0.0.0.0 can be listened on"
    assert findings_of(listen="198.51.100.7:0")["data-port"].level is Level.FAIL, "no address of this host"


@pytest.mark.parametrize(
    ("network", "level", "words"),
    [
        ({"advertise": "198.51.100.7"}, Level.WARN, "198.51.100.7 is none of this host's"),
        ({"advertise": "127.0.0.1"}, Level.WARN, "127.0.0.1 is loopback"),
        ({"listen": "127.0.0.1:0"}, Level.WARN, "127.0.0.1 is loopback"),
        ({"advertise": "no-such-host.invalid"}, Level.WARN, "no-such-host.invalid is none of this host's"),
    ],
)
def test_an_address_that_others_do_not_reach(network: dict[str, str], level: Level, words: str) -> None:
    found = findings_of(**network)["data-address"]
    assert found.level is level
    assert found.what.startswith(words)
    assert "worker.network.advertise" in found.cure


def test_the_address_is_what_the_data_plane_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_of_default_route", lambda family: "127.0.0.2")
    assert findings_of()["data-address"].what == "127.0.0.2 is loopback: address of the default route"
    refused = findings_of(devices=("none0",))["data-address"]
    assert (refused.level, refused.what.partition(":")[0]) == (Level.FAIL, "network.devices")
    assert reach.address_towards("127.0.0.1", 9) == "127.0.0.1"


def test_interfaces_and_locked_memory() -> None:
    assert findings_of(devices=("lo",))["data-devices"].level is Level.OK
    missing = findings_of(devices=("lo", "none0"))["data-devices"]
    assert (missing.level, missing.what.partition(" here")[0]) == (Level.FAIL, "no none0")
    assert findings_of()["data-memlock"].what == "not needed: provider tcp locks no memory"


def test_the_network_of_a_trial_is_the_configured_one_or_at_the_address_where_both_meet() -> None:
    own = WorkerNetworkConfig(listen="0.0.0.0:7700")
    assert reach.trial_network(own, "127.0.0.1:9", listens=True) is own
    for listens in (True, False):
        made = reach.trial_network(None, "127.0.0.1:9", listens=listens)
        assert (made.listen, split_address(made.listen)[1]) == ("127.0.0.1:0", 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "127.0.0.1:1", "--peer", "127.0.0.1:2"], "--listen: expected no --peer beside it"),
        (["--peer", "127.0.0.1:0"], "--peer: expected a port, got 127.0.0.1:0"),
        (["--listen", "127.0.0.1"], "expected host:port"),
        (["--set", "worker.network.lanes=0"], "worker.network.lanes"),
    ],
)
def test_wrong_usage_is_refused(flags: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", *flags])
    assert words in str(done.exception)
    assert cli.exit_status(done.exception) == cli.EXIT_USAGE  # type: ignore[arg-type]


def test_a_configured_network_is_looked_at() -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--no-pass", "--json", "--set", "worker.network.provider=tcp"])
    checks = [finding["check"] for finding in json.loads(done.stdout)["findings"]]
    assert {"data-port", "data-address", "data-memlock"} <= set(checks)
    assert "network-pass" not in checks


def test_nobody_comes() -> None:
    port = free_ports(1)
    meeting = f"127.0.0.1:{port}"
    (answer,) = trial.run_between_hosts("cpu", 1, meeting, WorkerNetworkConfig(), wait_s=1.0)
    assert answer["rank"] == 1
    assert f"{meeting} within 1 s" in answer["failed"]
    with pytest.raises(RuntimeError, match=f"no doctor of another host came to {meeting} within 0.2 s"):
        rank.main_between_hosts("cpu", 0, 2, meeting, "{}", 0.2)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="Address already in use"):
        rank.main_between_hosts("cpu", 0, 2, meeting, "{}", 0.2)


def test_two_doctors_dispatch_and_combine_over_the_network() -> None:
    """Each rank is a domain of its own, so rows take the data plane's network although both are on this host."""
    meeting = f"127.0.0.1:{free_ports(1)}"
    command = [sys.executable, "-m", "crossdock", "doctor", "--no-pass", "--json", "--wait", "120"]
    both = [
        subprocess.Popen([*command, option, meeting], stdout=subprocess.PIPE, text=True)
        for option in ("--listen", "--peer")
    ]
    try:
        said = [process.communicate(timeout=TRIAL_S)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for text in said:
        found = {finding["check"]: finding for finding in json.loads(text)["findings"]}
        assert found["network-pass"]["level"] == "ok", found["network-pass"]
        assert found["network-pass"]["what"] == "2 ranks, every token came back as it was sent"
        assert {"network-meeting", "network-latency", "network-bandwidth"} <= set(found)
