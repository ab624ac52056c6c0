"""Providers on this machine, with or without their libraries: what is refused and why, and libfabric over sockets."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig, providers, proxy
from tests import tools
from tests.unit.network_ends import UP, End, join

ROOT = Path(__file__).resolve().parents[2]
OVER_SOCKETS = "libfabric(tcp;ofi_rxm)"
needs_libfabric = tools.needs("libfabric")


def test_structures_are_those_of_the_native_half() -> None:
    sizes = (ctypes.c_uint64 * 4)()
    proxy.load().cn_sizes(sizes)
    mirrored = (proxy.NetMemory, proxy.NetSettings, proxy.Text, proxy.Traffic)
    assert list(sizes) == [ctypes.sizeof(one) for one in mirrored]


@tools.needs("g++")
@pytest.mark.parametrize(
    ("name", "header"), [("verbs", "/usr/include/infiniband/verbs.h"), ("fabric", "/usr/include/rdma/fi_rma.h")]
)
def test_declarations_are_those_of_the_library(name: str, header: str) -> None:
    if not Path(header).exists():
        tools.skip("RDMA headers", f"no {header}")
    native, file = ROOT / "ep_kernels" / "network" / "native", ROOT / "tests" / "rxe" / f"same_{name}.cpp"
    command = ["g++", "-std=c++17", "-Wno-enum-compare", "-fsyntax-only", f"-I{native}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_provider_that_cannot_be_used_says_why() -> None:
    with pytest.raises(
        TransportError, match=r"network: verbs: (libibverbs.so.1 cannot be loaded|no RDMA device|expected one of)"
    ):
        providers.check(NetworkConfig(provider="verbs", devices=("no-such-device",)))
    with pytest.raises(TransportError, match=r"network: libfabric: (libfabric.so.1 cannot be loaded|no provider for)"):
        providers.check(NetworkConfig(provider="libfabric(no-such-provider)"))
    with pytest.raises(TransportError, match="network: tcp: has no devices of its own"):
        providers.devices("tcp")


def test_the_network_needs_no_torch() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'rxe')!r}); import inside; "
    code += "from ep_kernels.network import providers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_message_of_this_host_to_itself() -> None:
    config = NetworkConfig(listen="127.0.0.1:0")
    assert providers.check(config) == ""
    assert 0 < providers.ping(config, 20).median_us < 1e6


@needs_libfabric
def test_libfabric_finds_what_it_is_asked_for() -> None:
    config = NetworkConfig(provider=OVER_SOCKETS, listen="127.0.0.1:0")
    assert "tcp;ofi_rxm, domain lo (the first one)" in providers.check(config)
    assert {port.link for port in providers.devices("libfabric")} >= {"tcp;ofi_rxm"}
    with pytest.raises(TransportError, match=r"no provider for devices nothing \(tcp;ofi_rxm: No such device\)"):
        providers.check(NetworkConfig(provider=OVER_SOCKETS, listen="127.0.0.1:0", devices=("nothing",)))


@needs_libfabric
@pytest.mark.parametrize(("provider", "lanes"), [(OVER_SOCKETS, 1), (f"shuffle({OVER_SOCKETS})", 2)])
def test_libfabric_over_sockets(provider: str, lanes: int) -> None:
    """More messages than receives are posted; an end in order, and connections made anew."""
    number, size = 1000, 1 << 20
    with (
        End(0, size=size, provider=provider, lanes=lanes) as one,
        End(1, size=size, provider=provider, lanes=lanes) as two,
    ):
        for turn in range(2):
            join(one, two)
            ctypes.memset(one.own, 17 + turn, size)
            for imm in range(number):
                one.push(1, imm * 1024, 1024, turn * number + imm)
                two.push(0, 0, 0, imm)
            two.until(lambda _: len(two.arrived(0)) == number * (turn + 1))  # noqa: B023
            one.until(lambda _: len(one.arrived(1)) == number * (turn + 1))  # noqa: B023
            assert Counter(two.arrived(0)) == Counter(range(number * (turn + 1)))
            assert two.mirror(0)[: number * 1024] == bytes([17 + turn]) * number * 1024
            one.quiet(1)
            one.channel.leave(1, 9)
            two.until(lambda events: events[-1][0] == 0 and events[-1][1] > 0)
            assert two.kinds(0).count(UP) == turn + 1
