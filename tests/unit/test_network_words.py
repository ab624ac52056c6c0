"""Network: what its configuration refuses, the handshake's words, the address that is told to peers."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.network import NetworkConfig, address, handshake
from ep_kernels.network.address import Advertised, advertised
from ep_kernels.network.network_config import split

SECRET, CHALLENGE = b"s" * handshake.SECRET_BYTES, b"c" * handshake.CHALLENGE_BYTES


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
    hello = handshake.hello(token=7, rank=3, peer=5, role=handshake.CONTROL_ROLE, lanes=2)
    raw = hello.encode()
    assert len(raw) == handshake.HELLO_BYTES
    assert handshake.decode(raw) == hello
    assert handshake.hello(7, 3, 5, 0, 2).nonce != handshake.hello(7, 3, 5, 0, 2).nonce


def test_other_words_and_versions_are_told_apart() -> None:
    raw = handshake.hello(1, 2, 3, 0, 1).encode()
    with pytest.raises(ValueError, match="expected a hello of Crossdock's data port, got b'GET / HT'"):
        handshake.decode(b"GET / HTTP/1.1\r\n".ljust(handshake.HELLO_BYTES, b" "))
    with pytest.raises(ValueError, match=r"expected version 1 of the handshake, got 2"):
        handshake.decode(raw[:7] + b"\x02" + raw[8:])


def test_a_proof_fits_one_secret_one_hello_one_challenge_and_one_side() -> None:
    raw = handshake.hello(1, 2, 3, 0, 1).encode()
    right = handshake.proof(SECRET, raw, CHALLENGE)
    assert handshake.is_proof(right, handshake.proof(SECRET, raw, CHALLENGE))
    others = [
        handshake.proof(b"t" * handshake.SECRET_BYTES, raw, CHALLENGE),
        handshake.proof(SECRET, handshake.hello(1, 2, 3, 0, 1).encode(), CHALLENGE),
        handshake.proof(SECRET, raw, b"d" * handshake.CHALLENGE_BYTES),  # a recorded one, said again
        handshake.answer(SECRET, raw, CHALLENGE),  # the listener's own words, sent back
        right[:-1],
    ]
    assert not any(handshake.is_proof(other, right) for other in others)
    assert len(right) == handshake.PROOF_BYTES


class Interfaces:
    """Of a machine that has these addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, route: str = "", **addresses: str) -> None:
        monkeypatch.setattr(address, "address_of", lambda device: addresses.get(device, ""))
        monkeypatch.setattr(address, "_of_default_route", lambda: route)
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
    assert address.address_of("lo") in ("127.0.0.1", "")
