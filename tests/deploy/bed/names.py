"""Names of Services for the pods of the bed: a DNS server of one thread.

NAME.NAMESPACE.svc.cluster.local is the cluster IP, or the endpoints' addresses where there is none;
POD-NAME.NAME.NAMESPACE.svc.cluster.local is one endpoint. Everything else does not exist.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Any

from tests.deploy.bed.api import Api

ZONE = ".svc.cluster.local"
_A, _NO_ERROR, _NO_SUCH_NAME = 1, 0, 3
_TTL_S, _KEPT_S, _PACKET = 1, 0.3, 2048


class Names:
    """Answers on UDP port 53 of an address until it is closed."""

    def __init__(self, api: Api, address: str) -> None:
        self._api = api
        self._known: dict[str, list[str]] = {}
        self._looked_s = float("-inf")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._ended.set()
        self._thread.join(60)
        self._socket.close()

    def _serve(self) -> None:
        self._socket.settimeout(0.2)
        while not self._ended.is_set():
            try:
                query, client = self._socket.recvfrom(_PACKET)
            except TimeoutError:
                continue
            self._look()
            self._socket.sendto(reply(query, self._known), client)

    def _look(self) -> None:
        if time.monotonic() - self._looked_s < _KEPT_S:
            return
        services = self._api.ask("GET", "/api/v1/services")
        slices = self._api.ask("GET", "/apis/discovery.k8s.io/v1/endpointslices")
        if services.fine and slices.fine:
            self._known = table(services.body["items"], slices.body["items"])
        self._looked_s = time.monotonic()


def table(services: list[dict[str, Any]], slices: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Addresses by name, of Services and EndpointSlices."""
    found: dict[str, list[str]] = {}
    headless = set()
    for service in services:
        name = f"{service['metadata']['name']}.{service['metadata']['namespace']}{ZONE}"
        address = service["spec"].get("clusterIP", "None")
        found[name] = [] if address == "None" else [address]
        headless |= {name} if address == "None" else set()
    for one in slices:
        meta = one["metadata"]
        name = f"{meta.get('labels', {}).get('kubernetes.io/service-name')}.{meta['namespace']}{ZONE}"
        for endpoint in one.get("endpoints") or ():
            if name in headless:
                found[name].extend(endpoint["addresses"])
            if host := endpoint.get("hostname"):
                found[f"{host}.{name}"] = list(endpoint["addresses"])
    return found


def reply(query: bytes, known: dict[str, list[str]]) -> bytes:
    """The answer to a packet of one question."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    question = query[12 : at + 5]
    addresses = known.get(".".join(labels).lower())
    given = (addresses or []) if struct.unpack("!H", question[-4:-2])[0] == _A else []
    flags = 0x8580 | (_NO_SUCH_NAME if addresses is None else _NO_ERROR)
    record = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, _TTL_S, 4)
    records = b"".join(record + socket.inet_aton(address) for address in given)
    return query[:2] + struct.pack("!HHHHH", flags, 1, len(given), 0, 0) + question + records
