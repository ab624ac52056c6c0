"""What ranks do in test_overlap.py: two halves of a batch as vLLM's dual-batch overlap runs them.

Two threads with vLLM's own contexts, which hand over to one another at the backend's yields, and whose assertions hold
for which stream is current where. There being no GPU, streams are names, one current per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from ep_kernels import MoECommunicator
from tests.vllm.layers import NUM_EXPERTS, Case, Inputs, apply, engine, finalizer_of, joined

PATIENCE_S = 300
NUM_LAYERS = 3
Call = tuple[int, str, str]
"""(half, operation that begins, current stream)."""


class Stream:
    """As much of one as contexts use."""

    def __init__(self, name: str) -> None:
        self.name, self.wait_event = name, mock.Mock()


COMPUTE, COMM = Stream("compute"), Stream("comm")
_thread = threading.local()


def current() -> Stream:
    """The calling thread's."""
    found: Stream = getattr(_thread, "stream", COMPUTE)
    return found


def _switch(stream: Stream) -> None:
    _thread.stream = stream


class Kept:
    """Which tensors torch's allocator is told of, on which stream; `own`: by our classes, not by vLLM's."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.counts = {"compute": 0, "comm": 0}
        self._seen: set[tuple[int, str]] = set()

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Stands for `Tensor.record_stream`."""
        assert stream is current()
        self.counts[stream.name] += 1
        self._seen.add((tensor.data_ptr(), stream.name))

    def knows(self, tensor: torch.Tensor) -> bool:
        """That it is used on the current stream."""
        return not tensor.numel() or (tensor.data_ptr(), current().name) in self._seen


@contextmanager
def streams(kept: Kept) -> Iterator[list[Call]]:
    """vLLM and torch see the streams above; the calls of our communicators meanwhile."""
    from vllm.v1.worker import ubatching

    calls: list[Call] = []

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        kept.record(tensor, stream)

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(ubatching, "current_stream", current))
        if not kept.own:
            from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht

            stack.enter_context(patch(deepep_ht, "current_stream", current, create=True))
        stack.enter_context(patch(torch.cuda, "current_stream", current))
        stack.enter_context(patch(torch.Tensor, "record_stream", record_stream))
        stack.enter_context(patch(torch.cuda, "set_stream", _switch))
        stack.enter_context(patch(torch.cuda, "stream", lambda _: nullcontext()))
        stack.enter_context(patch(torch, "Event"))
        for name in ("dispatch", "dispatch_async", "combine", "combine_async"):
            stack.enter_context(patch(MoECommunicator, name, _noted(name, calls, kept)))
        yield calls


def _noted(name: str, calls: list[Call], kept: Kept) -> Any:
    from vllm.v1.worker import ubatching

    real = getattr(MoECommunicator, name)

    def call(self: MoECommunicator, *args: Any, **more: Any) -> Any:
        calls.append((ubatching.dbo_current_ubatch_id(), name.removesuffix("_async"), current().name))
        if kept.own and current() is COMM:
            assert all(kept.knows(each) for each in tensors(args)), "made on the other stream, and may be gone"
        return real(self, *args, **more)

    return call


def tensors(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Those among the arguments of a call."""
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from tensors(each)


def half(tokens: int, number: int) -> slice:
    """Tokens of the first or second half; not equally many."""
    cut = -(-tokens * 2 // 3)
    return slice(cut) if number == 0 else slice(cut, None)


def run(rank: int, size: int, store: Any, case: Case) -> tuple[list[Call], dict[str, int]]:
    """Some layers of both halves; (in what order our communicator was called, tensors kept by stream)."""
    kept = Kept(case.plugin == "native")
    with joined(rank, size, store), engine(case, rank, num_halves=2), streams(kept) as calls:
        _run_halves(case, rank)
        return calls, kept.counts


def _run_halves(case: Case, rank: int) -> None:
    from vllm.v1.worker.ubatching import make_ubatch_contexts

    finalizer = finalizer_of(case, rank, rank * NUM_EXPERTS // 4)
    ready = threading.Barrier(3)
    contexts = make_ubatch_contexts(2, COMPUTE, COMM, [mock.Mock(), mock.Mock()], ready)  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            with contexts[number]:
                for layer in range(NUM_LAYERS):
                    _layer(case, rank, finalizer, number, layer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(PATIENCE_S)
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def _layer(case: Case, rank: int, finalizer: Any, number: int, layer: int) -> None:
    inputs = Inputs(case, rank, layer)
    mine = half(len(inputs.x), number)
    inputs.x, inputs.ids, inputs.weights = inputs.x[mine], inputs.ids[mine], inputs.weights[mine]
    z = apply(case, finalizer, inputs, rank)
    torch.testing.assert_close(z.float(), inputs.expected(case), atol=6e-2, rtol=6e-2)
