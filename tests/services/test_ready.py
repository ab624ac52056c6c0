"""`crossdock ready`, which the images' HEALTHCHECK runs: finds address and scheme by the command line of a process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from crossdock.cli import app, certs, ready
from crossdock.common.config import ConfigFileError
from crossdock.common.http import page_of, serve_http
from crossdock.common.metrics import WorkerMetrics
from crossdock.common.security import Security, load_security
from tests.deploy.bed.processes import free_ports
from tests.house.tree import ROOT
from tests.tools import needs

TIMEOUT_S = 120
AS_TINI = ("sh", "-c", 'shift; "$@" & trap "kill $!; wait" TERM; wait', "tini", "--")
"""Process 1 of a container, with the words of tini's own command line."""


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`crossdock WORDS` under a process that has them on its command line, once it listens."""
    command = [*AS_TINI, sys.executable, "-P", "-m", "crossdock", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("crossdock-ready")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def healthcheck(target: str) -> list[str]:
    """The command of the Dockerfile's HEALTHCHECK for one target."""
    text = (ROOT / "Dockerfile").read_text().partition(f" AS {target}\n")[2]
    found: list[str] = json.loads(re.findall(r"^HEALTHCHECK .*?CMD (\[.*\])$", text, re.MULTILINE)[0])
    return found


def checked(pid: int, folder: Path, target: str = "control") -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the HEALTHCHECK, called in a folder with files that nobody must run."""
    (folder / "typer.py").write_text("raise SystemExit('EXECUTED FROM CWD')")
    (folder / "crossdock").mkdir(exist_ok=True)
    program, *words = healthcheck(target)
    assert program == "crossdock"
    command = [sys.executable, "-P", "-m", program, *words, "--pid", str(pid)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@needs("openssl")
@pytest.mark.parametrize("http", ["plain", "tls", "mtls"])
def test_a_process_is_asked_as_it_was_configured(http: str, tmp_path: Path) -> None:
    certs.make_all(tmp_path / "certs")
    grpc, page = free_ports(2)
    guard = load_security(tmp_path / "certs" / "control.yaml")
    config = tmp_path / "control.yaml"
    config.write_text(
        f"http_listen: 0.0.0.0:{page}\nsecurity: {{cert_file: {guard.cert_file}, key_file: {guard.key_file}, "
        f"ca_file: {guard.ca_file}, http: {http}}}\n"
    )
    with running("control", "--config", str(config), "--set", f"listen=127.0.0.1:{grpc}") as process:
        code, said, words = checked(process.pid, tmp_path)
        assert (code, said.split()[0], words) == (0, "FORMING", "")
        config.write_text(f"http_listen: 127.0.0.1:{free_ports(1)[0]}\n")
        code, _, words = checked(process.pid, tmp_path)
        assert code == 3
        assert "no answer at 127.0.0.1:" in words


@needs("openssl")
@pytest.mark.parametrize(
    ("http", "is_ready", "flags"), [("plain", False, []), ("tls", True, []), ("tls", True, ["--json"])]
)
def test_up_is_asked_by_its_options(
    http: str,
    is_ready: bool,
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certs.make_all(tmp_path)
    guard = Security(msgspec.structs.replace(load_security(tmp_path / "host.yaml"), http=http))
    page = page_of(WorkerMetrics().registry)
    with contextlib.closing(serve_http("127.0.0.1:0", page, lambda: (is_ready, "what it says"), guard)) as server:
        words = f"up --model /m -n 2 --security {tmp_path}/host.yaml --set http_listen={server.address}"
        monkeypatch.setattr(ready, "words_of", lambda pid: [*words.split(), "--set", f"worker.security.http={http}"])
        monkeypatch.setattr(sys, "argv", ["crossdock", "ready", *flags])
        with pytest.raises(SystemExit) as ended:
            app.main()
    told = json.dumps({"ready": is_ready, "said": "what it says"}, indent=1) if flags else "what it says"
    assert (ended.value.code, capsys.readouterr().out) == (int(not is_ready), f"{told}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tini -- crossdock up --model /models", "up --model /models"),
        ("/opt/crossdock/bin/python3 -P -m crossdock --debug worker --config f", "--debug worker --config f"),
        ("/sbin/docker-init -- tini -- /app/bin/crossdock control", "control"),
    ],
)
def test_the_words_behind_the_command(line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: ("\0".join(line.split()) + "\0").encode())
    assert ready.words_of(1) == words.split()


@pytest.mark.parametrize("line", ["tini -- crossdock ready", "sleep 5", "tini -- crossdock", ""])
def test_any_other_process_is_named(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: ("\0".join(line.split()) + "\0").encode())
    with pytest.raises(ConfigFileError, match=rf"--pid: expected a process of .* worker, got {line or 'none'} \(7\)$"):
        ready.words_of(7)


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0"])
def test_a_port_that_only_the_process_knows(listen: str) -> None:
    with pytest.raises(ConfigFileError, match=r"http_listen: expected host:port with a fixed port, got"):
        ready.readiness(listen, load_security(None))


def test_both_images_ask_the_same_way() -> None:
    assert healthcheck("control") == healthcheck("worker") == ["crossdock", "ready"]
