"""Server interceptor: authorizes each call, turns handler errors into statuses, and counts finished calls.

Unary handlers are registered as streaming ones, so that the authorizer runs before the request is read and an
incomplete request holds its permit for at most `REQUEST_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from crossdock.common.access import OUR_METHODS, CallAuthorizer
from crossdock.common.call_errors import (
    LEADER_KEY,
    CallError,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    status_of,
)
from crossdock.common.call_limits import CallPermits

_log = logging.getLogger(__name__)

Observe = Callable[[str, str, float], None]
"""(method, status name, seconds), called once for each finished call."""

REQUEST_S = 10.0
"""Longest time for the request of a unary call to arrive."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable when run
    """Interceptor of one server.

    Args:
        observe: called for each finished call of Crossdock's own services.
        authorizer: None: all calls are allowed.
    """

    def __init__(self, observe: Observe | None, authorizer: CallAuthorizer | None) -> None:
        self._observe, self._authorizer = observe, authorizer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + "_"
        answers = "stream" if handler.response_streaming else "unary"
        method = getattr(handler, kind + answers)
        guarded = self._guard(method, handler_call_details.method, handler.request_streaming)
        make = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        parse, plain = handler.request_deserializer, handler.response_serializer
        if parse is not None and not handler.request_streaming:
            parse = _returning_failure(parse)
        # a handler may return bytes, serialized once for many callers
        return make(guarded, parse, lambda made: made if isinstance(made, bytes) else plain(made))

    def _guard(self, handler: Callable[..., Any], name: str, streams: bool) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(handler):

            async def stream(_: object, context: Any) -> AsyncIterator[Any]:
                async with (
                    _Call(self._authorizer, self._observe, name, context, streams) as call,
                    contextlib.aclosing(handler(await call.request(), context)) as responses,
                ):
                    async for response in responses:
                        call.progress()
                        yield response

            return stream

        async def unary(_: object, context: Any) -> Any:
            async with _Call(self._authorizer, self._observe, name, context, streams) as call:
                return await handler(await call.request(), context)
            return None  # its error is the call's status

        return unary


class _Call:
    """One call, from before its request to its end: an error raised in the block becomes its status.

    Args:
        streams: the client sends a stream of requests.
    """

    def __init__(
        self, authorizer: CallAuthorizer | None, observe: Observe | None, name: str, context: Any, streams: bool
    ) -> None:
        self._authorizer, self._name, self._context, self._streams = authorizer, name, context, streams
        self._observe = observe if name.startswith(OUR_METHODS) else None
        self._permits: CallPermits | None = None
        self._started = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        try:
            if error is not None:
                return await self._fail(error)
            self._finish(_code_name(self._context))
            return False
        finally:
            if self._permits is not None:
                self._permits.release()

    async def request(self) -> Any:
        """The argument of the handler: one request, or the stream of requests. Raises CallError, DecodeError."""
        if self._authorizer is not None:
            self._permits = self._authorizer.authorize(self._name, self._context, streams=self._streams)
            await self._authorizer.acquire_reading(self._permits, self._name, self._context)
        if self._streams:
            if self._authorizer is not None:
                self._authorizer.check_request(self._name, None, self._context)
            return self._counted()
        request = await _single_request(self._context)
        if self._permits is not None:
            self._permits.release_reading()
        if self._authorizer is not None:
            self._authorizer.check_request(self._name, request, self._context)
        if isinstance(request, DecodeError):
            raise request
        return request

    def progress(self) -> None:
        if self._permits is not None:
            self._permits.progress()

    async def _fail(self, error: BaseException) -> bool:
        """End the call with the status of an error. False: re-raise the error, grpc ends the call itself.

        A call with a stream of requests is not aborted: grpc would keep the exception of `context.abort`, and through
        it every frame and message, until the cycle collector runs."""
        if isinstance(error, asyncio.CancelledError) and self._permits is not None and self._permits.revoked:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            error = ResourceExhausted("calls: another call of this caller took the permit of this one")
        if isinstance(error, grpc.aio.AbortError):
            self._finish(_code_name(self._context))
            return False
        code, message = status_of(error)
        self._finish(code.name)
        if not isinstance(error, Exception):  # cancelled, or the generator was closed
            return False
        if code is grpc.StatusCode.INTERNAL and not isinstance(error, CallError):
            _log.error("handler failed method=%s", self._name.rpartition("/")[2], exc_info=error)
        if self._streams:
            self._context.set_code(code)
            self._context.set_details(message)
        else:
            leader = error.leader if isinstance(error, Unavailable) else ""
            await self._context.abort(code, message, ((LEADER_KEY, leader),) if leader else ())
        return True

    def _finish(self, code: str) -> None:
        if self._observe is not None:
            self._observe(self._name.rpartition("/")[2], code, time.monotonic() - self._started)

    async def _counted(self) -> AsyncIterator[Any]:
        """The requests of a stream. grpc's own iterator would keep the last request alive while it waits for the
        next."""
        while True:
            request = await self._context.read()
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                break
            self.progress()
            yield request
            del request
        if self._permits is not None:
            self._permits.release_reading()


async def _single_request(context: Any) -> Any:
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"request: expected a complete one within {REQUEST_S:g} s, got a part or none") from None
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        raise InvalidArgument("request: expected one, got none")
    return request


def _returning_failure(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parse failure as the request: grpc alone would end the call with UNKNOWN."""

    def parse_or_keep(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_keep


def _code_name(context: Any) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "OK"
