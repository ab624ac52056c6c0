"""Around every handler of a server: the door before it, its errors become statuses, each finished call is counted.

Handlers of one request are served as if they took a stream: so the door is asked before anything of the request is
read, and a request of which only a part comes holds its place for `REQUEST_S`, not for ever.
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

from crossdock.common.access import OUR_METHODS, Door
from crossdock.common.call_errors import (
    LEADER_KEY,
    CallError,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    status_of,
)
from crossdock.common.call_limits import Visit

_log = logging.getLogger(__name__)

Observe = Callable[[str, str, float], None]
"""(method, status name, seconds): called once for each finished call of a server."""

REQUEST_S = 10.0
"""Longest that the one request of a call may take to come."""


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable when run
    """See the module's head.

    Args:
        observe: told of each finished call of our own services.
        door: None: everybody may call everything.
    """

    def __init__(self, observe: Observe | None, door: Door | None) -> None:
        self._observe, self._door = observe, door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler as it is served."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + "_"
        answers = "stream" if handler.response_streaming else "unary"
        guarded = self._guard(getattr(handler, kind + answers), handler_call_details.method, handler.request_streaming)
        make = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        parse, plain = handler.request_deserializer, handler.response_serializer
        if parse is not None and not handler.request_streaming:
            parse = _keep_failure(parse)
        # a handler may also give bytes, made once for many callers
        return make(guarded, parse, lambda made: made if isinstance(made, bytes) else plain(made))

    def _guard(self, handler: Callable[..., Any], name: str, streams: bool) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(handler):

            async def stream(_: object, context: Any) -> AsyncIterator[Any]:
                async with (
                    _Call(self._door, self._observe, name, context, streams) as call,
                    contextlib.aclosing(handler(await call.request(), context)) as responses,
                ):
                    async for response in responses:
                        call.progress()
                        yield response

            return stream

        async def unary(_: object, context: Any) -> Any:
            async with _Call(self._door, self._observe, name, context, streams) as call:
                return await handler(await call.request(), context)
            return None  # its error is the call's status

        return unary


class _Call:
    """One call, from before its request until its end: what is raised in the block becomes its status.

    Args:
        streams: it brings many requests.
    """

    def __init__(self, door: Door | None, observe: Observe | None, name: str, context: Any, streams: bool) -> None:
        self._door, self._name, self._context, self._streams = door, name, context, streams
        self._observe = observe if name.startswith(OUR_METHODS) else None
        self._visit: Visit | None = None
        self._started = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        try:
            if error is not None:
                return await self._fail(error)
            self._tell(_code_name(self._context))
            return False
        finally:
            if self._visit is not None:
                self._visit.leave()

    async def request(self) -> Any:
        """What the handler is given: its request, or the stream of them. Raises CallError, DecodeError."""
        if self._door is not None:
            self._visit = self._door.enter(self._name, self._context)
            await self._door.read(self._visit, self._name, self._context)
        if self._streams:
            if self._door is not None:
                self._door.look(self._name, None, self._context)
            return self._counted()
        request = await _only(self._context)
        if self._visit is not None:
            self._visit.has_read()
        if self._door is not None:
            self._door.look(self._name, request, self._context)
        if isinstance(request, DecodeError):
            raise request
        return request

    def progress(self) -> None:
        """Something was sent or received."""
        if self._visit is not None:
            self._visit.progress()

    async def _fail(self, error: BaseException) -> bool:
        """End the call with the status of an error. False: the error is to be raised on, grpc ends the call by itself.

        A call of many requests is not aborted: grpc keeps what `context.abort` raises beside the call, and that knows
        every frame and message, until the cycle collector comes."""
        if isinstance(error, asyncio.CancelledError) and self._visit is not None and self._visit.lost:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            error = ResourceExhausted("calls: another call of this caller took the place of this one")
        if isinstance(error, grpc.aio.AbortError):
            self._tell(_code_name(self._context))
            return False
        code, message = status_of(error)
        self._tell(code.name)
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

    def _tell(self, code: str) -> None:
        """It has ended."""
        if self._observe is not None:
            self._observe(self._name.rpartition("/")[2], code, time.monotonic() - self._started)

    async def _counted(self) -> AsyncIterator[Any]:
        """The requests of a stream. grpc's own iterator keeps the last one while it waits for the next."""
        while True:
            request = await self._context.read()
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                break
            self.progress()
            yield request
            del request
        if self._visit is not None:
            self._visit.has_read()


async def _only(context: Any) -> Any:
    """The one request of a call."""
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"request: expected a whole one within {REQUEST_S:g} s, got a part or none") from None
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        raise InvalidArgument("request: expected one, got none")
    return request


def _keep_failure(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Hand a parse failure to the handler as its request: grpc alone would call it an UNKNOWN error."""

    def parse_or_keep(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_keep


def _code_name(context: Any) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "OK"
