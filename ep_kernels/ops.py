"""Dispatch and combine as torch operators: what `torch.compile` sees instead of `MoECommunicator`'s methods.

A compiled function calls `comm.dispatch` and `comm.combine` as any other; while it is traced they record
`torch.ops.crossdock.*`, whose kernels call the same methods when the compiled code runs. Eager code never comes here.

* Communicators go by name, through weak references: neither an operator nor compiled code keeps one alive.
* Every collective operator takes `order`, a tensor of the communicator (in backward passes a second one, since a tensor
  that is written later cannot be saved for backward), and gives a stamp, which is written to it. So the compiler keeps
  all of them, also equal ones and those whose result is unused, in the order of the program, which is the same on all
  ranks. It sees that only the last stamp is ever read: no copy is left but one per graph.
* Outputs are copies. The compiler may use the memory of an intermediate again for another, or read it later than the
  program says; a view of a registered buffer, which peers write to, would not survive either.
* A handle made here carries its routing as tensors, so that a graph can pass it on: `Transport.flatten`, `restore`.

Shapes are static where the communicator's are (`exact_shapes=False`, or one of the layouts with fixed slots); else the
number of rows is an unbacked symbol.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from ep_kernels import bringup, checks, quant
from ep_kernels.config import MoEConfig, receive_rows
from ep_kernels.errors import ClosedError
from ep_kernels.transports.base import Transport
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode, ScaleFormat

Handle = tuple[int, int, int, str, Sequence[int], Sequence[torch.Tensor]]
"""(owner, epoch, num_tokens, algorithm, rows_shape, routing) of a DispatchHandle, as operators take it."""
OUTPUTS = 6
"""tokens, scales, numbers (counts, offsets, num_rows, num_dropped, num_invalid_ids one after the other), topk_ids,
topk_weights, valid; those that a configuration does not have are empty. The routing follows."""
_HANDLE = "SymInt owner, SymInt epoch, SymInt num_tokens, str algorithm, SymInt[] rows_shape, Tensor[] routing"
FRESH: Handle = (0, 0, 0, "", (), ())
"""No `previous_handle`."""

# What tracing sees of a communicator, and what operators need of it when they run.


@dataclass(frozen=True)
class TraceSite:
    """What tracing has to know of a communicator; every field that is read becomes a guard of the compiled code.

    Attributes:
        comm: its name in operators.
        owner: as in DispatchHandle.
        scales: payloads have scales.
        num_groups: length of counts.
        order: int32 [1] on the payload's device, which every operator of a forward pass writes: see ops.py.
        backward_order: the same of backward passes. A tensor that forward passes write cannot be saved for backward.
    """

    comm: str
    owner: int
    layout: Layout
    mode: Mode
    ll_max_tokens: int
    max_tokens: int
    hidden_size: int
    scales: bool
    num_groups: int
    dtype: torch.dtype
    output_dtype: torch.dtype
    order: torch.Tensor
    backward_order: torch.Tensor

    @classmethod
    def of(cls, owner: int, config: MoEConfig, ll_max_tokens: int, device: str) -> TraceSite:
        """The description of a communicator that has been brought up."""
        order, backward_order = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        for tensor in (order, backward_order):
            # What torch._dynamo.mark_static_address does, whose import would cost seconds. CUDA graphs of the compiler
            # may then contain what mutates it.
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        return cls(
            comm=f"crossdock-{owner}-{_digest(config)}",
            owner=owner,
            layout=config.resolved_layout,
            mode=config.mode,
            ll_max_tokens=ll_max_tokens,
            max_tokens=config.max_tokens_per_rank,
            hidden_size=config.hidden_size,
            scales=has_scales(config),
            num_groups=num_groups(config),
            dtype=config.dtype,
            output_dtype=config.resolved_output_dtype,
            order=order,
            backward_order=backward_order,
        )


def _digest(config: MoEConfig) -> str:
    """Digest of all that shapes and dtypes follow from. The compiler keeps code on disk by the text of a graph, which
    has the communicator's name: in another process that number may be one of another configuration."""
    text = repr((config.group.size, config.group.rank, sorted(bringup.fingerprint(config).items())))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Communicator(Protocol):
    """What operators need of a `MoECommunicator`."""

    _site: TraceSite
    _epoch: int
    _transport: Transport

    @property
    def config(self) -> MoEConfig:
        """The configuration that the ranks agreed on."""

    @property
    def num_local_experts(self) -> int:
        """L."""

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        previous_handle: DispatchHandle | None = None,
        step_tokens: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Both halves."""

    def combine_now(
        self, y: torch.Tensor, handle: DispatchHandle, row_weights: torch.Tensor | None, apply_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both halves; (z, the row weights that were returned)."""

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """The weight of every row."""


def num_groups(config: MoEConfig) -> int:
    """Length of `DispatchOutput.counts`."""
    group = config.group
    local: int = config.resolved_expert_map.num_local_experts(group.rank)
    return local if config.resolved_layout.per_expert else int(group.size)


def has_scales(config: MoEConfig) -> bool:
    return bool(config.quantize or config.scale_columns)


_library: Any = torch.library.Library("crossdock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"dispatch(Tensor order, str comm, Tensor x, Tensor? scales, Tensor? topk_ids, Tensor? topk_weights, "
    f"SymInt? step_tokens, {_HANDLE}) -> Tensor[]"
)
_library.define(
    f"combine(Tensor order, str comm, Tensor y, {_HANDLE}, Tensor? row_weights, bool apply_weights) -> Tensor[]"
)
_library.define(f"row_weights(str comm, {_HANDLE}) -> Tensor")


_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def register(name: str, comm: Communicator) -> None:
    """Let operators find it. Holds a weak reference."""
    _communicators[name] = comm


def find(name: str) -> Communicator:
    """Raises ClosedError where it is gone."""
    comm = _communicators.get(name)
    if comm is None:
        raise ClosedError(f"communicator {name}: no longer exists")
    return comm


# What the compiler traces.


def dispatch(
    comm: Communicator,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    previous: DispatchHandle | None = None,
    step_tokens: int | None = None,
) -> tuple[DispatchOutput, DispatchHandle]:
    """As `MoECommunicator.dispatch`. The output does not expire."""
    site = comm._site
    body, scales = x if isinstance(x, tuple) else (x, None)
    body, topk_weights = body.detach(), _detached(topk_weights)
    if previous is None:
        mode, former = mode_of(site, step_tokens), FRESH
    else:
        mode, former, topk_ids = previous.mode, carried(previous), previous.topk_ids
        topk_weights = _detached(previous.topk_weights) if topk_weights is None else topk_weights
    stamp, *results = torch.ops.crossdock.dispatch(
        site.order, site.comm, body, scales, topk_ids, topk_weights, step_tokens, *former
    )
    site.order.copy_(stamp)
    out = output_of(site.layout, site.num_groups, results)
    return out, handle_of(comm, out, mode, results, topk_ids, topk_weights)


def combine(
    comm: Communicator,
    y: torch.Tensor,
    handle: DispatchHandle,
    out: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    apply_weights: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(z, the row weights that were returned), as `MoECommunicator.combine_async`; z is copied to `out`."""
    site = comm._site
    if out is not None:
        shape = handle.num_tokens, site.hidden_size
        checks.traced_out(out, shape, site.output_dtype, site.order.device.type)
    stamp, z, *weights = torch.ops.crossdock.combine(
        site.order, site.comm, y.detach(), *carried(handle), _detached(row_weights), apply_weights
    )
    site.order.copy_(stamp)
    return z if out is None else out.copy_(z), weights[0] if weights else None


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The operators have no gradients; `autograd.py` has."""
    return None if tensor is None else tensor.detach()


def row_weights(comm: Communicator, handle: DispatchHandle) -> torch.Tensor:
    weights: torch.Tensor = torch.ops.crossdock.row_weights(comm._site.comm, *carried(handle))
    return weights


def dispatch_input(comm: Communicator, num_tokens: int) -> torch.Tensor:
    """A buffer like `MoECommunicator.dispatch_input`'s, but not registered."""
    site = comm._site
    return torch.empty(num_tokens, site.hidden_size, dtype=site.dtype, device=site.order.device)


def combine_input(comm: Communicator, handle: DispatchHandle) -> torch.Tensor:
    """A buffer like `MoECommunicator.combine_input`'s, but not registered."""
    site = comm._site
    return torch.empty(*handle.rows_shape, site.hidden_size, dtype=site.output_dtype, device=site.order.device)


def carried(handle: DispatchHandle) -> Handle:
    """The handle as operators take it."""
    state = handle.state
    routing = state if isinstance(state, tuple) else state.flatten()
    return handle.owner, handle.epoch, handle.num_tokens, handle.mode.value, list(handle.rows_shape), list(routing)


def output_of(layout: Layout, num_groups: int, results: Sequence[torch.Tensor]) -> DispatchOutput:
    """The operator's outputs (without the stamp) by name."""
    tokens, scales, numbers, ids, weights, valid = results[:OUTPUTS]
    return DispatchOutput(
        layout=layout,
        tokens=tokens,
        scales=scales if scales.dim() > 1 else None,
        counts=numbers[:num_groups],
        offsets=numbers[num_groups : 2 * num_groups + 1] if layout is Layout.GROUPED else None,
        topk_ids=None if layout.per_expert else ids,
        topk_weights=None if layout.per_expert else weights,
        num_rows=numbers[-3:-2],
        valid=valid,
        num_dropped=numbers[-2:-1],
        num_invalid_ids=numbers[-1:],
    )


def handle_of(
    comm: Communicator,
    out: DispatchOutput,
    mode: Mode,
    results: Sequence[torch.Tensor],
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> DispatchHandle:
    """The handle of a traced dispatch. Its seq is 0: it has no buffer that could be recycled."""
    return DispatchHandle(
        owner=comm._site.owner,
        seq=0,
        num_tokens=out.valid.shape[0],
        mode=mode,
        epoch=comm._epoch,
        state=tuple(results[OUTPUTS:]),
        rows_shape=tuple(out.tokens.shape[:-1]),
        topk_ids=topk_ids,
        topk_weights=topk_weights,
    )


def mode_of(site: TraceSite, step_tokens: int | None) -> Mode:
    """The algorithm of a fresh dispatch; AUTO's is chosen here, once for all calls of the compiled code."""
    if site.mode is not Mode.AUTO:
        return site.mode
    tokens = site.max_tokens if step_tokens is None else step_tokens
    return Mode.LL if tokens <= site.ll_max_tokens else Mode.HT


# What runs.


def _dispatch(
    order: torch.Tensor,
    comm: str,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    step_tokens: int | None,
    *handle: Any,
) -> list[torch.Tensor]:
    it = find(comm)
    former = _handle(handle, topk_ids, topk_weights) if handle[-1] else None
    payload = x if scales is None else (x, scales)
    out, made = it.dispatch(payload, topk_ids, topk_weights, previous_handle=former, step_tokens=step_tokens)
    offsets = () if out.offsets is None else (out.offsets,)
    lead = tuple(out.tokens.shape[:-1])
    results = [
        out.tokens.clone(memory_format=torch.contiguous_format),
        None if out.scales is None else _blank_scales(it.config, lead, x.device).copy_(out.scales),
        torch.cat([out.counts, *offsets, out.num_rows, out.num_dropped, out.num_invalid_ids]),
        out.topk_ids,
        out.topk_weights,
        out.valid,
        *made.state.flatten(),
    ]
    given = [x, scales, topk_ids, topk_weights, *handle[-1]]
    return _distinct(_present(order, results), [t for t in given if t is not None])


def _combine(order: torch.Tensor, comm: str, y: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    *handle, row_weights, apply_weights = rest
    z, weights = find(comm).combine_now(y, _handle(handle), row_weights, apply_weights)
    return [torch.empty_like(order), z] if weights is None else [torch.empty_like(order), z, weights]


def _row_weights(comm: str, *handle: Any) -> torch.Tensor:
    return find(comm).row_weights(_handle(handle))


def _handle(
    parts: Sequence[Any], topk_ids: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
) -> DispatchHandle:
    owner, epoch, num_tokens, algorithm, rows_shape, routing = parts
    return DispatchHandle(
        owner, 0, num_tokens, Mode(algorithm), epoch, tuple(routing), tuple(rows_shape), topk_ids, topk_weights
    )


def _present(order: torch.Tensor, results: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """A stamp, and the results with something in place of those that are not."""
    present = [order.new_empty(0) if result is None else result for result in results]
    return [torch.empty_like(order), *present]


def _distinct(results: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the values, each at the start of memory that it shares with no other and with nothing given: an
    operator's outputs must not alias, and compiled code relies on their alignment."""
    taken = {_memory(tensor) for tensor in given}
    for index, tensor in enumerate(results):
        if tensor.storage_offset() or _memory(tensor) in taken:
            results[index] = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(_memory(tensor))
    return results


def _memory(tensor: torch.Tensor) -> int:
    """Equal where two tensors share memory: the address, or the storage itself where it is empty and has none."""
    storage = tensor.untyped_storage()
    address: int = storage.data_ptr() or storage._cdata
    return address


# What tracing takes for it.


def _fake_dispatch(
    order: torch.Tensor,
    comm: str,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    step_tokens: int | None,
    *handle: Any,
) -> list[torch.Tensor]:
    it, device = find(comm), x.device
    config, tokens, layout = it.config, x.shape[0], it.config.resolved_layout
    lead = tuple(handle[4]) if handle[-1] else _lead(config, it.num_local_experts)
    groups = num_groups(config)

    def blank(*shape: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, weights = None, None
    if not layout.per_expert:
        ids, weights = blank(*lead, config.topk), blank(*lead, config.topk, dtype=torch.float32)
    results = [
        blank(*lead, config.payload_columns, dtype=config.payload_dtype),
        _blank_scales(config, lead, device) if has_scales(config) else None,
        blank(2 * groups + 4 if layout is Layout.GROUPED else groups + 3),
        ids,
        weights,
        blank(tokens, dtype=torch.bool),
        *it._transport.blank_state(tokens).flatten(),
    ]
    return _present(order, results)


def _fake_combine(order: torch.Tensor, comm: str, y: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    config, tokens, row_weights = find(comm).config, rest[2], rest[6]
    z = y.new_empty(tokens, config.hidden_size, dtype=config.resolved_output_dtype)
    weights = [] if row_weights is None else [y.new_empty(tokens, config.topk, dtype=torch.float32)]
    return [torch.empty_like(order), z, *weights]


def _fake_row_weights(comm: str, *handle: Any) -> torch.Tensor:
    weights: torch.Tensor = handle[-1][0].new_empty(list(handle[4]), dtype=torch.float32)
    return weights


def _lead(config: MoEConfig, num_local: int) -> tuple[Any, ...]:
    """Leading shape of a fresh dispatch's tokens."""
    rows = receive_rows(config, num_local)
    match config.resolved_layout:
        case Layout.EXPERT_MAJOR:
            return num_local, rows
        case Layout.RANK_MAJOR:
            return config.group.size, config.max_tokens_per_rank
        case _:
            return (torch.library.get_ctx().new_dynamic_size() if config.exact_shapes else rows,)


def _blank_scales(config: MoEConfig, lead: Sequence[Any], device: torch.device) -> torch.Tensor:
    columns, dtype = quant.delivered_scales(config)
    if config.scale_format is not ScaleFormat.UE8M0_PACKED:
        return torch.empty((*lead, columns), device=device, dtype=dtype)
    pad = (lead[-1] + quant.ROW_PAD - 1) // quant.ROW_PAD * quant.ROW_PAD
    planes = (columns * pad,) if len(lead) > 1 else ()
    return torch.empty_strided((*lead, columns), (*planes, 1, pad), dtype=torch.int32, device=device)


for _name, _real, _fake in (
    ("dispatch", _dispatch, _fake_dispatch),
    ("combine", _combine, _fake_combine),
    ("row_weights", _row_weights, _fake_row_weights),
):
    # Between two graphs an operator runs where the compiler looks at every function that is called: not into these,
    # whose calls of the communicator would be traced, become the same operator, and so on. (`torch.compiler.disable`
    # does the same, but imports the compiler now, which takes seconds.)
    _library.impl(_name, _disable_dynamo(_real), "CompositeExplicitAutograd")
    torch.library.register_fake(f"crossdock::{_name}", _fake, lib=_library)
