"""vLLM's MoE layer over two hosts: network, PID and mount namespaces of their own, which share neither /dev/shm nor
memory, so that vLLM itself takes them for two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests import tools
from tests.chaos.netns import Fabric, Host, NoNamespaces
from tests.vllm.layers import CLASSES, TOKENS

tools.require("vllm")

PER_HOST, PORT, WAIT_S = 2, 29555, 900
CASES = [f"{plugin} {backend}" for plugin, backend in CLASSES]
ALONE = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "sh",
    "-c",
    'mount -t tmpfs none /dev/shm && exec "$@"',
    "sh",
)


def start(host: Host, number: int, store: str, folder: Path) -> subprocess.Popen[str]:
    """The ranks of a host, with a config of their own."""
    config = folder / f"host-{number}.yaml"
    config.write_text(yaml.safe_dump({"network": {"listen": f"{host.address}:0"}, "exit_on_fault": False}))
    env = {**os.environ, "CROSSDOCK_CONFIG": str(config), "GLOO_SOCKET_IFNAME": "eth0", "VLLM_LOGGING_LEVEL": "ERROR"}
    program = [sys.executable, "-m", "tests.vllm.over_hosts", str(number * PER_HOST), str(PER_HOST), store, *CASES]
    command = [*host.enter, *ALONE, *program]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_layers_over_two_hosts(tmp_path: Path) -> None:
    try:
        fabric = Fabric()
    except NoNamespaces as error:
        tools.skip("network namespaces", error)
    started: list[subprocess.Popen[str]] = []
    try:
        hosts = [fabric.host(f"host{number}", number + 1) for number in range(len(TOKENS) // PER_HOST)]
        store = f"{hosts[0].address}:{PORT}"
        started = [start(host, number, store, tmp_path) for number, host in enumerate(hosts)]
        said = [process.communicate(timeout=WAIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
        fabric.close()
    answers = [json.loads(line) for out, _ in said for line in out.splitlines() if line.startswith("{")]
    assert [answer["rank"] for answer in answers] == list(range(len(TOKENS))), "".join(err[-4000:] for _, err in said)
    for answer in answers:
        assert not answer["one_host"]
        assert "this group has several: set `network` in the file that CROSSDOCK_CONFIG names" in answer["without"]
        assert {case: name for case, (name, _) in answer["cases"].items()} == {
            f"{plugin} {backend}": name for (plugin, backend), name in CLASSES.items()
        }
    assert max(error for answer in answers for _, error in answer["cases"].values()) > 0, "rows have travelled in bf16"
