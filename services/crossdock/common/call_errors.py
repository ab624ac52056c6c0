"""What a call can end with, as Python errors, and how they become statuses and come back from them.

A handler raises them, `rpc.call` and `rpc.call_sync` raise them again at the other end:

    CallError                 UNKNOWN, and every status without a name below
    ├── InvalidArgument       INVALID_ARGUMENT       the message can never be right
    ├── NotFound              NOT_FOUND              this worker is not known here (any more): register
    ├── AlreadyExists         ALREADY_EXISTS         somebody newer holds this identity: stop
    ├── FailedPrecondition    FAILED_PRECONDITION    right message, wrong time or wrong group (an old epoch)
    ├── ResourceExhausted     RESOURCE_EXHAUSTED     a limit was reached; try later or elsewhere
    ├── Aborted               ABORTED                lost a race; look again before trying again
    ├── Unavailable           UNAVAILABLE            nobody answers, or not now; `call` retries this one only
    ├── DeadlineExceeded      DEADLINE_EXCEEDED      also a TimeoutError
    ├── Cancelled             CANCELLED              the caller went away
    ├── Unimplemented         UNIMPLEMENTED          the other end is older
    ├── Internal              INTERNAL               a bug, or bytes that are no message
    ├── Unauthenticated       UNAUTHENTICATED        no token, or one that is not known there
    └── PermissionDenied      PERMISSION_DENIED      known, but this is not the caller's to do
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

import grpc
from google.protobuf.message import DecodeError

_BROKEN_LINE = "Internal error from Core"
"""What grpc.aio says, now and then, of a stream whose connection was reset under a read: no word from the other end."""
LEADER_KEY = "crossdock-leader"
"""Trailing metadata of an UNAVAILABLE: host:port of the control plane to ask instead."""


class CallError(Exception):
    """A call was refused or failed; `str()` is the message that travelled, `code` its grpc status."""

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
    """Nobody answers, or not now.

    Attributes:
        leader: host:port of the control plane that decides, where the one that was asked named it, else "".
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
    """The error of the tree above that stands for a grpc status."""
    return _BY_CODE.get(code, CallError)(message)


def error_of(error: grpc.RpcError) -> CallError:
    """Translate what grpc raised at a caller. The status is read from the error itself, which is also its call."""
    call = cast("grpc.Call", error)
    code = call.code() or grpc.StatusCode.UNKNOWN
    if code is grpc.StatusCode.INTERNAL and call.details() == _BROKEN_LINE:
        code = grpc.StatusCode.UNAVAILABLE
    made = error_for(code, call.details() or code.name)
    if isinstance(made, Unavailable):
        made.leader = next((str(value) for key, value in call.trailing_metadata() or () if key == LEADER_KEY), "")
    return made


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Translate what a handler raised into a status. An error without a name tells the caller only its type."""
    if isinstance(error, CallError):
        return error.code, str(error)
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, str(error) or "deadline exceeded"
    if isinstance(error, DecodeError):
        return grpc.StatusCode.INVALID_ARGUMENT, f"request: expected a protobuf message of this method, got: {error}"
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED, "cancelled"
    return grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__}); the server's log says more"


def code_number(code: grpc.StatusCode) -> int:
    """The number of a status, for messages that carry errors inside a stream."""
    return int(code.value[0])


def code_of_number(number: int) -> grpc.StatusCode:
    """The status of a number; UNKNOWN for a number that grpc does not define."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)
