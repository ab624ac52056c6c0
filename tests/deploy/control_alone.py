"""Run the installed control plane by itself, without torch: starts, answers its probes, stops on SIGTERM.

A script, not a pytest file: its environment has `crossdock[control]` and nothing else (`make control-alone`).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common.announce import parse

DEADLINE_S = 120.0


def main() -> None:
    """Exit with a message where something does not hold."""
    for name in ("torch", "numpy", "transformers"):
        if find_spec(name) is not None:
            sys.exit(f"{name}: expected to be absent from the control plane's environment, got it")
    for name in ("leader.kube", "topology.nodes"):
        import_module(f"crossdock.control.{name}")
    crossdock = Path(sys.executable).with_name("crossdock")
    ports = ["--set", "listen=127.0.0.1:0", "--set", "http_listen=127.0.0.1:0"]
    begun = time.monotonic()
    with subprocess.Popen([crossdock, "control", *ports], stdout=subprocess.PIPE, text=True) as control:
        try:
            check(control)
            took_s = time.monotonic() - begun
            control.send_signal(signal.SIGTERM)
            code = control.wait(DEADLINE_S)
        finally:
            control.kill()
    if code != 0:
        sys.exit(f"exit status: expected 0 after SIGTERM, got {code}")
    print(f"control plane without torch: healthy {took_s:.2f} s after its start, stopped by SIGTERM")


def check(control: subprocess.Popen[str]) -> None:
    """Ask each of its three faces."""
    assert control.stdout is not None
    addresses = parse(control.stdout.readline())
    if addresses is None:
        sys.exit("first line of stdout: expected crossdock-ready {...}, got another line or none")
    with grpc.insecure_channel(addresses.address) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S, wait_for_ready=True)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"grpc health: expected SERVING, got {answer.status}")
    direct = build_opener(ProxyHandler({}))
    for path, word in (("livez", "ok"), ("readyz", ""), ("metrics", 'crossdock_world_size{group="default"} 4.0')):
        with direct.open(f"http://{addresses.http_address}/{path}", timeout=DEADLINE_S) as response:
            text = response.read().decode()
        if word not in text:
            sys.exit(f"/{path}: expected {word!r} in the answer, got {text[:200]!r}")


if __name__ == "__main__":
    main()
