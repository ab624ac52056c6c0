"""The doctor's loop-back ping in a process of its own, so that a driver that hangs or crashes ends only it.

python -m crossdock.doctor.ping NETWORK          NETWORK: the `NetworkConfig` as JSON; prints a `Ping` or "failed", and
                                                 where a GPU's boxes would lie: "boxes", or "no_boxes" and why
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from crossdock.common import transports
from ep_kernels import EpError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.providers import ping
from ep_kernels.transports.base import boxes


def main(network: str) -> dict[str, Any]:
    """What the process prints: the answers, or why it failed."""
    try:
        config = msgspec.json.decode(network, type=NetworkConfig)
        return {**asdict(ping(config)), **_boxes(config)}
    except (EpError, OSError, RuntimeError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}"}


def _boxes(config: NetworkConfig) -> dict[str, str]:
    """Where the boxes of the first GPU would lie, if there is one and the provider registers memory."""
    if config.carrier == "tcp" or not torch.cuda.is_available():
        return {}
    transport = next(name for name in transports.cross_host_names() if transports.needs_gpu(name))
    try:
        return {"boxes": boxes(transport, config, 0)}
    except EpError as failure:
        return {"no_boxes": str(failure)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
