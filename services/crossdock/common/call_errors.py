"""Errors of calls, and their conversion to and from grpc statuses.

A handler raises them, `rpc.call` and `rpc.call_sync` raise them again at the other end:

    CallError                 UNKNOWN, and every other status
    ├── InvalidArgument       INVALID_ARGUMENT       the message is invalid
    ├── NotFound              NOT_FOUND              this worker is unknown here: register
    ├── AlreadyExists         ALREADY_EXISTS         a newer process holds this identity: stop
    ├── FailedPrecondition    FAILED_PRECONDITION    valid, but at the wrong time or in the wrong group (an old epoch)
    ├── ResourceExhausted     RESOURCE_EXHAUSTED     a limit was reached; retry later or elsewhere
    ├── Aborted               ABORTED                lost a race; re-read before a retry
    ├── Unavailable           UNAVAILABLE            no answer, or none now; the only one that `call` retries
    ├── DeadlineExceeded      DEADLINE_EXCEEDED      also a TimeoutError
    ├── Cancelled             CANCELLED              the caller has cancelled
    ├── Unimplemented         UNIMPLEMENTED          the server is older
    ├── Internal              INTERNAL               a bug, or invalid bytes
    ├── Unauthenticated       UNAUTHENTICATED        missing or unknown token
    └── PermissionDenied      PERMISSION_DENIED      known caller without the required role
"""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

_CONNECTION_RESET = "Internal error from Core"
"""Message of grpc.aio for some streams whose connection was reset during a read; not from the server."""
_UNREACHED = re.compile(
    r"failed to connect to all addresses; last error: \w+: ipv[46]:(.*): Failed to connect .*: (.*)"
)
"""gRPC's message of a connection that could not be made: the last address that was tried, and why."""
_UNRESOLVED = re.compile(r"(?:DNS resolution failed for|errors resolving) ([^:\s]+):\d+:.*", re.DOTALL)
"""gRPC's messages of a name without an address."""
LEADER_KEY = "crossdock-leader"
"""Trailing metadata of UNAVAILABLE: host:port of the leading control plane."""


class CallError(Exception):
    """A call was refused or failed; `str()` is the message, `code` the grpc status."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN


class InvalidArgument(CallError, ValueError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(CallError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(CallError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(CallError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(CallError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Aborted(CallError):
    code = grpc.StatusCode.ABORTED


class Unavailable(CallError, ConnectionError):
    """No answer, or temporarily unavailable.

    Attributes:
        leader: host:port of the leading control plane, if a standby named it, else "".
    """

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class DeadlineExceeded(CallError, TimeoutError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(CallError):
    code = grpc.StatusCode.CANCELLED


class Unimplemented(CallError):
    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(CallError):
    code = grpc.StatusCode.INTERNAL


class Unauthenticated(CallError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(CallError):
    code = grpc.StatusCode.PERMISSION_DENIED


_BY_CODE: dict[grpc.StatusCode, type[CallError]] = {kind.code: kind for kind in CallError.__subclasses__()}


def error_for(code: grpc.StatusCode, message: str) -> CallError:
    """The error of a grpc status."""
    return _BY_CODE.get(code, CallError)(message)


def error_of(error: grpc.RpcError) -> CallError:
    """Convert an error that grpc raised in a client. The error itself is also the call that has the status."""
    call = cast("grpc.Call", error)
    code = call.code() or grpc.StatusCode.UNKNOWN
    if code is grpc.StatusCode.INTERNAL and call.details() == _CONNECTION_RESET:
        code = grpc.StatusCode.UNAVAILABLE
    details = call.details() or ""
    unreached = _UNREACHED.fullmatch(details)
    if unreached is not None:
        details = f"no connection to {unquote(unreached[1])}: {unreached[2]}"
    elif unresolved := _UNRESOLVED.fullmatch(details):
        details = f"no such host: {unresolved[1]}"
    made = error_for(code, details or code.name)
    if isinstance(made, Unavailable):
        made.leader = next((str(value) for key, value in call.trailing_metadata() or () if key == LEADER_KEY), "")
    return made


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Convert an error that a handler raised into a status. Of an unknown error the caller learns only the type."""
    if isinstance(error, CallError):
        return error.code, str(error)
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, str(error) or "deadline exceeded"
    if isinstance(error, DecodeError):
        return grpc.StatusCode.INVALID_ARGUMENT, f"request: expected a protobuf message of this method, got: {error}"
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED, "cancelled"
    return grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__}); see the server's log"


def code_number(code: grpc.StatusCode) -> int:
    """The number of a status, for messages that carry errors inside a stream."""
    return int(code.value[0])


def code_of_number(number: int) -> grpc.StatusCode:
    """The status of a number; UNKNOWN for a number that grpc does not define."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)
