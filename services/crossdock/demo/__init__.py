"""`crossdock demo`: small random models, served and compared with themselves. Needs `transformers`, which is imported
once the names are known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from crossdock.common import transports
from crossdock.common.config import ConfigFileError


class ModelSizes(TypedDict):
    """What differs between the families' models."""

    num_experts: int
    topk: int


FAMILIES: dict[str, ModelSizes] = {
    "qwen3_moe": {"num_experts": 16, "topk": 4},
    "mixtral": {"num_experts": 8, "topk": 2},
    "deepseek_v3": {"num_experts": 16, "topk": 4},
}
"""Families that are served, and the number of experts of each."""

ALL = "all"
"""Instead of a family: each one of `transformers`, tiny and in float32 alone."""


def check_names(transport: str, families: Sequence[str]) -> None:
    """Raises ConfigFileError: an unknown transport or family."""
    for option, known, given in (
        ("--transport", transports.names(), (transport,)),
        ("--family", (*FAMILIES, ALL), families),
    ):
        for name in given:
            if name not in known:
                raise ConfigFileError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
