"""A transport whose ranks are threads of one process. A rank posts what it brings to an operation; when all have, each
takes its own part of what the reference makes of it. A real transport moves rows instead."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from ep_kernels import MoEConfig, reference
from ep_kernels.errors import AbortedError, ArgumentError, ClosedError, HandleError, PeerTimeout, TransportError
from ep_kernels.transports.base import CombineArgs, DispatchArgs, Transport
from ep_kernels.transports.whole_routing import WholeRouting
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Mode

Key = tuple[int, str, int]
"""Epoch, operation, its number."""
_changed = threading.Condition()
"""Something that a rank may wait for."""


@dataclass(eq=False)
class Region:
    """What peers see of a rank: what it brought to operations, and its epoch."""

    epoch: int
    posts: dict[Key, Any] = field(default_factory=dict)


_regions: weakref.WeakValueDictionary[bytes, Region] = weakref.WeakValueDictionary()
"""By ticket."""


def create(config: MoEConfig) -> Threads:
    """See `base.create`."""
    return Threads(config)


class Threads(Transport):
    """See `base.Transport`."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config.group)
        self.config = config
        dtypes = torch.bfloat16, torch.float32
        self.capabilities = Capabilities("cpu", False, dtypes, (Mode.LL, Mode.HT), graphs=False, abi="threads-1")
        self._region, self._peers = Region(self.epoch), list[Region]()
        self._numbers: Counter[str] = Counter()
        self._reason, self._lost, self._woken, self._closed = "", set[int](), False, False

    # Life.

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        ticket = secrets.token_bytes(8)
        _regions[ticket] = self._region
        return ticket

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        for rank, ticket in enumerate(tickets):
            if ticket not in _regions:
                raise TransportError(f"threads: rank {rank} lives in another process")
            self._peers.append(_regions[ticket])

    def close(self) -> None:
        with _changed:
            self._closed = True
            _changed.notify_all()

    def abort(self, reason: str) -> None:
        with _changed:
            self._reason = reason
            _changed.notify_all()

    def give_up(self, ranks: Sequence[int]) -> None:
        with _changed:
            self._lost.update(ranks)
            _changed.notify_all()

    # Meeting.

    def post(self, op: str, brought: Any) -> Key:
        """Show what this rank brings to its next operation of that name."""
        number = self._numbers[op]
        self._numbers[op] += 1
        return self._show((self.epoch, op, number), brought)

    def _show(self, key: Key, brought: Any) -> Key:
        epoch, op, number = key
        with _changed:
            self._region.posts[key] = brought
            # All peers have brought something to the operation max_in_flight before, so none still reads this.
            self._region.posts.pop((epoch, op, number - 2 * self.config.max_in_flight), None)
            _changed.notify_all()
        return key

    def collect(self, key: Key, mask: Sequence[bool]) -> list[Any]:
        """What each rank of the mask brought, None for the others. Raises as every wait."""
        begin = time.monotonic()
        with _changed:
            while missing := [r for r, peer in enumerate(self._peers) if mask[r] and key not in peer.posts]:
                self._check_ended()
                self._check_peers(key, missing, [r for r in self._lost if mask[r]], time.monotonic() - begin)
                _changed.wait(max(0.0, begin + self.config.timeout_s - time.monotonic()))
            return [peer.posts[key] if alive else None for alive, peer in zip(mask, self._peers, strict=True)]

    def _check_ended(self) -> None:
        if self._closed:
            raise ClosedError("threads: closed")
        if self._reason:
            raise AbortedError(self._reason)

    def _check_peers(self, key: Key, missing: Sequence[int], lost: Sequence[int], waited_s: float) -> None:
        epoch, op, number = key
        for rank in missing:
            if self._peers[rank].epoch > epoch:
                ahead = f"rank {rank} has gone on in epoch {self._peers[rank].epoch} without this rank"
                raise TransportError(f"{op}: {ahead}")
        if lost or waited_s >= self.config.timeout_s:
            peer = [*lost, *missing][0]
            posts = self._peers[peer].posts
            seen = max((n for e, name, n in posts if (e, name) == (epoch, op)), default=-1)
            raise PeerTimeout(
                peer=peer, op=op, phase="payload", expected=number, seen=seen, waited_s=waited_s,
                given_up=peer in lost,
            )  # fmt: skip

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        return self.collect(self.post("exchange" if words else "barrier", tuple(words)), self.active)

    def wait_for_peer(self, timeout_s: float) -> bool:
        key = self.epoch, "exchange", self._numbers["exchange"]
        with _changed:
            came = _changed.wait_for(
                lambda: self._woken or self._reason or any(key in peer.posts for peer in self._peers), timeout_s
            )
            self._check_ended()
            self._woken = False
        return bool(came)

    def wake(self) -> None:
        with _changed:
            self._woken = True
            _changed.notify_all()

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        self.collect(self._show((epoch, "set_active", 0), None), mask)
        with _changed:
            posts = self._region.posts.items()  # those of the former epoch may still be read
            self._region.posts = {key: brought for key, brought in posts if key[0] >= self.epoch}
            self.active, self.epoch, self._region.epoch = tuple(mask), epoch, epoch
            self._numbers.clear(), self._lost.clear()

    # Operations.

    def dispatch(self, args: DispatchArgs) -> ThreadsDispatch:
        return ThreadsDispatch(self, args)

    def combine(self, args: CombineArgs) -> ThreadsCombine:
        return ThreadsCombine(self, args)


def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The caller may overwrite its own before peers have read it."""
    return None if tensor is None else tensor.clone()


def check_origins(op: str, rank: int, origins: Sequence[int | None]) -> None:
    """Raise HandleError unless all ranks brought the routing of one dispatch."""
    for peer, origin in enumerate(origins):
        if origin not in (None, origins[rank]):
            mine, other = f"dispatch {origins[rank]}", f"dispatch {origin}"
            raise HandleError(f"{op}: this rank brought the routing of {mine}, rank {peer} that of {other}")


class ThreadsDispatch:
    """See `base.PendingDispatch`."""

    def __init__(self, transport: Threads, args: DispatchArgs) -> None:
        self._transport, self._mode, self._early = transport, args.mode, None
        self._origin = None if args.previous is None else int(args.previous.state.origin)
        tensors = copy(args.x), copy(args.scales), copy(args.topk_ids), copy(args.topk_weights)
        self._none = [None if tensor is None else tensor[:0] for tensor in tensors]
        self._key = transport.post("dispatch", (self._origin, args.mode, tensors))

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if self._early is None:
            out = self._delivered([self._none] * self._transport.config.group.size)[0]
            self._early = out.tokens, out.scales, out.counts
        return self._early

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        transport, config, (epoch, _, number) = self._transport, self._transport.config, self._key
        brought = transport.collect(self._key, transport.active)
        modes = [None if each is None else each[1] for each in brought]
        for rank, mode in enumerate(modes):
            if mode not in (None, self._mode):
                here = f"one that is equal on all ranks: here it chooses {self._mode.name}"
                raise ArgumentError("step_tokens", here, f"{mode.name} on rank {rank}")
        origins = [None if each is None else number if each[0] is None else each[0] for each in brought]
        check_origins("dispatch", config.group.rank, origins)
        parts = [self._none if each is None else each[2] for each in brought]
        out, (_, _, ids, weights) = self._delivered(parts)
        if self._early is not None:
            for to, rows in zip(self._early, (out.tokens, out.scales, out.counts), strict=True):
                to is None or to.copy_(rows)
            out = replace(out, tokens=self._early[0], scales=self._early[1], counts=self._early[2])
        transport.num_dropped += int(out.num_dropped)
        state = WholeRouting.of(config, ids, weights, origins[config.group.rank])
        tokens, lead = len(ids[config.group.rank]), tuple(out.tokens.shape[:-1])
        return out, DispatchHandle(0, number, tokens, self._mode, epoch, state, lead)

    def _delivered(self, parts: Sequence[Any]) -> tuple[DispatchOutput, Any]:
        """The output for tensors of each rank; and those, by kind."""
        config, active = self._transport.config, self._transport.active
        xs, scales, ids, weights = by_kind = list(zip(*parts, strict=True))
        scales = None if scales[0] is None else scales
        outs, _ = reference.dispatch(config, xs, ids, weights, scales=scales, active=active)
        return outs[config.group.rank], by_kind


class ThreadsCombine:
    """See `base.PendingCombine`."""

    def __init__(self, transport: Threads, args: CombineArgs) -> None:
        self._transport, self._apply, self._out = transport, args.apply_weights, args.out
        self._state, self._gates = args.handle.state, copy(args.topk_weights)
        brought = int(self._state.origin), copy(args.y), copy(args.row_weights)
        self._none = brought[1][:0], None if args.row_weights is None else args.row_weights[:0]
        self._key = transport.post("combine", brought)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        transport, config, out = self._transport, self._transport.config, self._out
        rank = config.group.rank
        brought = transport.collect(self._key, transport.active)
        check_origins("combine", rank, [None if each is None else each[0] for each in brought])
        step = self._state.step(config, transport.active)
        if self._gates is not None:
            step.weights[rank] = self._gates
        if out is not None:  # which may be of another dtype: sums are rounded once
            combine_dtype = config.resolved_combine_dtype
            config = msgspec.structs.replace(config, output_dtype=out.dtype, combine_dtype=combine_dtype)
            step = replace(step, config=config)
        ys, numbers = zip(*[self._none if each is None else each[1:] for each in brought], strict=True)
        zs, home = reference.combine(
            step, ys, row_weights=None if numbers[rank] is None else numbers, apply_weights=self._apply,
            domains=transport.domains,
        )  # fmt: skip
        z = zs[rank] if out is None else out.copy_(zs[rank])
        return z, None if home is None else home[rank]
