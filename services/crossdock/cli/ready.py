"""`crossdock ready`: what a process says at /readyz, found by its own command line. For health checks of containers."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from crossdock.common.addresses import reachable_from_here, split_address
from crossdock.common.config import ConfigFileError
from crossdock.common.http import ask_http
from crossdock.common.settings import SecurityConfig

SERVERS = ("up", "control", "worker")
_TIMEOUT_S = 8.0


def words_of(pid: int) -> list[str]:
    """The words behind `crossdock` on the command line of a process, or of what tini or docker-init started.

    Raises:
        ConfigFileError: there is no such process, or it is none of SERVERS.
    """
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        line = []
    names = [Path(word).name for word in line]
    words = line[names.index("crossdock") + 1 :] if "crossdock" in names else []
    if next((word for word in words if not word.startswith("-")), "") not in SERVERS:
        wanted = f"a process of crossdock {', '.join(SERVERS[:-1])} or {SERVERS[-1]}"
        raise ConfigFileError(f"--pid: expected {wanted}, got {' '.join(line) or 'none'} ({pid})")
    return words


def readiness(http_listen: str, security: SecurityConfig) -> tuple[bool, str]:
    """Whether the server of this host at `http_listen` is ready, and what it says at /readyz.

    As a kubelet's probe it neither verifies the server nor shows a certificate.

    Raises:
        ConfigFileError: the configuration does not say where it listens.
        ConnectionError: no answer.
    """
    if not http_listen or not split_address(http_listen)[1]:
        raise ConfigFileError(f"http_listen: expected host:port with a fixed port, got {http_listen!r}")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    address = reachable_from_here(http_listen)
    try:
        status, text = ask_http(address, "/readyz", _TIMEOUT_S, None if security.http == "plain" else tls)
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"no answer at {address}: {error}") from None
    return status == HTTPStatus.OK, text.strip()
