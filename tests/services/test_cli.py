"""The command as people meet it: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import typer.core
import typer.main

import crossdock
from crossdock.cli.app import app, main
from crossdock.common.announce import Addresses, parse
from crossdock.common.config import HostConfig
from tests.services.cluster import FORM_S, TEST_S
from tests.services.control_world import unused_address
from tests.tools import needs

pytestmark = pytest.mark.timeout(TEST_S)


Command = Callable[..., subprocess.CompletedProcess[str]]


def crossdock_command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crossdock", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=FORM_S, check=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The same in this process, which costs no other one its start."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["crossdock", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(args, int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def control() -> Iterator[Addresses]:
    free = ["--set", "listen=127.0.0.1:0", "--set", "http_listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "crossdock", "control", *free, "--set", "recover_s=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = parse(process.stdout.readline())
            assert addresses is not None
            yield addresses
            process.send_signal(signal.SIGTERM)
            assert process.wait(FORM_S) == 0
        finally:
            process.kill()


def test_help_names_every_command_and_the_exit_is_clean() -> None:
    done = crossdock_command("--help")
    assert done.returncode == 0
    for name in (
        "up",
        "control",
        "worker",
        "status",
        "demo",
        "topo",
        "memory",
        "tune",
        "doctor",
        "deep-ep",
        "drain",
        "version",
    ):
        assert f" {name} " in done.stdout


def test_help_says_how_many_workers_there_are(here: Command) -> None:
    (count,) = (field.default for field in msgspec.structs.fields(HostConfig) if field.name == "num_workers")
    assert f"by default {count}." in " ".join(here("up", "--help").stdout.split())


def test_no_command_shows_the_help() -> None:
    done = crossdock_command()
    assert "Usage" in done.stdout + done.stderr


def test_deep_ep_names_the_folder_that_holds_it(here: Command) -> None:
    done = here("deep-ep")
    assert (Path(done.stdout.strip()) / "deep_ep" / "__init__.py").is_file()


def test_deep_ep_says_which_engines_were_tried(here: Command) -> None:
    recorded = json.loads(here("deep-ep", "--json").stdout)["engines"]
    said = here("deep-ep", "--engines").stdout.splitlines()
    assert said == [f"{each['engine']} {each['version']}: {', '.join(each['calls'])}" for each in recorded]
    assert {line.split()[0] for line in said} >= {"SGLang", "Megatron-Core"}


def test_version_names_what_it_stands_on() -> None:
    done = crossdock_command("version")
    assert done.returncode == 0
    assert f"crossdock {crossdock.__version__}" in done.stdout
    assert "grpcio " in done.stdout


def test_version_as_json(here: Command) -> None:
    said = json.loads(here("version", "--json").stdout)
    assert said["crossdock"] == crossdock.__version__
    assert {"python", "grpcio", "protobuf", "torch", "transformers"} < set(said)


def test_other_small_commands_as_json(here: Command) -> None:
    assert Path(json.loads(here("deep-ep", "--json").stdout)["path"], "deep_ep").is_dir()


@needs("openssl")
def test_certificates_as_json(here: Command, tmp_path: Path) -> None:
    made = json.loads(here("certs", str(tmp_path), "--json").stdout)["configs"]
    assert {Path(path).name for path in made} >= {"control.yaml", "worker.yaml"}


def test_every_command_with_output_offers_json() -> None:
    runs = {"up", "control", "worker"}  # they serve until stopped
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    for name, one in command.commands.items():
        options = {flag for parameter in one.params for flag in parameter.opts}
        assert name in runs or "--json" in options, name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "crossdock", "--show-completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FORM_S, check=True, env=env)
    assert "_CROSSDOCK_COMPLETE" in done.stdout
    if shell == "bash":
        asked = {"_CROSSDOCK_COMPLETE": "complete_bash", "COMP_WORDS": "crossdock stat", "COMP_CWORD": "1"}
        done = subprocess.run(
            command[:3], capture_output=True, text=True, timeout=FORM_S, check=False, env={**env, **asked}
        )
        assert done.stdout.split() == ["status"]


def test_a_transport_is_checked_before_anything_starts(here: Command, tmp_path: Path) -> None:
    done = here("up", "-m", str(tmp_path), "--transport", "pigeon", "--log-dir", str(tmp_path / "logs"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "worker.transport: expected one of cpu, nvlink, got 'pigeon'" in done.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["control", "--set", "lisen=x"], "lisen"),
        (["control", "--config", "gone.yaml"], "gone.yaml"),
        (["control", "--set", "listen=nowhere"], "host:port"),
        (["worker"], "model"),
        (["up"], "--model"),
        (["up", "--model", "m", "--join", "a:1", "--listen", "b:2"], "--join"),
        (["up", "--model", "m", "--join", "a:1", "--world-size", "4"], "--join: expected no --world-size"),
        (["up", "--model", "m", "--network", "udp"], "network.provider: expected tcp, verbs"),
        (["up", "--model", "m", "--world-size", "9"], "control.world_size: expected num_workers, 4, or worker.network"),
        (["up", "--model", "m", "--workers", "0"], "num_workers"),
        (["up", "--model", "m", "--workers", "many"], "--workers"),
        (["up", "--model", "m", "--dtype", "int3"], "dtype"),
        (["demo", "--family", "dense"], "qwen3_moe, mixtral, deepseek_v3"),
        (["demo", "--transport", "pigeon"], "pigeon"),
        (["demo", "--workers", "0"], "--workers"),
        (["status", "--target", "nowhere"], "host:port"),
        (["status", "--timeout", "nan"], "--timeout"),
        (["topo", "--target", "a:1,b"], "host:port"),
        (["tune", "--transport", "pigeon"], "pigeon"),
        (["tune", "--transport", "cpu", "--topk", "300"], "topk"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_bad_usage_is_status_2_with_the_word_on_stderr(here: Command, args: list[str], word: str) -> None:
    done = here(*args)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    done = crossdock_command("--debug", "control", "--set", "lisen=x")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_a_port_in_use_is_status_2(control: Addresses) -> None:
    done = crossdock_command("control", "--set", f"listen={control.address}", "--set", "http_listen=127.0.0.1:0")
    assert done.returncode == 2
    assert control.address in done.stderr
    assert "Traceback" not in done.stderr


def test_status_of_a_forming_group_is_status_1(here: Command, control: Addresses) -> None:
    done = here("status", "--target", control.address, "--timeout", "60")
    assert done.returncode == 1
    assert "FORMING" in done.stdout
    assert control.address in done.stdout


def test_status_as_json(here: Command, control: Addresses) -> None:
    done = here("status", "--target", control.address, "--timeout", "60", "--json")
    said = json.loads(done.stdout)
    assert said["state"] == "FORMING"
    assert said["world_size"] == 4
    assert said["members"] == []
    assert said["lost_ranks"] == [0, 1, 2, 3]


def test_status_of_nobody_is_status_3() -> None:
    with unused_address() as address:
        done = crossdock_command("status", "--target", address, "--timeout", "2")
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_up_says_why_a_model_cannot_be_served() -> None:
    done = crossdock_command("up", "--model", "no-such-folder", "--workers", "1", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "no-such-folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_ends_as_the_worker_did_that_cannot_serve_the_model(tmp_path: Path) -> None:
    """A folder that holds no checkpoint: the worker finds out, `up` has its exit status."""
    done = crossdock_command("up", "--model", str(tmp_path), "--workers", "1", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
