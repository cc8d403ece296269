"""An engine that computes nothing: it answers when a real one with the configured latencies would."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from services.config import Config
from services.errors import EngineError, WeightsError
from services.samples import FinishReason, Sample, SampleId, Timings
from services.transport.manifest import Manifest
from services.unit.engines.base import Capacity, EngineStats, SampleRequest
from services.unit.engines.emulation import BatchEmulation, FinishedJob, Job, LatencyProfile
from services.unit.engines.lengths import lengths_from

_ANY_VOCABULARY = range(1, 9)
_RATE_WINDOW_S = 0.2


class EmulatedEngine:
    """See `Engine`. A sample's length and content depend on its seed only; the length is cut at `max_tokens`."""

    name = "emulated"
    failed: asyncio.Future[EngineError]

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` for a length trace that cannot be used."""
        profile = config.engine.emulated
        slots, sequence = config.engine.slots, config.engine.max_sequence_tokens
        self._capacity = Capacity(slots, slots * sequence, sequence)
        self._lengths = lengths_from(profile)
        self._batch = BatchEmulation(
            LatencyProfile(
                profile.ptl_base_s, profile.ptl_per_sequence_s, profile.prefill_s_per_token, profile.time_scale
            ),
            slots,
        )
        self._requests: dict[SampleId, tuple[SampleRequest, int]] = {}
        self._futures: dict[SampleId, asyncio.Future[Sample]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._staged: int | None = None
        self._rate_mark = (0.0, 0)
        self._tokens_per_s = 0.0

    async def start(self) -> Capacity:
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._unix_offset = time.time() - self._loop.time()
        self._rate_mark = (self._loop.time(), 0)
        return self._capacity

    def submit(self, request: SampleRequest) -> asyncio.Future[Sample]:
        """See `Engine.submit`."""
        self._tick()
        self._require_alive()
        needed = len(request.prompt) + request.params.max_tokens
        if needed > self._capacity.max_sequence:
            raise EngineError(
                f"sample {request.id}: {len(request.prompt)} prompt + {request.params.max_tokens} completion tokens "
                f"exceed engine.max_sequence_tokens ({self._capacity.max_sequence})"
            )
        if request.id in self._futures:
            raise EngineError(f"sample {request.id} is already being generated")
        natural = self._lengths(request.id, np.random.default_rng(request.seed))
        self._batch.submit(
            Job(request.id, len(request.prompt), min(natural, request.params.max_tokens)), self._loop.time()
        )
        self._requests[request.id] = (request, natural)
        future: asyncio.Future[Sample] = self._loop.create_future()
        self._futures[request.id] = future
        self._set_timer()
        return future

    def cancel(self, sample_id: SampleId) -> None:
        future = self._futures.pop(sample_id, None)
        if future is None:
            return
        self._requests.pop(sample_id)
        future.cancel()
        self._tick()
        self._batch.cancel(sample_id)
        self._set_timer()

    async def stage(self, manifest: Manifest, body: memoryview) -> None:
        """Keeps the version only: there is no model to hold the tensors against."""
        if body.nbytes != manifest.total_bytes:
            raise WeightsError(
                f"weights v{manifest.version}: body has {body.nbytes} bytes, manifest says {manifest.total_bytes}"
            )
        self._staged = manifest.version

    async def commit(self, version: int) -> float:
        if self._staged != version:
            held = "nothing is" if self._staged is None else f"v{self._staged} is"
            raise WeightsError(f"weights v{version} cannot be committed: {held} staged")
        self._tick()
        self._batch.commit(version, self._loop.time())
        self._staged = None
        return 0.0

    def stats(self) -> EngineStats:
        self._tick()
        self._set_timer()
        now = self._loop.time()
        since, before = self._rate_mark
        if now - since >= _RATE_WINDOW_S:
            self._tokens_per_s = (self._batch.tokens_made - before) / (now - since)
            self._rate_mark = (now, self._batch.tokens_made)
        return EngineStats(self._batch.running, self._batch.waiting, self._batch.kv_tokens, self._tokens_per_s)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
        self._requests.clear()

    def _on_timer(self) -> None:
        self._tick()
        self._set_timer()

    def _tick(self) -> None:
        try:
            for finished in self._batch.advance(self._loop.time()):
                request, natural = self._requests.pop(finished.job.id)
                future = self._futures.pop(finished.job.id)
                if not future.done():
                    future.set_result(self._sample(request, natural, finished))
        except Exception as error:  # every waiting sample and `failed` report it
            self._die(error)

    def _set_timer(self) -> None:
        """On absolute time, so that lateness of one wake-up does not add to the next."""
        if self._timer is not None:
            self._timer.cancel()
        when = None if self.failed.done() else self._batch.next_event()
        self._timer = None if when is None else self._loop.call_at(when, self._on_timer)

    def _sample(self, request: SampleRequest, natural: int, finished: FinishedJob) -> Sample:
        stopped = natural <= request.params.max_tokens
        tokens, logprobs = _content(request, finished.job.tokens, stopped)
        truncates = request.params.truncates
        return Sample(
            id=request.id,
            token_ids=tokens,
            logprobs=(0.0,) * len(tokens) if truncates else logprobs,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            spans=finished.spans,
            timings=Timings(
                request.queued_at, finished.started_at + self._unix_offset, finished.finished_at + self._unix_offset
            ),
            kept_counts=(1,) * len(tokens) if truncates else (),
            kept_ids=tokens if truncates else (),
        )

    def _require_alive(self) -> None:
        if self.failed.done():
            raise self.failed.result()

    def _die(self, error: Exception) -> None:
        died = EngineError(f"the emulated engine died: {type(error).__name__}: {error}")
        for future in self._futures.values():
            if not future.done():
                future.set_exception(died)
        self._futures.clear()
        self._requests.clear()
        if not self.failed.done():
            self.failed.set_result(died)


def _content(request: SampleRequest, length: int, stopped: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids that the model surely has (the prompt's own), ended by a stop token when it stopped; log-probs."""
    rng = np.random.default_rng((request.seed, length))
    stops = request.params.stop_token_ids
    vocabulary = sorted(set(request.prompt) - set(stops)) or sorted(set(_ANY_VOCABULARY) - set(stops))
    tokens = rng.choice(np.asarray(vocabulary), size=length).tolist()
    if stopped and stops:
        tokens[-1] = stops[0]
    logprobs = (-rng.exponential(size=length)).astype(np.float32).tolist()
    return tuple(tokens), tuple(logprobs)
