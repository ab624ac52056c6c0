"""What a client can end with, as one tree.

    ClientError                 anything without a name below; the message says what the service said
    ├── Unavailable             nobody serves just now: the group is forming, or a rank was lost; also a ConnectionError
    ├── Overloaded              the service refused more work; try later
    ├── DeadlineExceeded        no answer in time; also a TimeoutError
    ├── InvalidRequest          a request that can never work: shape, dtype, layer, ids; also a ValueError
    ├── NotAllowed              the service does not know this caller, or not as one who may do this
    └── ModelMismatch           what is served is not the model it is attached to; also a ValueError

`Unavailable` and `Overloaded` are worth trying again, and a client does so by itself until the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from crossdock.common import rpc
from crossdock.protocol.v1 import expert_pb2


class ClientError(Exception):
    """Base of every error that `crossdock.client` raises on purpose."""


class Unavailable(ClientError, ConnectionError):
    """Nobody serves just now.

    Attributes:
        lost_ranks: ranks known to be gone, ascending; empty if unknown.
        epoch: the group's membership counter when it was noticed; 0 if unknown.
    """

    def __init__(self, message: str, lost_ranks: Sequence[int] = (), epoch: int = 0) -> None:
        super().__init__(message)
        self.lost_ranks, self.epoch = tuple(sorted(lost_ranks)), epoch


class Overloaded(ClientError):
    """The service refused more work."""


class DeadlineExceeded(ClientError, TimeoutError):
    """No answer in time."""


class InvalidRequest(ClientError, ValueError):
    """A request that can never work; says argument, expected, got."""


class NotAllowed(ClientError):
    """The service does not know this caller, or not as one who may do this: certificate or token."""


class ModelMismatch(ClientError, ValueError):
    """What is served is not the model it is attached to."""


_BY_CODE: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
}

REFUSALS = (rpc.Unauthenticated, rpc.PermissionDenied)
"""Statuses that end a call for good, as long as certificates and tokens stay as they are."""


def from_answer(error: expert_pb2.Error) -> ClientError:
    """The error that a ForwardResponse carries."""
    code = rpc.code_of_number(error.code)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(error.message, error.lost_ranks, error.epoch)
    return _BY_CODE.get(code, ClientError)(error.message or code.name)


def from_call(error: rpc.CallError, where: str, lost_ranks: Sequence[int] = (), epoch: int = 0) -> ClientError:
    """The error that a whole call ended with. `lost_ranks` and `epoch` are what the caller knows of the other end."""
    message = f"{where}: {error}"
    if isinstance(error, rpc.Unavailable | rpc.Cancelled):
        return Unavailable(message, lost_ranks, epoch)
    return _BY_CODE.get(error.code, ClientError)(message)
