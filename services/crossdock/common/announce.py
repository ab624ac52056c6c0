"""The line that announces the addresses of a process to its supervisor: `crossdock-ready {"address": ..., ...}`."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass

from crossdock.common.addresses import EVERY_INTERFACE, format_address, split_address

READY_WORD = "crossdock-ready"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a process, each host:port.

    Attributes:
        address: its gRPC server.
        http_address: its /metrics, /livez, /readyz.
        https: the HTTP server requires TLS.
    """

    address: str
    http_address: str
    https: bool = False


def announce(address: str, http_address: str, *, https: bool) -> None:
    """Print the line on stdout, once, when both servers listen. It is for programs: on a terminal the log says the
    same. A closed stdout is ignored."""
    if sys.stdout is not None and sys.stdout.isatty():
        return
    with contextlib.suppress(OSError):
        print(READY_WORD, json.dumps(asdict(Addresses(address, http_address, https))), flush=True)


def seen_from_outside(address: str, advertised: str, hostname: str) -> str:
    """The address under which other hosts reach a server that listens on `address`. If that is every interface: the
    host of `advertised`, or `hostname`."""
    host, port = split_address(address)
    if host not in EVERY_INTERFACE:
        return address
    return format_address(split_address(advertised)[0] if advertised else hostname, port)


def metrics_url(http_address: str, *, https: bool) -> str:
    """URL of the metrics of a process."""
    return f"http{'s' if https else ''}://{http_address}/metrics"


def parse(line: str) -> Addresses | None:
    """The addresses in a line of stdout; None if it is another line."""
    word, _, text = line.partition(" ")
    if word != READY_WORD:
        return None
    try:
        found = Addresses(**json.loads(text))
        split_address(found.address)
        split_address(found.http_address)
    except (ValueError, TypeError, AttributeError):
        return None
    return found if isinstance(found.https, bool) else None
