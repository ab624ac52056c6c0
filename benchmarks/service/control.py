"""A control plane alone, for workers that are started otherwise."""

from __future__ import annotations

import multiprocessing as mp
import socket
from typing import Self

from crossdock.common.config import ControlConfig, LogConfig
from crossdock.common.settings import SecurityConfig
from crossdock.control.process import run_control


def free_port(host: str = "127.0.0.1") -> int:
    """Of an address of this host, a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ControlProcess:
    """Of a group of `world_size` ranks, in a process of its own.

    Args:
        host: to listen at.
        security: its certificates.
    """

    def __init__(self, world_size: int, host: str = "127.0.0.1", security: SecurityConfig = SecurityConfig()) -> None:
        self.address = f"{host}:{free_port(host)}"
        config = ControlConfig(
            listen=self.address, http_listen=f"{host}:0", world_size=world_size, log=LogConfig(level="error"),
            security=security,
        )  # fmt: skip
        self._process = mp.get_context("spawn").Process(target=run_control, args=(config,), daemon=True)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()
