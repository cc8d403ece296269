"""The asyncio side of a trainer rank: one daemon thread that owns every channel, server and reward worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

T = TypeVar("T")


class ServiceLoop:
    """The training thread hands coroutines over; the loop never touches torch collectives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """Run `work` to its end. Raises `TimeoutError` that says `what` was waited for."""
        future = self.start(work)
        try:
            return future.result(deadline_s)
        except FutureTimeoutError:  # another class than TimeoutError before Python 3.11
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"{what}: no answer within {deadline_s:.0f} s") from None

    def close(self) -> None:
        async def cancel_rest() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.call(cancel_rest(), 10.0, "closing the service loop")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
