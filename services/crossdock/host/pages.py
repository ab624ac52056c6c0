"""What a host answers for its processes: whether all are ready, and one page with the metrics of all.

`HostMetricsPage` asks the processes at each scrape, side by side, and keeps nothing: what it answers is as fresh as
their own pages, and the series of a process that does not answer end with it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException

from crossdock.common.announce import Addresses
from crossdock.common.http import ask_http, labelled, page_of
from crossdock.common.metrics import HostMetrics
from crossdock.common.security import Security
from crossdock.host.supervisor import CONTROL

_PROBE_TIMEOUT_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
"""Timeout of a process's own page; less than any Prometheus waits for the host's."""
_FAMILIES = re.compile(r"^(?=# HELP )", re.MULTILINE)
_END = "# EOF\n"
"""Last line of a page in the OpenMetrics format."""


def readiness(
    names: Sequence[str], where: Mapping[str, Addresses], security: Security | None = None
) -> tuple[bool, str]:
    """Whether every process of this host says that it is ready, and what the others say.

    Args:
        names: every process.
        where: where those that listen do, by name.
        security: by which those are checked that take TLS only.
    """
    reasons = [f"{name}: not listening" for name in names if name not in where]
    for name, addresses in where.items():
        try:
            status, text = _ask(name, addresses, "/readyz", _PROBE_TIMEOUT_S, security)
        except (OSError, HTTPException) as error:
            status, text = 0, str(error) or type(error).__name__
        if status != HTTPStatus.OK:
            reasons.append(f"{name}: {text.strip()}")
    return not reasons, "; ".join(reasons) or "ready"


@dataclass(frozen=True, slots=True)
class _Page:
    """A page, and when it was begun, monotonic seconds. Only the last one is kept: callers choose content types."""

    content_type: str
    body: bytes
    begun_s: float


class HostMetricsPage:
    """The supervisor's metrics and those of its processes, each series with the label `process`.

    Scrapes that come while one is made wait for the next, and share it.

    Args:
        metrics: of the supervisor.
        names: every process now.
        addresses: where the processes listen now, by name.
        security: by which those are asked that take TLS only.
        group: the label `group` of the supervisor's metrics.
    """

    def __init__(
        self,
        metrics: HostMetrics,
        names: Callable[[], Sequence[str]],
        addresses: Callable[[], Mapping[str, Addresses]],
        security: Security | None,
        group: str,
    ) -> None:
        self._metrics, self._names, self._addresses, self._security = metrics, names, addresses, security
        self._own = page_of(metrics.registry, group)
        self._lock = threading.Lock()
        self._last = _Page("", b"", 0.0)

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that an Accept header asks for, and its content type. Any thread."""
        asked_s = time.monotonic()
        content_type = self._own(accept)[1]
        with self._lock:
            if self._last.content_type != content_type or self._last.begun_s < asked_s:
                begun_s = time.monotonic()
                self._last = _Page(content_type, self._made(content_type), begun_s)
            return self._last.body, content_type

    def _made(self, content_type: str) -> bytes:
        where = self._addresses()
        with ThreadPoolExecutor(max(1, len(where))) as pool:
            asked = {name: pool.submit(self._page, name, at, content_type) for name, at in where.items()}
        pages = {name: answer.result() for name, answer in asked.items()}
        for name in self._names():
            self._metrics.process_scraped.labels(process=name).set(bool(pages.get(name)))
        own = self._own(content_type)[0].decode()
        return merged([own, *(labelled(page, "process", name) for name, page in pages.items())]).encode()

    def _page(self, name: str, addresses: Addresses, content_type: str) -> str:
        """The process's page; "" without one."""
        try:
            status, text = _ask(name, addresses, "/metrics", SCRAPE_TIMEOUT_S, self._security, content_type)
        except (OSError, HTTPException):
            return ""
        return text if status == HTTPStatus.OK and text.startswith("# HELP ") else ""


def merged(pages: Iterable[str]) -> str:
    """Pages as one: all series of a metric follow each other, below the first page's words about it."""
    families: dict[str, list[str]] = {}
    ends = False
    for whole in pages:
        page = whole.removesuffix(_END)
        ends = ends or page != whole
        for family in filter(None, _FAMILIES.split(page)):
            known = families.setdefault(family.split(maxsplit=3)[2], [])
            known.append(family if not known else _samples(family))
    return "".join(part for parts in families.values() for part in parts) + (_END if ends else "")


def _samples(family: str) -> str:
    return "".join(line for line in family.splitlines(keepends=True) if not line.startswith("# "))


def _ask(
    name: str, addresses: Addresses, path: str, timeout_s: float, security: Security | None, accept: str = ""
) -> tuple[int, str]:
    """Status and text of a process's page. Raises OSError, http.client.HTTPException: no answer."""
    guard = security if addresses.https else None
    named = "" if guard is None else guard.config.control_name if name == CONTROL else guard.config.worker_name
    tls = None if guard is None else guard.http_caller()
    return ask_http(addresses.http_address, path, timeout_s, tls, named, accept)
