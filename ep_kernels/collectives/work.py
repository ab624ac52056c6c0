"""What an operation returns: it is under way, and `wait` gives its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ep_kernels.errors import TransportError

T = TypeVar("T")


@contextlib.contextmanager
def in_step(begun: Sequence[object], broken: Callable[[TransportError], None]) -> Iterator[None]:
    """A call of several operations. What ends it behind the first of `begun` ends it on this rank alone: peers wait for
    the others, and would take the next operation for one of them, so `broken` gets the error."""
    try:
        yield
    except TransportError:
        raise
    except BaseException as error:
        if begun:
            broken(TransportError(f"a call ended between its operations: {type(error).__name__}: {error}"))
        raise


class Pending(Protocol):
    """An operation under way, as far as a Work cares."""

    def is_completed(self) -> bool:
        """Whether its result is there."""


P = TypeVar("P", bound=Pending)


class Work(Generic[T]):
    """A collective under way. Its x and out are not the caller's until `wait` has returned.

    Args:
        result: what `wait` returns.
        pending: the operation.
        finish: called once with it, by the first `wait`.
    """

    __slots__ = ("_error", "_finish", "_pending", "_result")

    def __init__(self, result: T, pending: P, finish: Callable[[P], None]) -> None:
        self._result, self._pending = result, pending
        self._finish: Callable[[P], None] | None = finish
        self._error: BaseException | None = None

    def wait(self) -> T:
        """The result, for whatever the current stream runs from now on: the stream waits, the CPU does not. With a
        transport on the CPU it is there. Later calls give the same, or raise the same error.

        Raises: PeerTimeout, AbortedError, ClosedError, TransportError (ranks brought different arguments, by rank), and
        HandleError where `set_active` came between. On GPUs, `check` raises what the device finds later.
        """
        finish = self._finish
        if finish is not None:
            self._finish = None
            try:
                finish(self._pending)
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def is_completed(self) -> bool:
        """Whether the result is there. Waits for nothing and raises nothing; False for ever where it failed."""
        return self._error is None and self._pending.is_completed()
