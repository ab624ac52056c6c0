"""What the command says to an operator before anything starts, and what a process says of itself."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import crossdock
from crossdock.cli import app, config_page
from crossdock.common import announce, rpc
from crossdock.common.addresses import not_bound
from crossdock.common.call_errors import Unavailable, error_of
from crossdock.common.config import ConfigFileError, ControlConfig, HostConfig, WorkerConfig, load
from crossdock.common.metrics import HostMetrics
from crossdock.common.settings import DockerConfig, ElectionConfig, KubernetesConfig
from crossdock.common.small_files import write_text
from crossdock.control import process
from crossdock.demo import report
from crossdock.host import run
from crossdock.host.supervisor import HopelessError, Supervisor, SupervisorError, Watched
from crossdock.protocol.v1.control_pb2 import Member
from crossdock.tune import run as tune
from crossdock.worker.group import control_client


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `crossdock ARGS` in this process."""
    monkeypatch.setattr(sys, "argv", ["crossdock", *args])
    with pytest.raises(SystemExit) as ended:
        app.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_the_version(flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(capsys, monkeypatch, flag) == (0, f"crossdock {crossdock.__version__}\n", "")


def test_a_folder_that_cannot_be_made_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, said = command(capsys, monkeypatch, "certs", "/proc/x")
    assert (code, said) == (
        2,
        "error: /proc/x: expected a file or folder of this user's, got: No such file or directory\n",
    )


def test_a_full_disk_is_named_by_its_file(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="full") as said:
        write_text(full, "x" * 100_000)
    assert (said.value.errno, said.value.filename) == (errno.ENOSPC, str(full))
    assert app.exit_status(said.value) == 2
    assert app.exit_status(OSError(errno.ENOSPC, "No space left on device")) == 1
    assert app.exit_status(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["num_workers=0"], "num_workers: expected int >= 1, got 0"),
        (["worker.network.provider=pigeon"], "worker.network.provider: expected"),
        (["worker.network.listen=x"], "worker.network.listen: expected host:port"),
        (["worker.security.access.worker_names=[1]"], "worker.security.access.worker_names[0]: expected str, got 1"),
        (["control.listen=127.0.0.1:65535"], "control.http_listen: expected one beside listen 127.0.0.1:65535"),
    ],
)
def test_every_refusal_says_field_expected_got(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigFileError) as said:
        load(HostConfig, None, ["worker.model=/m", *overrides])
    assert str(said.value).startswith(f"configuration: {words}")
    assert "`" not in str(said.value)


def test_a_missing_field_is_named_with_its_path() -> None:
    with pytest.raises(ConfigFileError, match=r"^configuration: worker\.model: expected a value, got none$"):
        load(HostConfig, None, ["worker.dtype=float32"])


def test_two_groups_on_one_host_need_one_flag() -> None:
    assert ControlConfig().http_listen == "127.0.0.1:7401"
    assert ControlConfig(listen="0.0.0.0:9400").http_listen == "127.0.0.1:9401"
    assert ControlConfig(listen="127.0.0.1:0").http_listen == "127.0.0.1:0"
    assert ControlConfig(listen="127.0.0.1:9400", http_listen="127.0.0.1:1").http_listen == "127.0.0.1:1"


def test_a_foreign_address_is_not_called_taken(tmp_path: Path) -> None:
    group = Supervisor(ControlConfig(listen="192.0.2.7:7400"), [WorkerConfig(model="/m")], tmp_path)
    with pytest.raises(
        HopelessError, match=r"^control\.listen: expected an address of this host, got 192\.0\.2\.7:7400"
    ):
        group.start()
    assert "where nothing listens yet" in not_bound("a:1", OSError(errno.EADDRINUSE, "in use"))


def test_a_name_that_does_not_resolve() -> None:
    class Error(rpc.grpc.RpcError, rpc.grpc.Call):  # type: ignore[misc]
        def __init__(self, details: str) -> None:
            self._details = details

        def code(self) -> rpc.grpc.StatusCode:
            return rpc.grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return self._details

        def trailing_metadata(self) -> tuple[()]:
            return ()

    Error.__abstractmethods__ = frozenset()
    for words in (
        "errors resolving nosuch:1: [field:hostname lookup error:address lookup failed for nosuch",
        "DNS resolution failed for nosuch:1: C-ares status is not ARES_SUCCESS",
    ):
        assert str(error_of(Error(words))) == "no such host: nosuch"


def test_a_model_without_config_json_starts_nothing(tmp_path: Path) -> None:
    config = HostConfig(worker=WorkerConfig(model=str(tmp_path)), log_dir=str(tmp_path / "logs"))
    with pytest.raises(ConfigFileError, match=r"^worker\.model: expected a directory of a checkpoint, with its config"):
        run.run_host(config, Console())
    assert not (tmp_path / "logs").exists()


def test_workers_without_a_gpu_each_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "num_gpus", lambda: 2)
    two = HostConfig(worker=WorkerConfig(model="/m", transport="nvlink"), num_workers=2)
    run.check_transport(two)
    for worker, count in ((two.worker, 3), (WorkerConfig(model="/m", transport="nvlink", device=1), 2)):
        with pytest.raises(ConfigFileError, match=rf"nvlink: expected a GPU for each of {count} workers.* got 2 here"):
            run.check_transport(HostConfig(worker=worker, num_workers=count))


def test_tune_has_as_many_ranks_as_the_transport() -> None:
    with pytest.raises(
        tune.OptionError, match=r"--ranks: expected at most 64, the most ranks of transport cpu, got 100"
    ):
        tune.chosen("cpu", 100)
    assert tune.chosen("cpu", 64) == ("cpu", 64)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_for_programs_is_not_for_terminals(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    announce.announce("a:1", "a:2", https=False)
    assert bool(capsys.readouterr().out) is not terminal


class Group(Watched):
    """A group that a signal ends at once, or that never comes up."""

    def __init__(self, *, comes_up: bool) -> None:
        super().__init__("127.0.0.1:1", None)
        self._comes_up = comes_up

    def start(self) -> None:
        if self._comes_up:
            raise KeyboardInterrupt
        raise SupervisorError("no")

    def stop(self, timeout_s: float = 40.0) -> None: ...

    def check(self) -> None: ...

    def silent(self) -> str:
        return ""


@contextmanager
def signals_kept() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("named", [False, True])
def test_our_own_log_folder_goes_after_a_clean_end(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, logs = tmp_path / "model", tmp_path / "logs"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = HostConfig(worker=WorkerConfig(model=str(model)), log_dir=str(logs) if named else "")
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda prefix: str(logs))
    monkeypatch.setattr(run.log, "setup", lambda config: None)
    console = Console(quiet=True)
    with signals_kept():
        monkeypatch.setattr(run, "_processes", lambda *_: Group(comes_up=False))
        with pytest.raises(SupervisorError):
            run.run_host(config, console)
        assert logs.exists()  # its logs say why
        monkeypatch.setattr(run, "_processes", lambda *_: Group(comes_up=True))
        assert run.run_host(config, console) == 0
    assert logs.exists() is named


def test_no_created_series() -> None:
    metrics = HostMetrics()
    metrics.process_restarts_total.labels(process="a").inc()
    names = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert "crossdock_process_restarts_total" in names
    assert not [name for name in names if name.endswith("_created")]


def test_phases_are_asked_for_until_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the last records come after the last answer: the demo printed -/-."""
    pages = [[""], [page("dispatch")], [page("dispatch") + page("experts") + page("combine")]]
    monkeypatch.setattr(report, "fetch", lambda members, security: pages.pop(0))
    found = report.phases([Member()])
    assert not pages
    assert [report.quantile(found[phase], 1.0) for phase in report.PHASES] == [1.0, 1.0, 1.0]
    monkeypatch.setattr(report, "fetch", lambda members, security: [""])
    assert set(report.phases([Member()], within_s=0.0)) == set(report.PHASES)


def page(phase: str) -> str:
    name = f'{report.STEP_PHASES}_bucket{{phase="{phase}",le='
    return f"# TYPE {report.STEP_PHASES} histogram\n" + f'{name}"1"}} 3\n{name}"+Inf"}} 3\n'


def test_children_do_not_run_what_lies_in_the_working_directory(tmp_path: Path) -> None:
    """What every process of ours is started with keeps a stray `typer.py` and a folder `crossdock` out."""
    (tmp_path / "typer.py").write_text("raise SystemExit('EXECUTED FROM CWD')")
    (tmp_path / "crossdock").mkdir()
    group = Supervisor(ControlConfig(listen="127.0.0.1:0"), [WorkerConfig(model="/m")], tmp_path / "logs")
    words = group.children[0]._command
    start = words[: words.index("crossdock") + 1]
    group.stop()
    done = subprocess.run([*start, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"crossdock {crossdock.__version__}\n"), done.stderr


def test_every_field_is_explained() -> None:
    """`crossdock config` and docs/configuration.md, which test_generated.py compares."""
    fields = [(kind.__name__, one) for kind in config_page.kinds() for one in config_page.fields_of(kind)]
    assert not [(kind, one.name) for kind, one in fields if not one.meaning]
    lease = next(one for kind, one in fields if (kind, one.name) == ("ControlConfig", "lease_s"))
    assert (lease.type, lease.default) == ("number, > 0, <= 86400 (seconds)", "3.0")
    assert [one.name for kind, one in fields if kind == "WorkerConfig" and not one.default] == ["model"]


def test_a_kubeconfig_that_is_not_there_ends_the_control_plane(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setattr(process.logs, "setup", lambda config, role: None)
    gone = "/proc/nope"
    for config in (
        ControlConfig(election=ElectionConfig(kubeconfig=gone)),
        ControlConfig(kubernetes=KubernetesConfig(kubeconfig=gone)),
    ):
        assert process.run_control(config) == process.EXIT_BAD_CONFIG
    assert caplog.text.count("kubeconfig: expected a file") == 2


def test_a_daemon_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = pytest.importorskip("crossdock.host.docker", reason="the SDK comes with the extra [docker]")
    assert docker._PING_S < docker._CALL_S
    begun = time.monotonic()
    monkeypatch.setattr(docker, "_PING_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "d.sock"))
        silent.listen()
        with pytest.raises(ConnectionError, match=r"^docker\.host: expected a daemon that answers at unix:"):
            docker._connect(DockerConfig(host=f"unix://{tmp_path}/d.sock"))
    assert time.monotonic() - begun < 5


def test_a_worker_without_a_control_plane_warns_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(control_client.time, "monotonic", lambda: now)
    client = control_client.ControlPlaneClient.__new__(control_client.ControlPlaneClient)
    client._silent_until, client._silence_s = 0.0, control_client._SILENCE_S[0]
    while now < 600:
        client._log_absence(Unavailable("gone"))
        now += 1.5
    said = [record for record in caplog.records if "no control plane" in record.getMessage()]
    assert {record.levelname for record in said} == {"WARNING"}
    assert 10 <= len(said) <= 16
