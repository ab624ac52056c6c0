"""Dispatch and combine of `Mode.AG` under way."""

from __future__ import annotations

import torch

from ep_kernels.gather.gather_engine import GatherEngine
from ep_kernels.gather.gather_member import operation_errors
from ep_kernels.gather.gather_routing import GatherState
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.collective_base import PendingCollective
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode


class GatherDispatch:
    """See `base.PendingDispatch`.

    Args:
        engine: of the rank.
        args: the operation.
        seq: its number; it uses slot seq % max_in_flight.
        epoch: membership.
    """

    def __init__(self, engine: GatherEngine, args: DispatchArgs, seq: int, epoch: int) -> None:
        self._engine, self._args, self._seq, self._epoch = engine, args, seq, epoch
        config = engine.config
        self.slot, self._num_tokens = seq % config.max_in_flight, args.x.shape[0]
        self._previous: GatherState | None = None if args.previous is None else args.previous.state
        asked = config.max_tokens_per_rank if args.step_tokens is None else args.step_tokens
        self._tokens = asked if self._previous is None else self._previous.step_tokens
        self._origin = seq if self._previous is None else self._previous.origin
        self._counts = torch.empty(config.group.size, dtype=torch.int32, device=engine.device)
        self._packed = engine.blank_scales()
        self._pending: PendingCollective | None = None
        self._rows: PendingCollective | None = None  # where rows go by themselves
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None

    def send(self) -> None:
        """The send half."""
        engine, args = self._engine, self._args
        x, scales = engine.payload(args, self.slot, self._tokens)
        self._rows = engine.send_rows(x, self.slot, self._origin)
        self._valid, self._invalid = engine.announce(args, self.slot, self._tokens, self._previous)
        rest = x if self._rows is None else None
        self._pending = engine.gather(rest, scales, self.slot, self._tokens, self._origin)
        if self._rows is not None:
            engine.place_rows(x, self.slot)
        self._stream = engine.stream()
        self._args = None  # type: ignore[assignment]  # it is in the slot, or the operation keeps it

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        slots = self._engine.slots
        scales = slots.get("scales", self.slot) if self._packed is None else self._packed
        return slots.tokens(self.slot), scales, self._counts

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        """See `base.PendingDispatch`."""
        if self._result is None:
            assert self._pending is not None
            with operation_errors():
                self._pending.wait()
            self._engine.lend(self._stream, self._counts, self._packed, self._valid, self._invalid)
            result = self._finish()
            if self._rows is not None:
                with operation_errors():
                    self._rows.wait()
            self._result = result
        return self._result

    def _finish(self) -> tuple[DispatchOutput, DispatchHandle]:
        engine = self._engine
        if self._previous is None:
            routed = engine.routing(self.slot, self._tokens, self._valid, self._invalid, self._origin)
        else:
            routed = engine.routed_again(self._previous)
        state = routed.state
        self._counts.copy_(state.counts)
        tokens, scales, counts = self.buffers()
        if self._packed is not None:
            engine.pack(self.slot, self._packed)
        ids, weights = engine.local_choices(self.slot, routed)
        output = DispatchOutput(
            layout=Layout.RANK_MAJOR,
            tokens=tokens,
            scales=scales,
            counts=counts,
            offsets=None,
            topk_ids=ids,
            topk_weights=weights,
            num_rows=counts.sum(0, keepdim=True, dtype=torch.int32),
            valid=state.valid,
            num_dropped=torch.zeros_like(counts[:1]),
            num_invalid_ids=state.num_invalid,
        )
        rows_shape = tuple(tokens.shape[:-1])
        return output, DispatchHandle(0, self._seq, self._num_tokens, Mode.AG, self._epoch, state, rows_shape)


class GatherCombine:
    """See `base.PendingCombine`.

    Args:
        engine: of the rank.
        args: the operation.
    """

    def __init__(self, engine: GatherEngine, args: CombineArgs) -> None:
        self._engine, self._args = engine, args
        self._state: GatherState = args.handle.state
        self._num_tokens = args.handle.num_tokens
        self._z = self._z_weights = torch.empty(0, dtype=torch.float32, device="cpu")
        self._weighs = args.row_weights is not None
        self._pending: list[PendingCollective] = []
        self._result: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def send(self, out: torch.Tensor | None = None) -> None:
        """The send half, into `out` where that has room for the step."""
        engine, args, state = self._engine, self._args, self._state
        tokens, device = state.step_tokens, args.y.device
        if out is None or self._num_tokens != tokens:
            out = torch.empty(tokens, engine.config.hidden_size, dtype=args.y.dtype, device=device)
        self._z = out
        self._pending.append(engine.reduce(engine.rows(args.y, state), out, state.origin))
        if args.row_weights is not None:
            self._z_weights = torch.empty(tokens, engine.config.topk, device=device, dtype=torch.float32)
            self._pending.append(engine.reduce(engine.choices(args.row_weights, state), self._z_weights, state.origin))
        self._stream = engine.stream()
        self._args = None  # type: ignore[assignment]  # the rows have been copied

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `base.PendingCombine`."""
        if not self._pending:
            self.send(out)
        if self._result is None:
            with operation_errors():
                for pending in self._pending:
                    pending.wait()
            self._engine.lend(self._stream, self._z, self._z_weights)
            z = self._z if self._z is out else self._z[: self._num_tokens]
            z = z if out is None or z is out else out.copy_(z)
            self._result = z, self._z_weights[: self._num_tokens] if self._weighs else None
        return self._result
