"""The way to the API server of Kubernetes: `lightkube`, with a deadline for each call.

    server = ApiServer(kubeconfig)
    lease = server.ask(lambda api: api.get(Lease, "moe", namespace="default"), timeout_s)

A deadline spans the whole call, from the connection to the last byte of the answer. Token and CA certificates are files
that their owner replaces: they are read anew when a minute has passed and when no connection came about, and the token
also when the server takes it no longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from httpx2 import HTTPStatusError, Timeout
from lightkube import ApiError, AsyncClient, KubeConfig

CONNECT_S = 5.0
"""Longest that a connection may take, whatever the deadline of the call."""
FRESH_S = 60.0
"""So long one client is used."""

T = TypeVar("T")


def connect(kubeconfig: str) -> AsyncClient:
    """A client by the file `kubeconfig`, or with the pod's own service account where that is "": then it goes straight
    to the server, whatever proxies the environment names. Raises what lightkube raises."""
    config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_service_account()
    return AsyncClient(config, timeout=Timeout(None, connect=CONNECT_S), trust_env=bool(kubeconfig))


def status_of(error: BaseException) -> int:
    """HTTP status where `error` is an answer of the server, also one within a watch; 0: it is something else."""
    if isinstance(error, ApiError) and error.status.code:
        return error.status.code
    return error.response.status_code if isinstance(error, HTTPStatusError) else 0


class ApiServer:
    """See the module's head. For threads without an event loop; one of them at a time.

    Args:
        kubeconfig: see `connect`.
    """

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._client: AsyncClient | None = None
        self._since = 0.0

    def ask(self, call: Callable[[AsyncClient], Awaitable[T]], timeout_s: float) -> T:
        """What `call` comes to. Raises TimeoutError after `timeout_s`, else what lightkube and httpx2 raise."""
        return self._runner.run(self._ask(call, timeout_s))

    def close(self) -> None:
        """Hang up; nothing can be asked after this."""
        self._runner.run(self._drop())
        self._runner.close()

    async def _ask(self, call: Callable[[AsyncClient], Awaitable[T]], timeout_s: float) -> T:
        if self._client is not None and time.monotonic() - self._since >= FRESH_S:
            await self._drop()
        if self._client is None:
            self._client, self._since = connect(self._kubeconfig), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await call(self._client)
        except TimeoutError:
            raise TimeoutError(f"no answer of the API server within {timeout_s:.1f} s") from None
        except HTTPStatusError:
            raise
        except Exception:
            await self._drop()
            raise

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
