"""The asyncio side of the embedded engine: futures by ticket, everything else is sent to the decode thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import torch

from services.config import Config
from services.errors import EngineError, WeightsError
from services.samples import Sample, SampleId
from services.transport.manifest import Manifest
from services.unit.engines.base import Capacity, EngineStats, SampleRequest
from services.unit.engines.embedded import weights
from services.unit.engines.embedded.core import Outcome
from services.unit.engines.embedded.loop import Cancel, Close, Commit, DecodeThread, Submit, one_line

CLOSE_SECONDS = 10.0


class EmbeddedEngine:
    """`services.unit.engines.base.Engine` over torch and transformers alone; starts at weights version -1.

    `generic` forces the model's own forward where the lean one would be chosen. `failed` (after `start`) resolves to
    the error when the decode loop dies; every sample then fails with it, and `submit` raises.
    """

    name = "embedded"
    failed: asyncio.Future[EngineError]

    def __init__(self, config: Config, generic: bool = False) -> None:
        self._config = config
        self._generic = generic
        self._thread: DecodeThread | None = None
        self._model: Any = None
        self._tickets = 0
        self._futures: dict[int, asyncio.Future[Sample]] = {}
        self._by_id: dict[SampleId, int] = {}
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._error: EngineError | None = None

    async def start(self) -> Capacity:
        """Load the model directory and allocate the KV cache. Raises `ModelError`."""
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()

        def on_loop(call: Any, argument: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(call, argument)

        thread = DecodeThread(
            self._config,
            self._generic,
            lambda outcomes: on_loop(self._deliver, outcomes),
            lambda error: on_loop(self._fail, error),
        )
        thread.start()
        self._model = await asyncio.wrap_future(thread.ready)
        self._thread = thread
        engine = self._config.engine
        return Capacity(engine.slots, engine.slots * engine.max_sequence_tokens, engine.max_sequence_tokens)

    def submit(self, request: SampleRequest) -> asyncio.Future[Sample]:
        thread = self._alive()
        self._check(request)
        self._tickets += 1
        ticket = self._tickets
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._futures[ticket], self._by_id[request.id] = future, ticket
        future.add_done_callback(lambda done: self._forget(ticket, request.id, done))
        thread.send(Submit(ticket, request))
        return future

    def cancel(self, sample_id: SampleId) -> None:
        """Cancel the sample's future; its row is free from the next decode step on."""
        ticket = self._by_id.pop(sample_id, None)
        if ticket is not None:
            self._futures[ticket].cancel()

    async def stage(self, manifest: Manifest, body: memoryview) -> None:
        self._alive()
        self._staged[manifest.version] = await asyncio.to_thread(weights.stage, self._model, manifest, body)

    async def commit(self, version: int) -> float:
        """Copy a staged version in; it and all older staged ones are dropped afterwards."""
        thread = self._alive()
        staged = self._staged.get(version)
        if staged is None:
            raise WeightsError(f"weights v{version} cannot be committed: not staged")
        done: Future[float] = Future()
        thread.send(Commit(version, staged, done))
        paused = await asyncio.wrap_future(done)
        self._staged = {other: views for other, views in self._staged.items() if other > version}
        return paused

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0.0) if self._thread is None else self._thread.stats()

    async def close(self) -> None:
        """Cancel what is left and end the thread."""
        thread, self._thread = self._thread, None
        for future in list(self._futures.values()):
            future.cancel()
        if thread is not None:
            thread.send(Close())
            await asyncio.to_thread(thread.join, CLOSE_SECONDS)

    def _alive(self) -> DecodeThread:
        if self._error is not None:
            raise self._error
        if self._thread is None:
            raise EngineError("the embedded engine is not running: start() it first")
        return self._thread

    def _check(self, request: SampleRequest) -> None:
        """Raise `EngineError` for what would not fit, or would break the loop for others."""
        where, params = f"sample {request.id}", request.params
        limit, vocabulary = self._config.engine.max_sequence_tokens, self._model.config.get_text_config().vocab_size
        if request.id in self._by_id:
            raise EngineError(f"{where}: already submitted")
        if not request.prompt:
            raise EngineError(f"{where}: the prompt is empty")
        if params.max_tokens < 1:
            raise EngineError(f"{where}: max_tokens is {params.max_tokens}; at least 1 is needed")
        if len(request.prompt) + params.max_tokens > limit:
            raise EngineError(
                f"{where}: {len(request.prompt)} prompt tokens and max_tokens {params.max_tokens} do not fit in "
                f"engine.max_sequence_tokens {limit}"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            raise EngineError(f"{where}: a prompt token lies outside the model's vocabulary of {vocabulary}")
        if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0):
            raise EngineError(f"{where}: temperature, top_p or top_k out of range: {params}")

    def _forget(self, ticket: int, sample_id: SampleId, done: asyncio.Future[Sample]) -> None:
        self._futures.pop(ticket, None)
        if self._by_id.get(sample_id) == ticket:
            del self._by_id[sample_id]
        if done.cancelled() and self._thread is not None:
            self._thread.send(Cancel(ticket))

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for ticket, result in outcomes:
            future = self._futures.get(ticket)
            if future is None or future.done():
                continue
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _fail(self, cause: BaseException) -> None:
        self._error = EngineError(f"the decode loop died: {one_line(cause)}; restart this unit")
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(self._error)
        if not self.failed.done():
            self.failed.set_result(self._error)
