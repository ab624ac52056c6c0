"""Collectives: what users call. Checks arguments once, chooses the algorithm, then makes one call into the transport.

    coll = Collectives(CollectiveConfig(group=TorchGroup(pg)))
    out = coll.empty((coll.size * n, h), torch.bfloat16)       # registered: peers reach it where it lies
    work = coll.all_gather(x, out=out)
    total = coll.all_reduce(x).wait()

Moves no bytes and knows no memory. Membership, meeting and closing are in `ep_kernels/membership.py`; matmuls that
overlap with a collective in `matmul.py`. docs/collectives.md says what moves where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from ep_kernels.collectives import collective_checks as checks
from ep_kernels.collectives import collective_ops as ops
from ep_kernels.collectives import copied_sums, matmul
from ep_kernels.collectives.choose import Choice, CollectiveShape, choose, copies_terms, only, sums_whole
from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import SUM_DTYPES, Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.collectives.establish import establish, process_group_of, warn_once
from ep_kernels.collectives.fallback import TorchCollectives
from ep_kernels.collectives.work import Work, in_step
from ep_kernels.errors import ArgumentError, TransportError
from ep_kernels.membership import GroupMember
from ep_kernels.transports.collective_base import (
    CollectivePlan,
    CollectiveTransport,
    GatherArgs,
    GatherPart,
    PendingCollective,
    PendingGather,
    Planner,
    ReduceArgs,
    TermCopies,
)

Key = tuple[Any, ...]
Found = tuple[CollectivePlan, torch.Size, int, int]
"""A plan, the shape of out, the addresses of x and out; 0 where there is no out."""
_NONE: Key = ()
MAX_PLANS = 512
"""A model repeats far fewer; a program that does not would fill memory with them."""


class Repeats:
    """Plans by key."""

    def __init__(self, size: int, planner: Planner) -> None:
        pool, self._planner = planner.pool(), planner
        self._size, self._first, self._last = size, pool.start, pool.stop
        self._plans: dict[Key, tuple[CollectivePlan, torch.Size]] = {}
        self._missed: Key | None = None

    def find(self, op: str, x: Any, out: Any, num_sms: int | None, beside: object = False) -> Found | None:
        """None: there is no plan, or the arguments need another look; the next `keep` is of them."""
        self._missed = None
        if type(x) is not torch.Tensor or (num_sms is not None and type(num_sms) is not int):
            return None
        if type(beside) is not bool:
            return None
        if x.layout is not torch.strided or x.requires_grad or not x.is_contiguous():
            return None
        at = x.data_ptr()
        if not at or x.is_neg():
            return None
        place = at - self._first if self._first <= at < self._last else None
        if out is x:
            there, out_key = at, None
        elif out is None:
            there, out_key = 0, _NONE
        else:
            if type(out) is not torch.Tensor or out.layout is not torch.strided or out.requires_grad:
                return None
            if not out.is_contiguous():
                return None
            there = out.data_ptr()
            if not there or out.is_neg():
                return None
            out_key = self._out_key(x, out, at, there)
        key = op, num_sms, beside, x.shape, x.dtype, x.device, place, out_key
        found = self._plans.get(key)
        if found is None:
            self._missed = None if x.dtype.is_complex else key  # which may be conjugated
            return None
        return *found, at, there

    def _out_key(self, x: torch.Tensor, out: torch.Tensor, at: int, there: int) -> Key:
        """What decides whether an out at `there` is good for an x at `at`."""
        place = there - self._first if self._first <= there < self._last else None
        near = self._size * x.nbytes
        distance = there - at if -near < there - at < near else None
        return out.shape, out.dtype, out.device, place, distance

    def keep(self, args: GatherArgs | ReduceArgs, op: CollectiveOp, out: torch.Tensor) -> None:
        """Plan for the next operation like this one, which has begun: `find` returns the plan for the arguments of its
        last, unsuccessful call."""
        key, self._missed = self._missed, None
        plan = None if key is None else self._planner.plan_for(args, op)
        if key is None or plan is None:
            return
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan, out.shape

    def clear(self) -> None:
        self._plans.clear()
        self._missed = None


class Collectives(GroupMember[CollectiveConfig, CollectiveTransport]):
    """All-gather, reduce-scatter and all-reduce among the ranks of one group. Construction is collective; several
    objects may live at once, over groups that overlap. As in `GroupMember`, all ranks call the same operations in the
    same order, from one thread. Results have no gradient.

    Where the transport cannot serve the group, torch.distributed does (`config.fallback`): one RuntimeWarning and
    `capabilities.reason` say why. Single operations that the transport does not have go there, too, with one warning.

    Raises:
        ConfigError: a field that this transport cannot do, or that differs between ranks (named in the error).
        TransportError: a peer did not come; or the transport cannot serve, and there is no process group to fall back
            on.
    """

    def __init__(self, config: CollectiveConfig) -> None:
        transport = establish(config)
        super().__init__(config, transport)
        self._torch: TorchCollectives | None = transport if isinstance(transport, TorchCollectives) else None
        self._warned: list[str] = []
        self._hands_over = not config.exact_sums and config.fallback and process_group_of(config.group) is not None
        self._repeats = None if transport.planner is None else Repeats(self.size, transport.planner)
        self._own = self._own_rank()
        try:
            with torch.inference_mode(False):
                self._site = ops.CollectiveSite.of(self._id, transport.capabilities.device_type)
            if transport.capabilities.reason:
                warn_once(self._warned, transport.capabilities.reason)
        except BaseException:
            self._leave()
            raise
        ops.register(self._site.name, self)

    @property
    def capabilities(self) -> CollectiveCapabilities:
        """What the transport can do; `reason` says why torch.distributed serves this object, if it does."""
        return self._transport.capabilities

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised tensor of registered memory: peers read and write it where it lies, so operations
        on it copy less. Collective: all ranks allocate the same tensors in the same order. Its memory returns to the
        pool when the last view has died on all ranks; the pool notices in a later `empty`.

        Raises ArgumentError: sizes differ between ranks, or `pool_bytes` are used up (then on all ranks).
        """
        sizes = tuple(shape)
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ArgumentError("shape", "ints that are not negative", sizes)
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype", "a torch.dtype", type(dtype).__name__)
        self._ready("empty")
        return self._run(self._transport.empty, sizes, dtype)

    def all_gather(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        num_sms: int | None = None,
        beside: bool = False,
    ) -> Work[torch.Tensor]:
        """Every rank's x, in rank order, on every rank. Collective.

        Args:
            x: [n, ...], any dtype, contiguous, of the same shape and dtype on all ranks. 0-d counts as [1]. May be
                out[rank * n : (rank + 1) * n] (in place).
            out: [R * n, ...] to write into, or None. The shard of an inactive rank is not written; a new out has zeros
                there.
            num_sms: GPUs: multiprocessors to fill; 0: copy engines alone; None: `config.num_sms`.
            beside: whether the caller runs something else meanwhile, equal on all ranks. Copy engines, which leave it
                the multiprocessors, are then chosen from smaller sizes on. Compiled code waits at once: it is ignored.

        Returns a Work whose `wait()` gives out. Raises ArgumentError (nothing was sent), PeerTimeout, AbortedError,
        ClosedError, TransportError.
        """
        if is_compiling():
            return ops.done(ops.all_gather(self, [x], None if out is None else [out], num_sms)[0])
        again = self._again("all_gather", x, out, num_sms, beside)
        if again is not None:
            return again
        gathered, pending = self._gather([x], None if out is None else [out], num_sms, repeats=True, beside=beside)
        return Work(gathered[0], pending, self._finish)

    def all_gather_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        *,
        outs: Sequence[torch.Tensor] | None = None,
        num_sms: int | None = None,
        beside: bool = False,
    ) -> Work[list[torch.Tensor]]:
        """`all_gather` of several tensors with one handshake. Their shapes and dtypes may differ from each other, not
        between ranks; any of them may be empty. No out may lie in another's memory, nor in the x of another."""
        if is_compiling():
            return ops.done(ops.all_gather(self, xs, outs, num_sms))
        gathered, pending = self._gather(xs, outs, num_sms, beside=beside)
        return Work(gathered, pending, self._finish)

    def reduce_scatter(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, op: str = "sum", num_sms: int | None = None
    ) -> Work[torch.Tensor]:
        """Rows [rank * n, (rank + 1) * n) of the sum of every rank's x. Collective.

        bfloat16, float16 and float32 are summed in fp32 in ascending rank and rounded once. Other dtypes, and other
        reductions than "sum" (`collective_checks.REDUCTIONS`), go to torch.distributed.

        Args:
            x: [R * n, ...], contiguous, of the same shape and dtype on all ranks.
            out: [n, ...] to write into, or None. May be x[rank * n : (rank + 1) * n].

        Returns and raises as `all_gather`; `num_sms` is at least 1.
        """
        if is_compiling():
            return ops.done(ops.reduce_scatter(self, x, out, op, num_sms))
        again = self._again("reduce_scatter", x, out, num_sms) if op == "sum" else None
        if again is not None:
            return again
        self._ready("reduce_scatter")
        given, made = checks.scattered(x, out, self._own)
        pending = self._reduce(CollectiveOp.REDUCE_SCATTER, given, made, op, num_sms)
        return Work(made, pending, self._finish)

    def all_reduce(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, op: str = "sum", num_sms: int | None = None
    ) -> Work[torch.Tensor]:
        """The sum of every rank's x, on every rank. Collective; as `reduce_scatter`.

        Args:
            x: [...], contiguous, of the same shape and dtype on all ranks.
            out: [...] to write into, or None. May be x itself.
        """
        if is_compiling():
            return ops.done(ops.all_reduce(self, x, out, op, num_sms))
        again = self._again("all_reduce", x, out, num_sms) if op == "sum" else None
        if again is not None:
            return again
        self._ready("all_reduce")
        given, made = checks.reduced(x, out, self._own)
        pending = self._reduce(CollectiveOp.ALL_REDUCE, given, made, op, num_sms)
        return Work(made, pending, self._finish)

    def all_gather_matmul(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        dim: int = 0,
        out: torch.Tensor | None = None,
        num_sms: int | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """`([x_all @ w for w in weights], x_all)`, where x_all is the x of every rank, along rows or columns. The rows
        of a rank are multiplied as soon as they have arrived, this rank's own first. Columns come in pieces of rows:
        one is multiplied while the next is on its way. Collective.

        Args:
            x: [n, K], as in `all_gather`; of columns [n, K / R].
            weights: [K, N_i] each, of x's dtype and device; N_i may differ between ranks.
            dim: along which x is gathered: 0, or 1 or -1, the last.
            out: [R * n, K] for x_all, or None; of columns [n, K], apart from x.

        Returns ([R * n, N_i] each, x_all [R * n, K]), of columns ([n, N_i] each, x_all [n, K]); where a rank is
        inactive, x_all has what out holds there. Raises as `all_gather`.
        """
        if is_compiling():
            return ops.all_gather_matmul(self, x, weights, dim, out, num_sms)
        if matmul.is_last(dim):
            return self._gather_columns(x, checks.sequence("weights", weights, None), out, num_sms)
        matmul.check_weights(x, checks.sequence("weights", weights, None))
        half = matmul.half_bytes(x, self.size), matmul.takes_halves(weights)
        gathered, pending = self._gather([x], None if out is None else [out], num_sms, half=half)
        ys = self._run(matmul.follow, pending, gathered[0], list(weights), self.size, self._active)
        self._run(pending.wait)
        return ys, gathered[0]

    def matmul_reduce_scatter(
        self, x: torch.Tensor, w: torch.Tensor, *, dim: int = 0, chunks: int = 2, num_sms: int | None = None
    ) -> torch.Tensor:
        """The sum of every rank's x @ w, of which each rank gets its rows, or its columns: while one chunk of the
        product is summed, the next is computed. Collective.

        Args:
            x: [T, K]. w: [K, N], of x's dtype and device, both on all ranks of the same shape.
            dim: along which the sum is scattered, a multiple of R: 0, or 1 or -1, the last.
            chunks: into which the rows that a rank gets are cut, at most so many; fewer where they would be small.

        Returns [T / R, N], or [T, N / R] along the last dimension: the product in the dtype of x, summed as
        `reduce_scatter` says. Raises as `all_gather`.
        """
        if is_compiling():
            return ops.matmul_reduce_scatter(self, x, w, dim, chunks, num_sms)
        last = matmul.is_last(dim)
        matmul.check_weights(x, [w])
        given = checks.contiguous("x", x, self.capabilities.device_type)
        if last and w.shape[1] % self.size:
            raise ArgumentError("w", f"a last dimension that {self.size} ranks divide", list(w.shape))
        if not last and given.shape[0] % self.size:
            raise ArgumentError("x", f"a first dimension that {self.size} ranks divide", list(given.shape))
        self._ready("matmul_reduce_scatter")
        factors = matmul.Factors(given, w, self.size, last)
        pieces, terms = self._schedule(chunks, given, w, factors.columns, num_sms)
        sms, begun = matmul.sms_beside(num_sms, self._config.num_sms, pieces), list[Any]()

        def scatter(rows: torch.Tensor, out: torch.Tensor) -> Work[torch.Tensor]:
            return self.reduce_scatter(rows, out=out, num_sms=sms)

        with in_step(begun, self._broken):
            if terms is not None:
                return self._run(copied_sums.scattered, terms, factors, self.rank, pieces, begun)
            return matmul.scattered(scatter, factors, pieces, begun)

    def matmul_all_reduce(
        self, x: torch.Tensor, w: torch.Tensor, *, chunks: int = 4, num_sms: int | None = None
    ) -> torch.Tensor:
        """`all_reduce(x @ w)`: while one chunk of rows is summed, the next is computed. Collective.

        Args:
            x: [T, K]. w: [K, N], of x's dtype and device, both on all ranks of the same shape.
            chunks: into which the T rows are cut, at most T; fewer where they would be small.

        Returns [T, N]: the product in the dtype of x, summed as `all_reduce` says. Raises as `all_gather`.
        """
        if is_compiling():
            return ops.matmul_all_reduce(self, x, w, chunks, num_sms)
        matmul.check_weights(x, [w])
        given = checks.contiguous("x", x, self.capabilities.device_type)
        self._ready("matmul_all_reduce")
        pieces, terms = self._schedule(chunks, given, w, w.shape[1], num_sms)
        sms = matmul.sms_beside(num_sms, self._config.num_sms, pieces) if terms is None else None
        begun = list[Any]()

        def reduce(rows: torch.Tensor) -> Work[torch.Tensor]:
            return self.all_reduce(rows, out=rows, num_sms=sms)

        with in_step(begun, self._broken):
            if terms is not None:
                return self._run(copied_sums.reduced, terms, reduce, given, w, self.rank, self.size, pieces, begun)
            return matmul.reduced(reduce, given, w, pieces, begun)

    # Inside.

    def _forget(self) -> None:
        self._own = self._own_rank()
        if self._repeats is not None:
            self._repeats.clear()

    def _again(
        self, op: str, x: torch.Tensor, out: torch.Tensor | None, num_sms: int | None, beside: bool = False
    ) -> Work[torch.Tensor] | None:
        """The operation, by the plan of an earlier one like it; None: no such plan, or the full path must check."""
        found = None if self._repeats is None else self._repeats.find(op, x, out, num_sms, beside)
        if found is None or self._closed or self._fault is not None:
            return None
        plan, shape, at, there = found
        if out is None:
            out = checks.made(x.new_empty(shape))
            there = out.data_ptr()
        try:
            pending = plan.begin(x, out, at, there)
        except TransportError as error:
            self._broken(error)
            raise
        return None if pending is None else Work(out, pending, self._finish_again)

    def _finish_again(self, pending: PendingCollective) -> None:
        """`_finish` of an operation whose plan has looked at what `_ready` would."""
        if self._closed or self._fault is not None:
            self._ready("wait")
        try:
            pending.wait()
        except TransportError as error:
            self._broken(error)
            raise

    def _remember(self, args: GatherArgs | ReduceArgs, op: CollectiveOp, out: torch.Tensor) -> None:
        """Plan for the next operation like this one, which has begun."""
        if self._repeats is not None and not self._own.inactive:
            self._repeats.keep(args, op, out)

    def _gather_columns(
        self, x: torch.Tensor, weights: Sequence[Any], out: torch.Tensor | None, num_sms: int | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """`all_gather_matmul` along the last dimension."""
        matmul.check_weights(x, weights, self.size)
        given = checks.contiguous("x", x, self.capabilities.device_type)
        gathered, begun = checks.joined(given, out, self._own), list[Any]()
        checks.num_sms(num_sms, self._config.num_sms, 0)
        self._ready("all_gather_matmul")

        def gather(rows: torch.Tensor) -> Work[torch.Tensor]:
            return self.all_gather(rows, num_sms=num_sms, beside=True)

        pieces = matmul.column_pieces(checks.num_bytes(given), self.capabilities.beside_min_bytes)
        with in_step(begun, self._broken):
            ys = matmul.follow_columns(gather, given, list(weights), gathered, self._active, pieces, begun)
        return ys, gathered

    def _schedule(
        self, chunks: int, x: torch.Tensor, w: torch.Tensor, columns: int, num_sms: int | None
    ) -> tuple[int, TermCopies | None]:
        """(chunks of x @ w, copy engines for its terms; None where multiprocessors move them). `columns`: of what a
        rank sums."""
        num_bytes, sms = x.shape[0] * w.shape[1] * w.itemsize, self._config.num_sms if num_sms is None else num_sms
        asked, can, terms = matmul.check_chunks(chunks), self.capabilities, self._transport.terms
        if sums_whole(num_bytes, self.size, sms, can):
            return 1, None
        copied = not self._own.inactive and copies_terms(num_bytes, self.size, sms, can)
        if not copied or x.dtype not in SUM_DTYPES or torch.cuda.is_current_stream_capturing():
            return asked, None
        fits = terms is not None and copied_sums.most_rows(terms, columns, w.dtype)
        return asked, terms if fits else None

    def _own_rank(self) -> checks.OwnRank:
        return checks.OwnRank(self.rank, self.size, self.capabilities.device_type, not all(self._active))

    def _gather(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
        num_sms: int | None,
        *,
        repeats: bool = False,
        beside: bool = False,
        half: tuple[int, bool] | None = None,  # a matmul follows; half_bytes and takes_halves of GatherArgs
    ) -> tuple[list[torch.Tensor], PendingGather]:
        self._ready("all_gather")
        shards = checks.sequence("xs", xs, None)
        places = [None] * len(shards) if outs is None else checks.sequence("outs", outs, len(shards))
        own, alone = self._own, len(shards) == 1
        given, made, parts = list[torch.Tensor](), list[torch.Tensor](), list[GatherPart]()
        for i, (one, place) in enumerate(zip(shards, places, strict=True)):
            x, out = checks.gathered("" if alone else f"s[{i}]", one, place, own)
            given.append(x)
            made.append(out)
            parts.append(GatherPart(checks.flat_bytes(x), checks.flat_bytes(out), x.dtype))
        if not alone and outs is not None:
            checks.disjoint(list(zip(given, made, strict=True)))
        sms = checks.num_sms(num_sms, self._config.num_sms, 0)
        if beside is not False:
            checks.flag("beside", beside)
        choice = self._choose(CollectiveOp.ALL_GATHER, given, made, sms, beside, half is not None)
        torched = choice.algorithm is Algorithm.TORCH
        transport = self._by_torch("all_gather", choice.reason) if torched else self._transport
        args = GatherArgs(tuple(parts), choice.algorithm, sms, *half or (0, False))
        pending = self._run(transport.all_gather, args)
        if repeats and not torched:
            self._remember(args, CollectiveOp.ALL_GATHER, made[0])
        return made, pending

    def _reduce(
        self, kind: CollectiveOp, x: torch.Tensor, out: torch.Tensor, op: str, num_sms: int | None
    ) -> PendingCollective:
        sms = checks.num_sms(num_sms, self._config.num_sms, 1)
        why = checks.why_not_summed(checks.reduction(op), x.dtype)
        choice = Choice(Algorithm.TORCH, why) if why else self._choose(kind, [x], [out], sms)
        args = ReduceArgs(x.reshape(-1), out.reshape(-1), choice.algorithm, sms)
        scattered = kind is CollectiveOp.REDUCE_SCATTER
        if choice.algorithm is Algorithm.TORCH:
            served = self._by_torch(kind.value, choice.reason)
            return self._run(served.reduce_scatter if scattered else served.all_reduce, args, op)
        transport = self._transport
        pending = self._run(transport.reduce_scatter if scattered else transport.all_reduce, args)
        self._remember(args, kind, out)
        return pending

    def _choose(
        self,
        op: CollectiveOp,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        num_sms: int | None,
        beside: bool = False,
        followed: bool = False,
    ) -> Choice:
        """`followed`: by a matmul, shard by shard."""
        if (choice := only(op, self._transport.capabilities)) is not None:
            return choice
        total = sum(checks.num_bytes(x) for x in xs)
        library = self._hands_over and not self._own.inactive
        registered = all(self._transport.offset_of(out) is not None for out in outs if out.numel())
        if followed and registered:  # what is pulled is staged first, and not told apart
            beside = xs[0].is_cuda and not torch.cuda.is_current_stream_capturing()  # a graph tells no shards
        shape = CollectiveShape(op, total, sum(self._active), num_sms, registered, beside, library)
        return choose(shape, self.capabilities)

    def _by_torch(self, op: str, why: str) -> TorchCollectives:
        """torch.distributed, for an operation that the transport leaves to it; says once why it must be, if it must."""
        if self._torch is None:
            group = self._config.group
            if not self._config.fallback or process_group_of(group) is None:
                cure = "a TorchGroup and fallback=True let torch.distributed do it"
                raise ArgumentError("x", f"what transport {self._config.transport!r} can do ({cure})", why)
            self._torch = TorchCollectives(group, self.capabilities.device_type, "")
        if self._own.inactive:
            raise ArgumentError("x", "what the transport can do while a rank is left out", why)
        warn_once(self._warned, why and f"{op}: {why}")
        return self._torch

    def _finish(self, pending: PendingCollective) -> None:
        self._ready("wait")
        self._run(pending.wait)
