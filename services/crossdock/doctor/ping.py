"""The doctor's loop-back ping in a process of its own, so that a driver that hangs or crashes ends only it.

python -m crossdock.doctor.ping NETWORK          NETWORK: the `NetworkConfig` as JSON; prints a `Ping` or "failed"
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec

from ep_kernels import EpError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.ping import ping


def main(network: str) -> dict[str, Any]:
    """What is printed."""
    try:
        return asdict(ping(msgspec.json.decode(network, type=NetworkConfig)))
    except (EpError, OSError, RuntimeError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
