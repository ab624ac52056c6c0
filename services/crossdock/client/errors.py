"""Errors of clients.

    ClientError                 any other error; the message is from the service
    ├── Unavailable             the group does not serve: it is forming, or a rank was lost; also a ConnectionError
    ├── Overloaded              the service refused more work; retry later
    ├── DeadlineExceeded        no answer before the deadline; also a TimeoutError
    ├── InvalidRequest          a request that can never work: shape, dtype, layer, ids; also a ValueError
    ├── NotAllowed              the caller is unknown, or lacks the required role
    └── ModelMismatch           the service has another model than the attached or wanted one; also a ValueError

`Unavailable` and `Overloaded` are retried by clients until the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from crossdock.common import call_errors
from crossdock.protocol.v1 import expert_pb2


class ClientError(Exception):
    """Base of the errors of `crossdock.client`."""


class Unavailable(ClientError, ConnectionError):
    """The group does not serve.

    Attributes:
        lost_ranks: known lost ranks, ascending; empty if unknown.
        epoch: of the group at that time; 0 if unknown.
    """

    def __init__(self, message: str, lost_ranks: Sequence[int] = (), epoch: int = 0) -> None:
        super().__init__(message)
        self.lost_ranks, self.epoch = tuple(sorted(lost_ranks)), epoch


class Overloaded(ClientError):
    """The service refused more work."""


class DeadlineExceeded(ClientError, TimeoutError):
    """No answer before the deadline."""


class InvalidRequest(ClientError, ValueError):
    """A request that can never work; the message has argument, expected, got."""


class NotAllowed(ClientError):
    """The caller is unknown, or lacks the required role: certificate or token."""


class ModelMismatch(ClientError, ValueError):
    """The service serves another model than the attached one, or a layer has another checkpoint than the one that
    `model` of the client names."""


_BY_CODE: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatch,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
}

REFUSALS = (call_errors.Unauthenticated, call_errors.PermissionDenied)
"""Permanent errors while certificates and tokens stay the same."""


def from_answer(error: expert_pb2.Error) -> ClientError:
    """The error in a ForwardResponse."""
    code = call_errors.code_of_number(error.code)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(error.message, error.lost_ranks, error.epoch)
    return _BY_CODE.get(code, ClientError)(error.message or code.name)


def from_call(error: call_errors.CallError, where: str, lost_ranks: Sequence[int] = (), epoch: int = 0) -> ClientError:
    """The error of a whole call. `lost_ranks` and `epoch`: what is known of the other end."""
    message = f"{where}: {error}"
    if isinstance(error, call_errors.Unavailable | call_errors.Cancelled):
        return Unavailable(message, lost_ranks, epoch)
    return _BY_CODE.get(error.code, ClientError)(message)
