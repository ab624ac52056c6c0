"""What an operation returns: it is under way, and `wait` gives its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """A collective under way. Its x and out are not the caller's until `wait` has returned.

    Args:
        result: what `wait` returns.
        wait: finishes the operation; called once.
        is_completed: whether the result is there; asked until it is.
    """

    def __init__(self, result: T, wait: Callable[[], None], is_completed: Callable[[], bool]) -> None:
        self._result = result
        self._finish: Callable[[], None] | None = wait
        self._ask = is_completed
        self._error: BaseException | None = None

    def wait(self) -> T:
        """The result, for whatever the current stream runs from now on: the stream waits, the CPU does not. With a
        transport on the CPU it is there. Later calls give the same, or raise the same error.

        Raises: PeerTimeout, AbortedError, ClosedError, TransportError (ranks brought different arguments, by rank), and
        HandleError where `set_active` came between. On GPUs, `check` raises what the device finds later.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def is_completed(self) -> bool:
        """Whether the result is there. Waits for nothing and raises nothing; False for ever where it failed."""
        if self._error is not None:
            return False
        return self._ask()
