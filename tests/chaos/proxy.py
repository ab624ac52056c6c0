"""TCP proxies that can be cut, as a network is: bytes vanish without a word, or connections are reset.

All proxies live in one thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from crossdock.common.addresses import split_address

_CHUNK = 1 << 16


class Network:
    """The thread of all proxies."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def proxy(self, listen: str, target: str) -> Proxy:
        """A proxy at `listen` to `target`, both host:port; whole at first."""
        made = Proxy(target, self.loop)
        asyncio.run_coroutine_threadsafe(made.start(listen), self.loop).result(10.0)
        return made

    def close(self) -> None:
        """End all of it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


class Proxy:
    """One way. Use `cut`, `reset` and `mend` from any thread."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listen: str) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._serve, *split_address(listen))

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """What was held back passes, and everything after it."""
        self._loop.call_soon_threadsafe(self._open.set)

    def reset(self) -> int:
        """End every connection at once, new ones are taken; how many there were, about."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        number = len(self._writers) // 2
        self._loop.call_soon_threadsafe(abort)
        return number

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            there_reader, there = await asyncio.open_connection(*split_address(self._target))
        except OSError:
            self._end(writer)
            return
        self._writers.add(there)
        ways = [asyncio.create_task(self._copy(reader, there)), asyncio.create_task(self._copy(there_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._end(writer)
        self._end(there)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
