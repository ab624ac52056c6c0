"""A Prometheus of its own on this host, with our rules, that scrapes a group every second."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import yaml

from tests.deploy.bed import tools
from tests.house.tree import ROOT

JOB = "check"
NATIVE = {"convert_classic_histograms_to_nhcb": True, "always_scrape_classic_histograms": True}
"""Histograms are stored as native ones, too."""
_START_S = 60.0


class Prometheus:
    """What it says by its API."""

    def __init__(self, address: str) -> None:
        self._address, self._opener = address, build_opener(ProxyHandler({}))

    def get(self, path: str, **query: str) -> Any:
        """`data` of /api/v1/PATH."""
        with self._opener.open(f"http://{self._address}/api/v1/{path}?{urlencode(query)}", timeout=30) as response:
            return json.load(response)["data"]

    def value(self, expression: str) -> float:
        """Of an expression with one result."""
        found = self.get("query", query=expression)["result"]
        assert len(found) == 1, f"{expression}: {found}"
        return float(found[0]["value"][1])

    def firing(self) -> list[Mapping[str, str]]:
        """Labels of the alerts that fire."""
        return [one["labels"] for one in self.get("alerts")["alerts"] if one["state"] == "firing"]


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Start one; ready when it has scraped every target. Raises Missing where it cannot be built."""
    program = tools.need("prometheus")["prometheus"]
    folder.mkdir(parents=True)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "deploy" / "prometheus" / "rules.yaml")],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}], **NATIVE}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(program), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append("--enable-feature=exemplar-storage")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        made = Prometheus(address)
        _wait_scraped(made, len(targets), folder / "log")
        yield made
    finally:
        process.terminate()
        process.wait(30)


def _wait_scraped(made: Prometheus, number: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError, AssertionError):
            if made.value("sum(up)") == number:
                return
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)
