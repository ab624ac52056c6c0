"""The unit for systemd: valid to systemd itself, its command to ours, and what it promises true of a real process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_group

from crossdock.cli import app
from crossdock.common.config import HostConfig, dump, load
from tests import tools
from tests.deploy.bed.processes import free_ports
from tests.house.tree import ROOT
from tests.services.cluster import TEST_S, write_model

UNIT = ROOT / "deploy" / "systemd" / "crossdock.service"
PAGE = ROOT / "docs" / "systemd.md"
PROGRAM = "/opt/crossdock/bin/crossdock"
END_S = 120


def fields() -> dict[str, str]:
    """Of all sections; none is given twice."""
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    found = dict(line.split("=", 1) for line in lines)
    assert len(found) == len(lines)
    return found


def example() -> str:
    """The host.yaml of the page."""
    return re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


@tools.needs("systemd-analyze")
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    """It warns of unknown keys and values, of a program that is not there, and ends with 0 all the same."""
    program = tmp_path / "crossdock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / UNIT.name
    for wrong in ("", "Restart=sometimes\n"):
        copy.write_text(UNIT.read_text().replace(PROGRAM, str(program)).replace("[Service]\n", f"[Service]\n{wrong}"))
        command = [str(tools.path("systemd-analyze")), "verify", "--man=no", str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        words = [line for line in (done.stdout + done.stderr).splitlines() if str(copy) in line or done.returncode]
        assert bool(words) is bool(wrong), words


def test_its_command_and_its_config_are_real(tmp_path: Path) -> None:
    program, verb, *words = shlex.split(fields()["ExecStart"])
    command = get_group(app.app).commands[verb]
    known = {option for parameter in command.params for option in parameter.opts}
    assert (program, verb) == (PROGRAM, "up")
    assert {word for word in words if word.startswith("-")} == {"--config"} <= known
    assert words[1] in PAGE.read_text()
    (tmp_path / "host.yaml").write_text(example())
    assert load(HostConfig, tmp_path / "host.yaml").num_workers == 8


def test_times_and_ends_fit_the_command() -> None:
    unit, host = fields(), HostConfig.__struct_fields__
    defaults = dict(zip(host[-len(HostConfig.__struct_defaults__) :], HostConfig.__struct_defaults__, strict=True))
    assert float(unit["TimeoutStopSec"]) > defaults["stop_timeout_s"]
    assert unit["RestartPreventExitStatus"] == str(app.EXIT_USAGE)
    assert (unit["KillMode"], unit["Restart"], unit["OOMPolicy"]) == ("mixed", "on-failure", "continue")


def test_gpus_nics_and_compilers_stay_in_reach() -> None:
    """ProtectClock is a DeviceAllow, and one of these closes all other devices."""
    closing = {"PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute"}
    assert not closing & fields().keys()
    assert fields()["LimitMEMLOCK"] == "infinity"


@pytest.mark.timeout(TEST_S)
def test_its_process_goes_on_after_sighup_and_drains_after_sigterm(tmp_path: Path) -> None:
    """As systemd starts it: / as its folder, no terminal, nothing in its environment but what the unit says."""
    write_model(tmp_path / "model")
    control, page, host = free_ports(3)
    (tmp_path / "given.yaml").write_text(example())
    overrides = [
        "num_workers=1", f"http_listen=127.0.0.1:{host}", f"control.listen=127.0.0.1:{control}",
        f"control.http_listen=127.0.0.1:{page}", f"worker.model={tmp_path}/model", "worker.transport=cpu",
        "worker.listen=127.0.0.1:0",
    ]  # fmt: skip
    (tmp_path / "host.yaml").write_text(dump(load(HostConfig, tmp_path / "given.yaml", overrides)))
    _, *words = shlex.split(fields()["ExecStart"].replace("/etc/crossdock", str(tmp_path)))
    command = [sys.executable, "-P", "-m", "crossdock", *words]
    name, _, value = fields()["Environment"].partition("=")
    environment = {name: value.replace("/var/cache", str(tmp_path)), "PATH": os.defpath, "LANG": "C.UTF-8"}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    with (tmp_path / "journal").open("w+") as journal:
        started = {"stdin": subprocess.DEVNULL, "stdout": journal, "stderr": journal, "start_new_session": True}
        with subprocess.Popen(command, cwd="/", env=environment, **started) as process:  # type: ignore[call-overload]
            try:
                assert serves(process.pid, environment, END_S)
                process.send_signal(signal.SIGHUP)
                time.sleep(1)
                assert serves(process.pid, environment, 0)
                process.send_signal(signal.SIGTERM)
                assert process.wait(float(fields()["TimeoutStopSec"])) == 0
            finally:
                process.kill()
        journal.seek(0)
        assert journal.read().rstrip().endswith("stopped")


def serves(pid: int, environment: dict[str, str], within_s: float) -> bool:
    """Whether `crossdock ready`, as the page has it, says so in time."""
    until = time.monotonic() + within_s
    while True:
        command = [sys.executable, "-P", "-m", "crossdock", "ready", "--pid", str(pid)]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=END_S, check=False)
        if done.returncode == 0 or time.monotonic() > until:
            return done.returncode == 0
