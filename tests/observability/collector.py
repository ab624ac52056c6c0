"""An OpenTelemetry Collector on this host that writes the spans it receives to a file."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.deploy.bed import tools

_START_S = 60.0


@contextlib.contextmanager
def collector(folder: Path) -> Iterator[tuple[str, Path]]:
    """Start one: its address, and the file of OTLP/JSON lines. Raises Missing where it cannot be built."""
    program = tools.need("otelcol")["otelcol"]
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spans = folder / "spans"
    config = {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": address}}}},
        "exporters": {"file": {"path": str(spans), "flush_interval": "500ms"}},
        "service": {
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
            "telemetry": {"metrics": {"level": "none"}},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([str(program), f"--config={folder / 'config.yaml'}"], stdout=log, stderr=log)
    try:
        _wait_listening(address, folder / "log")
        yield address, spans
    finally:
        process.terminate()
        process.wait(30)


def _wait_listening(address: str, log: Path) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)
