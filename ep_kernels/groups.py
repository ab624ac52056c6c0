"""Bootstraps: small objects that know who the ranks are and exchange a few opaque bytes at bring-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ep_kernels.errors import ConfigError, TransportError


class StoreGroup:
    """A group over a torch Store (FileStore, TCPStore): no process group and no backend needed.

    Args:
        store: any `torch.distributed.Store`, shared by all ranks.
        rank, size: this rank and the number of ranks.
        epoch: membership counter; a new epoch uses new keys, so one store serves many re-formings.
        name: distinguishes several groups over one store. Several communicators may share one StoreGroup object; two
            objects need two names, or two epochs.
    """

    def __init__(self, store: Any, rank: int, size: int, *, epoch: int = 0, name: str = "crossdock") -> None:
        self._store: Any = dist.PrefixStore(f"{name}/{epoch}", store)  # type: ignore[attr-defined]
        self._rank, self._size, self._epoch, self._round, self._name = rank, size, epoch, 0, name

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def epoch(self) -> int:
        return self._epoch

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `config.Group`. Raises ConfigError where this rank's key is taken: by a former group of this name."""
        number, self._round = self._round, self._round + 1
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        if self._store.check([keys[self._rank]]):  # then those of the others may be the former ones, too
            free = f"a StoreGroup whose name is new in its store in epoch {self._epoch}, or one object for all"
            raise ConfigError("group", free, self._name)
        self._store.set(keys[self._rank], payload)
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TransportError(f"bring-up: ranks {missing} did not arrive within {timeout_s} s") from error
        return [bytes(self._store.get(key)) for key in keys]


class TorchGroup:
    """A group over an initialised torch.distributed process group (any backend that has CPU or CUDA all_gather). Looked
    up once: it is the same group when torch's default one is another, and has its ranks when that is destroyed.

    Args:
        group: a ProcessGroup, or None for the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @cached_property
    def process_group(self) -> Any:
        """The ProcessGroup."""
        return dist.group.WORLD if self._group is None else self._group

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def epoch(self) -> int:
        return 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `config.Group`. The deadline is the process group's own."""
        group = self.process_group
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=group)
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
        rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(self.size)]
        dist.all_gather(rows, mine.to(device), group=group)
        return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]


@dataclass(frozen=True)
class PaperGroup:
    """A rank without peers: enough for sizes and plans."""

    rank: int
    size: int
    epoch: int = 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """There are no peers."""
        raise RuntimeError("PaperGroup: exchanges nothing, it serves to compute sizes")
