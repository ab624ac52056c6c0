"""Everything the data plane can refuse or lose, as one tree.

    EpError
    ├── ConfigError        a configuration that can never work; raised before anything is allocated
    ├── ArgumentError      a call's argument is wrong: shape, dtype, stride, device, value
    ├── HandleError        a handle or view from another communicator, or whose buffer was recycled
    ├── CapacityError      more rows arrived than the receive buffer holds, and overflow is RAISE
    ├── ClosedError        the communicator was closed, is the parent's of a forked child, or its graph refused to run
    └── TransportError     the transport could not be set up, or broke
        ├── AbortedError   this rank's waits were ended by abort(): the group is re-forming
        └── PeerTimeout    a peer stayed silent past the deadline, or its process is gone

ConfigError and ArgumentError are also ValueErrors, PeerTimeout is also a TimeoutError, so callers that know only
Python's own names still do the right thing. Each message says argument, expected, got.
"""

from typing import Any


class EpError(Exception):
    """Base of every error that `ep_kernels` raises on purpose."""


class ConfigError(EpError, ValueError):
    """A configuration that can never work.

    Args:
        field: name of its field.
        expected: what the field may be.
        got: what it was.
    """

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got!r}")
        self.field = field


class ArgumentError(EpError, ValueError):
    """An argument of a call is wrong; nothing was sent (where ranks differ: delivered) and the communicator is still
    usable.

    Args:
        argument: name of the argument.
        expected: what it may be.
        got: what it was.
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got}")
        self.argument = argument


class HandleError(EpError):
    """A handle of another communicator, of another step than the one that the peers brought, or a view of a buffer that
    has been recycled since."""


class CapacityError(EpError):
    """More rows arrived than the receive capacity. Only the receiving rank raises; the rows past the capacity were
    dropped, no memory was overwritten, and the group can go on: peers still expect this rank in `combine`, for which
    the error carries what the dispatch delivered.

    Attributes:
        num_dropped: rows dropped here.
        output: the `DispatchOutput` without them.
        handle: the `DispatchHandle` for combine.
    """

    def __init__(self, num_dropped: int, output: Any, handle: Any) -> None:
        super().__init__(f"dispatch: {num_dropped} rows past the receive capacity (max_recv_rows) were dropped")
        self.num_dropped, self.output, self.handle = num_dropped, output, handle


class ClosedError(EpError):
    """The communicator was closed, or belongs to the process of which this one is a forked child; no call works any
    more."""


class TransportError(EpError):
    """The transport could not be set up, or broke underneath."""


class AbortedError(TransportError):
    """`abort(reason)` ended this rank's waits. The communicator can only be closed now."""


class PeerTimeout(TransportError, TimeoutError):
    """A peer did not do its part before the deadline (or its process is known to be gone, or it was given up).

    Attributes:
        peer: rank of the silent peer.
        op: "dispatch", "combine", "all_gather", "reduce_scatter", "all_reduce", "barrier", "exchange", "set_active", or
            "connect" (to a rank of another host).
        phase: what was waited for, e.g. "counts", "payload", "credit".
        expected: sequence number waited for.
        seen: sequence number last seen from that peer.
        waited_s: seconds waited.
        gone: True if the peer's process was seen dead, or its connection ended; False if it is merely silent.
        given_up: True if `give_up` said that it is lost.
        block: of the kernel that waited; None: the host did.

    Args:
        end: why, of a peer of another host, in words.
    """

    def __init__(
        self,
        *,
        peer: int,
        op: str,
        phase: str,
        expected: int,
        seen: int,
        waited_s: float,
        gone: bool = False,
        given_up: bool = False,
        block: int | None = None,
        end: str = "",
    ) -> None:
        why = end or ("its process is gone" if gone else "it was given up" if given_up else "deadline passed")
        super().__init__(
            f"{op}: rank {peer} did not deliver {phase} (expected seq {expected}, seen {seen}, "
            f"waited {waited_s:.3f} s): {why}"
        )
        self.peer, self.op, self.phase = peer, op, phase
        self.expected, self.seen, self.waited_s, self.gone, self.given_up = expected, seen, waited_s, gone, given_up
        self.block = block
