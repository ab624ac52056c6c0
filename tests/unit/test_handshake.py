"""What crosses hosts is written down with its version, so that neither changes alone."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from ep_kernels.network import handshake
from tests.stand_in import NATIVE, ROOT

NVLINK = ROOT / "ep_kernels/transports/nvlink/native"
LAYOUTS = {
    "handshake": (ROOT / "ep_kernels/network/handshake.py", "_HELLO = ", "return _HELLO.pack", "return hmac.digest"),
    "frames": (NATIVE / "tcp.cpp", "constexpr uint64_t kMark = ", "struct Header {"),
    "control messages": (
        NATIVE / "peers.cpp",
        "constexpr uint32_t kJoined",
        "struct ControlMessage {",
        "send_control(",
    ),
    "control messages of a lane": (NATIVE / "exchange.hpp", "const uint8_t ready", "uint8_t words["),
    "cards of verbs": (NATIVE / "verbs.cpp", "constexpr uint32_t kMagic", "struct Card {"),
    "credits of verbs": (NATIVE / "verbs.cpp", "request.imm = "),
    "cards of libfabric": (
        NATIVE / "libfabric.cpp",
        "constexpr uint32_t kMagic",
        "struct Card {",
        "const uint64_t credit",
    ),
    "immediates of cpu": (
        ROOT / "ep_kernels/transports/cpu/native/remote.hpp",
        *("enum class Imm", "constexpr int kSeqBits", "constexpr int kSlotBits"),
    ),
    "immediates of GPUs": (
        NVLINK / "box_words.cpp",
        "constexpr uint32_t kStarted",
        "constexpr uint32_t kFlags",
        "constexpr int kSeqBits",
    ),
    "pages of GPUs' hosts": (NVLINK / "host_words.cpp", "constexpr uint64_t kPageWords"),
}
"""Where each is written: a file, and how the statements and types there begin. What lies in mirrors and boxes has
versions of its own: `kAbi`, and the hash of all kernels."""
WRITTEN_DOWN = (
    3,
    {
        "handshake": "2000547d4ab90c95",
        "frames": "eed846c422c7ac38",
        "control messages": "b4592b6432af42e9",
        "control messages of a lane": "1da5d4e3d1013e51",
        "cards of verbs": "612a87bfdb44124d",
        "credits of verbs": "e439ac498ce398c6",
        "cards of libfabric": "fc87da5e95dc5dc6",
        "immediates of cpu": "e7bbb008ae6cfa17",
        "immediates of GPUs": "c6d0069857830b3a",
        "pages of GPUs' hosts": "4af5d1f8bf66d8fb",
    },
)
"""`handshake.WIRE` and the digests that belong to it."""


def digest(path: Path, *begins: str) -> str:
    """Of these statements without comments and spaces."""
    text, found = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")), []
    for begin in begins:
        end = r"\n\}" if begin.startswith(("struct", "enum")) else ";|$" if path.suffix == ".py" else ";"
        here = re.findall(
            f"{re.escape(begin)}.*?(?:{end})", text, re.MULTILINE | (0 if path.suffix == ".py" else re.DOTALL)
        )
        assert here, f"{path}: expected {begin!r}, got none"
        found += here
    return hashlib.sha256(re.sub(r"\s", "", "".join(found)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_crosses_hosts_has_the_version_that_it_is_written_down_with(name: str) -> None:
    version, digests = WRITTEN_DOWN
    assert (handshake.WIRE, digest(*LAYOUTS[name])) == (version, digests[name]), (
        f"{name} ({LAYOUTS[name][0]}): if a byte has another place or another meaning now, raise handshake.WIRE; then "
        "write down what `python -m tests.unit.test_handshake` prints"
    )


if __name__ == "__main__":
    for layout, (path, *begins) in LAYOUTS.items():
        print(f'        "{layout}": "{digest(path, *begins)}",')
