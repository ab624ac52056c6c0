"""The doctor: each fault on paper is found, with cause and cure; a healthy host has none; a real pass on this one."""

from __future__ import annotations

import io
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from crossdock.cli import app as cli
from crossdock.common.config import ConfigFileError
from crossdock.doctor import hardware, rank, reach, run, system, trial
from crossdock.doctor.findings import Finding, Level
from crossdock.protocol.v1 import topology_pb2
from crossdock.topo.facts import host_facts
from ep_kernels.topology import PeerTrial, probe
from tests.machines import hgx_h100, mig_h100, no_gpu, pcie_box
from tests.machines.host import Host

HEALTHY = system.SystemFacts(
    open_files=65536, locked_bytes=-1, shm_bytes=1 << 30, memory_bytes=64 << 30, num_cpus=64,
    cache_bytes=1 << 40, busy_ports=(),
)  # fmt: skip


def facts_of(host: Host, folder: Path) -> topology_pb2.HostFacts:
    return host_facts(facts=probe(*host.write(folder)))


def bad(findings: Any) -> dict[str, Finding]:
    """Those with something to do, by check; each must say cause and cure."""
    found = {finding.check: finding for finding in findings if finding.level in (Level.WARN, Level.FAIL)}
    for finding in found.values():
        assert finding.what
        assert finding.cause
        assert finding.cure
    return found


def test_a_healthy_hgx_has_one_port_down_and_nothing_else(tmp_path: Path) -> None:
    found = bad(hardware.judge_host(facts_of(hgx_h100(), tmp_path), needs_gpus=True))
    assert list(found) == ["rdma-state"]
    assert found["rdma-state"].what == "mlx5_2/1 is DOWN, Disabled"


def test_mig_memory_errors_and_heat(tmp_path: Path) -> None:
    found = bad(hardware.judge_host(facts_of(mig_h100(), tmp_path), needs_gpus=True))
    assert set(found) == {"mig", "ecc", "clocks", "nvlink-domain", "rdma-state"}
    assert found["ecc"].level is Level.FAIL
    assert found["ecc"].what.startswith("GPU 5: 2 uncorrected")
    assert "heat (hardware)" in found["clocks"].what
    assert found["nvlink-domain"].what == "7 of 8 GPUs"
    assert "nvidia-smi -i 2 -mig 0" in found["mig"].cure


@pytest.mark.parametrize(
    ("whole", "needs_gpus", "level"), [(0, True, Level.FAIL), (0, False, Level.WARN), (1, True, Level.WARN)]
)
def test_mig_is_refused_where_no_whole_gpu_is_left(whole: int, needs_gpus: bool, level: Level, tmp_path: Path) -> None:
    hgx = hgx_h100()
    gpus = tuple(replace(gpu, mig=number >= whole) for number, gpu in enumerate(hgx.gpus))
    found = hardware.judge_host(facts_of(replace(hgx, gpus=gpus), tmp_path), needs_gpus=needs_gpus)
    mig = [finding for finding in found if finding.check == "mig"]
    assert {finding.level for finding in mig} == {level}
    assert len(mig) == len(gpus) - whole
    assert "which have no peer access" in mig[0].cause


@pytest.mark.parametrize(
    ("counts", "what"),
    [
        ((0, 0), "nobody computes on them"),
        ((0, None), "NVML does not count the processes of GPU 1"),
        ((None, 1), "GPU 1: 1 process"),
        ((0, 1), "GPU 1: 1 process"),
        ((2, 1), "GPU 0: 2 processes, GPU 1: 1 process"),
    ],
)
def test_gpus_that_others_use_are_named(counts: tuple[int | None, ...], what: str, tmp_path: Path) -> None:
    """As NVML counts processes of time-slicing, which are in other containers; it may not be able to."""
    hgx = hgx_h100()
    gpus = tuple(replace(gpu, num_processes=count) for gpu, count in zip(hgx.gpus, counts, strict=False))
    facts = probe(*replace(hgx, gpus=gpus).write(tmp_path))
    (found,) = hardware.judge_sharing([gpu.num_processes for gpu in facts.gpus])
    level = Level.WARN if "process" in what else Level.OK
    assert (found.check, found.level, found.what) == ("gpu-sharing", Level.SKIPPED if "NVML" in what else level, what)
    request = run.DoctorRequest(transport="cpu", passes=False)
    assert [one for one in run.examine(request, facts) if one.check == "gpu-sharing"] == [found]
    assert not list(hardware.judge_sharing([])), "a host without GPUs"


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"num_nvlinks": 0, "nvlink_domain": ""}, "nvlink", Level.FAIL),
        ({"num_nvlinks": 17}, "nvlink", Level.WARN),
        ({"fabric_state": "in progress"}, "nvlink", Level.FAIL),
        ({"ecc_uncorrected": 1}, "ecc", Level.FAIL),
    ],
)
def test_one_sick_gpu(tmp_path: Path, change: dict[str, Any], check: str, level: Level) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    for name, value in change.items():
        setattr(host.gpus[3], name, value)
    found = bad(hardware.judge_host(host, needs_gpus=True))
    assert found[check].level is level
    assert found[check].what.startswith("GPU 3: ")


@pytest.mark.parametrize(("needs_gpus", "level"), [(True, Level.FAIL), (False, Level.WARN)])
def test_gpus_older_than_the_kernels(tmp_path: Path, needs_gpus: bool, level: Level) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    for gpu in host.gpus:
        gpu.capability = "8.0"
    found = bad(hardware.judge_host(host, needs_gpus=needs_gpus))
    assert found["capability"].level is level
    assert "compute capability 8.0" in found["capability"].what
    assert "nvlink" not in found, "nothing is wrong with the links"
    assert run.choose("auto", host) == ("cpu", 2)


def test_a_power_cap_is_no_finding(tmp_path: Path) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    host.gpus[0].held_back_by.append("power cap")
    assert "clocks" not in bad(hardware.judge_host(host, needs_gpus=True))


def test_roce(tmp_path: Path) -> None:
    host = facts_of(pcie_box(), tmp_path)
    assert set(bad(hardware.judge_host(host, needs_gpus=False))) == {"rdma-state", "rdma-distance"}
    host.nics[0].mtu_bytes, host.nics[0].roce = 1500, "IB/RoCE v1"
    assert {"rdma-gid", "rdma-mtu"} <= set(bad(hardware.judge_host(host, needs_gpus=False)))


def test_no_gpu_is_a_failure_only_where_gpus_are_wanted(tmp_path: Path) -> None:
    host = facts_of(no_gpu(), tmp_path)
    assert not bad(hardware.judge_host(host, needs_gpus=False))
    assert bad(hardware.judge_host(host, needs_gpus=True))["driver"].level is Level.FAIL


def trials_of(host: topology_pb2.HostFacts, gbps: float) -> dict[tuple[str, str], PeerTrial]:
    names = [gpu.pci_bus_id for gpu in host.gpus]
    return {(a, b): PeerTrial(True, gbps, "") for a in names for b in names if a != b}


def test_peer_access_as_tried(tmp_path: Path) -> None:
    host = facts_of(hgx_h100(), tmp_path)
    trials = trials_of(host, 390.0)
    assert not bad(hardware.judge_trials(host, trials, ""))
    one, other = host.gpus[2].pci_bus_id, host.gpus[6].pci_bus_id
    trials[one, other] = PeerTrial(False, 0.0, "cuCtxEnablePeerAccess: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
    trials[other, one] = PeerTrial(True, 100.0, "")
    found = bad(hardware.judge_trials(host, trials, ""))
    assert found["peer-access"].level is Level.FAIL
    assert found["peer-access"].what.startswith("GPUs 2-6: cuCtxEnablePeerAccess")
    assert found["peer-bandwidth"].what.startswith("GPU 6 to GPU 2: 100 GB/s, expected at least 239")
    skipped = list(hardware.judge_trials(host, {}, "a GPU or its driver hangs"))
    assert [(one.level, one.what) for one in skipped] == [(Level.SKIPPED, "a GPU or its driver hangs")]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"open_files": 256}, "open-files"),
        ({"locked_bytes": 65536}, "memlock"),
        ({"shm_bytes": 1 << 20}, "shm"),
        ({"memory_bytes": 1 << 20}, "memory"),
        ({"num_cpus": 2}, "processors"),
        ({"cache_bytes": -1}, "kernel-cache"),
        ({"busy_ports": (7400,)}, "ports"),
    ],
)
def test_each_limit(change: dict[str, Any], check: str) -> None:
    asked = {"num_ranks": 8, "has_gpus": True, "has_nics": True}
    assert not bad(system.judge_system(HEALTHY, **asked))
    assert list(bad(system.judge_system(replace(HEALTHY, **change), **asked))) == [check]


@pytest.mark.parametrize(("num_ranks", "words"), [(1, "64 for 1 rank"), (2, "64 for 2 ranks")])
def test_one_rank_is_no_ranks(num_ranks: int, words: str) -> None:
    found = system.judge_system(HEALTHY, num_ranks=num_ranks, has_gpus=False, has_nics=False)
    assert words in [finding.what for finding in found]


def test_the_memory_of_a_container_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  9000000 kB\n")
    assert system.read(proc=tmp_path, cgroup=tmp_path).memory_bytes == 9000000 << 10
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\n")
    assert system.read(proc=tmp_path, cgroup=tmp_path).memory_bytes == 2000000
    assert system.read(proc=tmp_path / "no", shm=tmp_path / "no").shm_bytes == -1


def test_reachable_and_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (here,) = reach.judge_addresses([address], 5.0)
        assert here.level is Level.OK
    (gone,) = reach.judge_addresses([address], 5.0)
    assert gone.level is Level.FAIL
    assert list(bad(reach.judge_addresses(["nonsense"], 1.0))) == ["reachable"]
    assert bad(reach.judge_group(address, 2.0))["control-plane"].level is Level.FAIL


def answer(rank: int, **changes: Any) -> dict[str, Any]:
    step = {
        "wrong": False,
        "error": 0.0,
        "took_us": [500.0] * 3,
        "remote_bytes": 171_000_000,
    }
    steps = {"latency": {**step, "took_us": [11.0] * 3}, "bandwidth": step}
    for path, value in changes.items():
        name, field = path.split("__")
        steps[name] = {**steps[name], field: value}
    return {"rank": rank, "steps": steps}


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"latency__wrong": True}, "nvlink-pass", Level.FAIL),
        ({"latency__took_us": [90.0] * 3}, "nvlink-latency", Level.WARN),
        ({"bandwidth__took_us": [1700.0] * 3}, "nvlink-bandwidth", Level.WARN),
    ],
)
def test_the_answers_of_a_pass(changes: dict[str, Any], check: str, level: Level) -> None:
    assert not bad(trial.judge_trial("nvlink", [answer(0), answer(1)], 478.0))
    found = bad(trial.judge_trial("nvlink", [answer(0, **changes), answer(1, **changes)], 478.0))
    assert {name: finding.level for name, finding in found.items()} == {check: level}


def test_the_wait_for_a_rank_that_comes_late_is_not_the_pass() -> None:
    late = answer(1, latency__took_us=[11.0, 500.0, 500.0]), answer(0, latency__took_us=[900.0, 11.0, 11.0])
    assert not bad(trial.judge_trial("nvlink", late, 478.0))


def test_a_rank_that_fails_is_named() -> None:
    answers = [{"rank": 0, "failed": "PeerTimeout: rank 1"}, {"rank": 1, "failed": "no answer before the deadline"}]
    found = bad(trial.judge_trial("cpu", answers, 0.0))
    assert found["cpu-pass"].what == "rank 0: PeerTimeout: rank 1; rank 1: no answer before the deadline"


def test_an_answer_of_another_version_is_a_finding() -> None:
    for other in ({"rank": 1}, {"rank": 1, "steps": {}}, {"rank": 1, "steps": {"latency": {}}}):
        found = bad(trial.judge_trial("cpu", [answer(0), other], 0.0, name="network"))
        assert "rank 1: an answer without steps" in found["network-pass"].what
    assert {step.name for steps in rank.STEPS.values() for step in steps} == trial.STEP_NAMES


def test_a_rank_that_dies_or_hangs_does_not_hang_the_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    half = 'echo "{\\"rank\\": 0, \\"st"; exit 9'
    late = "no answer before the deadline"
    for script, said in (("exit 7", "exit status 7"), ("sleep 60", late), (half, "exit status 9")):
        program = tmp_path / "rank"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        assert trial.run_trial("cpu", 1, deadline_s=0.5) == [{"rank": 0, "failed": said}]


def test_a_rank_that_says_much_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "rank"
    script = "if [ $5 = 1 ]; then yes | head -c 300000 >&2; echo last >&2; touch $7; fi\n"
    program.write_text(f"#!/bin/sh\n{script}while [ ! -e $7 ]; do sleep 0.05; done\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    answers = [answer["failed"] for answer in trial.run_trial("cpu", 2, deadline_s=10.0)]
    assert answers == ["exit status 7", "last"]


def test_a_user_without_a_home_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    seen = system.read()
    assert seen.cache_bytes == -1
    assert "kernel-cache" in bad(system.judge_system(seen, num_ranks=1, has_gpus=True, has_nics=False))


def test_the_domain_decides_what_is_tried(tmp_path: Path) -> None:
    assert run.choose("auto", facts_of(hgx_h100(), tmp_path)) == ("nvlink", 8)
    assert run.choose("auto", facts_of(mig_h100(), tmp_path)) == ("nvlink", 7)
    assert run.choose("auto", facts_of(pcie_box(), tmp_path)) == ("cpu", 2)
    assert run.choose("cpu", facts_of(hgx_h100(1), tmp_path)) == ("cpu", 2)
    with pytest.raises(ConfigFileError, match="--transport"):
        list(run.examine(run.DoctorRequest(transport="pigeon"), probe(*no_gpu(1).write(tmp_path))))


def test_it_is_shown_with_cause_and_cure() -> None:
    findings = [Finding("a", Level.OK, "fine"), Finding("b", Level.WARN, "odd", "because", "do this")]
    out = io.StringIO()
    assert run.show(findings, Console(file=out, width=100)) == findings
    assert "cause: because" in out.getvalue()
    assert out.getvalue().splitlines()[-1] == "1 ok, 1 warn"
    assert (run.exit_code(findings, strict=False), run.exit_code(findings, strict=True)) == (0, 1)
    assert run.as_dict(findings, strict=True)["ok"] is False


def test_what_another_host_says_moves_no_cursor() -> None:
    answers = [{"rank": 0, "failed": "x\x1b[2J\x9b1A"}, {"rank": 1, "failed": "y"}]
    out = io.StringIO()
    run.show(trial.judge_trial("cpu", answers, 0.0, name="network"), Console(file=out, width=100))
    assert "x\\u001b[2J" in out.getvalue()
    assert all(line.isprintable() for line in out.getvalue().splitlines())


def test_a_real_pass_on_this_host() -> None:
    """Two processes over shared memory: right answers, and exit status 0 where nothing fails."""
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--transport", "cpu"])
    data = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in data["findings"]}
    assert found["cpu-pass"]["level"] == "ok", found["cpu-pass"]
    assert {"cpu-latency", "cpu-bandwidth"} <= set(found)
    failed = [finding for finding in data["findings"] if finding["level"] == "fail"]
    assert done.exit_code == bool(failed)
