"""Network: what its configuration refuses, the handshake's words, the address that is told to peers."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.network import NetworkConfig, address, handshake
from ep_kernels.network.address import Advertised, advertised
from ep_kernels.network.handshake import KEY_BYTES, Greeting, KeyPair, x25519
from ep_kernels.network.network_config import split

SECRET, CHALLENGE = b"s" * handshake.SECRET_BYTES, b"c" * handshake.CHALLENGE_BYTES


def a_hello() -> Greeting:
    return handshake.hello(7, 3, 5, handshake.CONTROL_ROLE, 2, b"k" * KEY_BYTES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("provider", "udp"),
        ("provider", "shuffle(shuffle(tcp))"),
        ("listen", "0.0.0.0"),
        ("listen", "0.0.0.0:65536"),
        ("listen", ":80"),
        ("listen", "a b:80"),
        ("listen", "host:-1"),
        ("advertise", "host:80"),
        ("advertise", "http://localhost"),
        ("lanes", 0),
        ("lanes", 17),
        ("spin_us", -1),
        ("spin_us", 1_000_001),
        ("cpus", (0, -1)),
        ("cpus", (4096,)),
        ("domain", "d" * 257),
        ("seed", -1),
        ("drop_after", -1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^network\.{field}: expected .+, got {re.escape(repr(value))}") as error:
        NetworkConfig(**{field: value})
    assert str(error.value).count("expected") == 1


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::1]:65535", "node-3.example:7000", "127.0.0.1:80"])
def test_right_endpoints(listen: str) -> None:
    host, port = split(NetworkConfig(listen=listen).listen)
    assert f"{host}:{port}".replace("[", "").replace("]", "") == listen.replace("[", "").replace("]", "")


def test_hello_goes_there_and_back() -> None:
    hello = a_hello()
    raw = hello.encode()
    assert len(raw) == handshake.HELLO_BYTES
    assert handshake.decode(raw) == hello
    assert a_hello().nonce != hello.nonce


def test_other_words_and_versions_are_told_apart() -> None:
    raw = a_hello().encode()
    with pytest.raises(ValueError, match="expected a hello of Crossdock's data port, got b'GET / HT'"):
        handshake.decode(b"GET / HTTP/1.1\r\n".ljust(handshake.HELLO_BYTES, b" "))
    with pytest.raises(ValueError, match=rf"expected version {handshake.WIRE} of the data port, got 1"):
        handshake.decode(raw[:7] + b"\x01" + raw[8:])


PROOFS = [handshake.membership, handshake.ownership, handshake.answer]


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_fits_one_secret_one_hello_one_challenge_and_one_side(proof: Callable[..., bytes]) -> None:
    raw = a_hello().encode()
    right = proof(SECRET, raw, CHALLENGE)
    assert handshake.is_proof(right, proof(SECRET, raw, CHALLENGE))
    others = [
        proof(b"t" * handshake.SECRET_BYTES, raw, CHALLENGE),
        proof(SECRET, a_hello().encode(), CHALLENGE),
        proof(SECRET, raw, b"d" * handshake.CHALLENGE_BYTES),  # a recorded one, said again
        *(other(SECRET, raw, CHALLENGE) for other in PROOFS if other is not proof),  # the other's words, sent back
        right[:-1],
    ]
    assert not any(handshake.is_proof(other, right) for other in others)
    assert len(right) == handshake.MAC_BYTES


@pytest.mark.parametrize(
    ("private", "public", "shared"),
    [  # RFC 7748, section 5.2
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_the_secret_of_two_keys(private: str, public: str, shared: str) -> None:
    assert x25519(bytes.fromhex(private), bytes.fromhex(public)).hex() == shared


def test_two_share_what_no_third_one_has() -> None:
    one, other, third = KeyPair(), KeyPair(), KeyPair()
    assert one.pair(other.public) == other.pair(one.public)
    assert len({one.pair(other.public), one.pair(third.public), other.pair(third.public), one.pair(one.public)}) == 4


class Interfaces:
    """Of a machine that has these addresses; `route`: of its default routes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, route: str = "", **addresses: str) -> None:
        def of(family: int, text: str) -> str:
            fits = [one for one in text.split() if (":" in one) == (family == socket.AF_INET6)]
            return fits[0] if fits else ""

        monkeypatch.setattr(address, "address_of", lambda device, family: of(family, addresses.get(device, "")))
        monkeypatch.setattr(address, "_of_default_route", lambda family: of(family, route))
        monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses, 1)))


def test_the_advertised_address_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    Interfaces(monkeypatch, "192.0.2.7", lo="127.0.0.1", ib0="192.0.2.9")
    said = {
        "network.advertise": NetworkConfig(advertise="node-3", devices=("ib0",), listen="127.0.0.1:0"),
        "address of ib0, from network.devices": NetworkConfig(devices=("ib9", "ib0"), listen="127.0.0.1:0"),
        "network.listen": NetworkConfig(listen="127.0.0.1:0"),
        "address of the default route": NetworkConfig(),
    }
    chosen = ["node-3", "192.0.2.9", "127.0.0.1", "192.0.2.7"]
    for (why, config), expected in zip(said.items(), chosen, strict=True):
        assert advertised(config) == Advertised(expected, why)


def test_without_a_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    Interfaces(monkeypatch, lo="127.0.0.1", dummy="", eth1="192.0.2.3")
    assert advertised(NetworkConfig()).address == "192.0.2.3"
    Interfaces(monkeypatch, lo="127.0.0.1")
    assert advertised(NetworkConfig()) == Advertised(
        "127.0.0.1", "no interface but loopback has an address: this host alone"
    )


def test_a_device_without_an_address_is_refused() -> None:
    with pytest.raises(TransportError, match=r"network\.devices: expected an interface with an IPv4 address"):
        advertised(NetworkConfig(devices=("no-such-device",)))
    assert address.address_of("lo", socket.AF_INET) in ("127.0.0.1", "")
    assert address.address_of("lo", socket.AF_INET6) in ("::1", "")


LO = "127.0.0.1 ::1"


@pytest.mark.parametrize(
    ("listen", "both", "route", "addresses", "expected"),
    [
        ("[::]:0", True, "fd00::7", {"lo": LO, "eth0": "fd00::7"}, "fd00::7"),
        ("[::]:0", True, "192.0.2.7 fd00::7", {"lo": LO, "eth0": "192.0.2.7 fd00::7"}, "192.0.2.7"),
        ("[::]:0", False, "192.0.2.7 fd00::7", {"lo": LO, "eth0": "192.0.2.7 fd00::7"}, "fd00::7"),
        ("[::]:0", True, "", {"lo": LO, "eth0": "fd00::7"}, "fd00::7"),
        ("[::]:0", True, "", {"lo": "::1"}, "127.0.0.1"),
        ("[::]:0", False, "", {"lo": LO}, "::1"),
        ("0.0.0.0:0", True, "fd00::7", {"lo": LO, "eth0": "fd00::7"}, "127.0.0.1"),
        ("[fd00::8]:0", True, "fd00::7", {"lo": LO}, "fd00::8"),
    ],
)
def test_the_address_is_one_that_the_port_takes(
    listen: str, both: bool, route: str, addresses: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts without IPv4 among them."""
    Interfaces(monkeypatch, route, **addresses)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: both)
    assert advertised(NetworkConfig(listen=listen)).address == expected


def test_the_address_of_a_device_is_one_that_the_port_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    Interfaces(monkeypatch, ib0="fd00::9", eth0="192.0.2.9")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    assert advertised(NetworkConfig(listen="[::]:0", devices=("ib0", "eth0"))).address == "fd00::9"
    assert advertised(NetworkConfig(devices=("ib0", "eth0"))).address == "192.0.2.9"
    with pytest.raises(TransportError, match="expected an interface with an IPv4 address"):
        advertised(NetworkConfig(devices=("ib0",)))
    assert address.source_of(NetworkConfig(devices=("ib0", "eth0")), socket.AF_INET6) == "fd00::9"
    assert address.source_of(NetworkConfig(devices=("ib0", "eth0")), socket.AF_INET) == "192.0.2.9"


def test_the_ipv6_address_of_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "fd000000000000000000000000000001 02 40 00 20     eth0\n"  # deprecated
        "fd000000000000000000000000000002 02 40 00 01     eth0\n"  # temporary
        "fd000000000000000000000000000003 02 40 00 80     eth0\n"
        "fe800000000000000000000000000004 03 40 20 80     eth1\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(address, "_IF_INET6", table)
    found = [address.address_of(device, socket.AF_INET6) for device in ("eth0", "eth1", "lo", "none")]
    assert found == ["fd00::3", "", "::1", ""]
    monkeypatch.setattr(address, "_IF_INET6", tmp_path / "absent")
    assert address.address_of("lo", socket.AF_INET6) == ""
