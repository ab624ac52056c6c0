"""The names that pods of the bed may ask for."""

from __future__ import annotations

import socket
import struct
from typing import Any

from tests.deploy.bed import names

SERVICES = [
    {"metadata": {"name": "api", "namespace": "a"}, "spec": {"clusterIP": "10.96.0.7"}},
    {"metadata": {"name": "set", "namespace": "a"}, "spec": {"clusterIP": "None"}},
]
SLICES: list[dict[str, Any]] = [
    {
        "metadata": {"namespace": "a", "labels": {"kubernetes.io/service-name": "set"}},
        "endpoints": [{"addresses": ["10.251.0.3"], "hostname": "set-0"}, {"addresses": ["10.251.0.4"]}],
    },
    {"metadata": {"namespace": "a", "labels": {"kubernetes.io/service-name": "api"}}, "endpoints": None},
]
KNOWN = names.table(SERVICES, SLICES)


def ask(name: str, kind: int = 1) -> tuple[int, list[str]]:
    """Code and addresses of the answer to a question for a name."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    question = labels + struct.pack("!HH", kind, 1)
    answer = names.reply(b"id" + struct.pack("!HHHHH", 0x0100, 1, 0, 0, 0) + question, KNOWN)
    flags, questions, count = struct.unpack("!HHH", answer[2:8])
    assert (answer[:2], questions, answer[12 : 12 + len(question)]) == (b"id", 1, question)
    records = answer[12 + len(question) :]
    return flags & 15, [socket.inet_ntoa(records[16 * i + 12 : 16 * i + 16]) for i in range(count)]


def test_a_service_has_its_own_address_and_a_headless_one_those_of_its_pods() -> None:
    assert ask("api.a.svc.cluster.local") == (0, ["10.96.0.7"])
    assert ask("SET.a.svc.cluster.local") == (0, ["10.251.0.3", "10.251.0.4"])
    assert ask("set-0.set.a.svc.cluster.local") == (0, ["10.251.0.3"])


def test_another_kind_of_record_is_empty_and_another_name_does_not_exist() -> None:
    assert ask("api.a.svc.cluster.local", 28) == (0, [])
    assert ask("api.b.svc.cluster.local") == (3, [])
