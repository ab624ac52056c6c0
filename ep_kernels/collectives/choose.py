"""Which algorithm runs an operation. Pure: sizes, places and capabilities in, an Algorithm out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp


@dataclass(frozen=True, slots=True)
class CollectiveShape:
    """What a choice depends on; equal on all ranks.

    Attributes:
        num_bytes: of one rank's x, over all parts.
        num_ranks: active ranks.
        num_sms: as the caller said; None: chosen.
        registered: out lies in the pool, at the same offset on all ranks: peers reach it.
        beside: an all-gather while something else wants the multiprocessors.
        library: torch.distributed may do it where that is faster: a sum that need not have the bits of the definition.
    """

    op: CollectiveOp
    num_bytes: int
    num_ranks: int
    num_sms: int | None
    registered: bool
    beside: bool = False
    library: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """How an operation runs.

    Attributes:
        algorithm: TORCH where the transport does not run it.
        reason: why TORCH must do it; "" otherwise.
    """

    algorithm: Algorithm
    reason: str = ""


def choose(shape: CollectiveShape, can: CollectiveCapabilities) -> Choice:
    """The algorithm of one call, equal on all ranks because its arguments are.

    all_gather: copy engines where `num_sms` is 0, or is None and the shard is large, less so beside something that
    wants the multiprocessors; else multiprocessors. Push where `out` is registered, else pull.
    all_reduce: ONE_SHOT up to the crossover, TWO_SHOT above. What a transport lacks is skipped: one with a single
    algorithm (shared memory) always runs that.
    """
    if can.reason:
        return Choice(Algorithm.TORCH, can.reason)
    has = can.algorithms.get(shape.op, ())
    most = can.max_bytes.get(shape.op)
    if not has:
        return Choice(Algorithm.TORCH, f"this transport has no {shape.op.value}")
    if most is not None and shape.num_bytes > most:
        return Choice(Algorithm.TORCH, f"{shape.op.value} of {shape.num_bytes} bytes; at most {most} here")
    if shape.library and shape.num_sms is None and _library_is_faster(shape, can):
        return Choice(Algorithm.TORCH)
    return Choice(next(algorithm for algorithm in (*_wanted(shape, can), *has) if algorithm in has))


def only(op: CollectiveOp, can: CollectiveCapabilities) -> Choice | None:
    """What runs every call of an operation, where nothing is to be chosen."""
    has = can.algorithms.get(op, ())
    if len(has) != 1 or can.reason or op in can.max_bytes or op in can.library_min_bytes:
        return None
    return Choice(has[0])


def copies_terms(num_bytes: int, num_ranks: int, num_sms: int | None, can: CollectiveCapabilities) -> bool:
    """Whether copy engines bring the terms of a summed matmul; equal on all ranks.

    Args:
        num_bytes: of a rank's whole product.
        num_ranks, num_sms: as in CollectiveShape; a caller that names multiprocessors wants them to bring the terms.
    """
    least = can.term_min_bytes
    return num_ranks > 1 and not num_sms and 0 < least <= num_bytes // num_ranks


def sums_whole(num_bytes: int, num_ranks: int, num_sms: int | None, can: CollectiveCapabilities) -> bool:
    """Whether a matmul is one product and then one sum by multiprocessors, whatever its `chunks`: where a transport has
    copy engines for the terms, and the terms have too few bytes for them. Arguments as `copies_terms`."""
    return not num_sms and num_bytes // num_ranks < can.term_min_bytes


def _library_is_faster(shape: CollectiveShape, can: CollectiveCapabilities) -> bool:
    least = _for_ranks(can.library_min_bytes.get(shape.op, {}), shape.num_ranks)
    scattered = shape.op is CollectiveOp.REDUCE_SCATTER
    return least is not None and shape.num_bytes // (shape.num_ranks if scattered else 1) >= least


def _for_ranks(by_fewest: Mapping[int, int], num_ranks: int) -> int | None:
    """The entry of the largest number that is not above `num_ranks`."""
    below = [value for ranks, value in sorted(by_fewest.items()) if ranks <= num_ranks]
    return below[-1] if below else None


def _wanted(shape: CollectiveShape, can: CollectiveCapabilities) -> Sequence[Algorithm]:
    """In order of preference."""
    if shape.op is CollectiveOp.REDUCE_SCATTER:
        return ()
    if shape.op is CollectiveOp.ALL_REDUCE:
        most = _for_ranks(can.one_shot_max_bytes, shape.num_ranks)
        return (Algorithm.TWO_SHOT if most is None or shape.num_bytes > most else Algorithm.ONE_SHOT,)
    copies = (Algorithm.COPY_PUSH, Algorithm.COPY_PULL)
    kernels = (Algorithm.KERNEL_PUSH, Algorithm.KERNEL_PULL)
    sent, least = shape.num_bytes * (shape.num_ranks - 1), can.copy_min_bytes
    if shape.beside:
        sent, least = shape.num_bytes, can.beside_min_bytes
    by_copy = shape.num_sms == 0 or (shape.num_sms is None and sent >= least)
    order = (*copies, *kernels) if by_copy else (*kernels, *copies)
    pushes = (Algorithm.COPY_PUSH, Algorithm.KERNEL_PUSH)
    return order if shape.registered else [a for a in order if a not in pushes]
