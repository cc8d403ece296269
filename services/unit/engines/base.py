"""What a DP unit asks of an engine. Implementations: embedded (torch), emulated (sleeps), vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from services.errors import EngineError
from services.samples import Sample, SampleId, SamplingParams
from services.transport.manifest import Manifest


@dataclass(frozen=True)
class SampleRequest:
    """One sample to make. Requests with the same `prompt_id` are siblings and share the prompt's prefill."""

    id: SampleId
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    queued_at: float = 0.0


@dataclass(frozen=True)
class Capacity:
    """`slots` samples at once, `kv_tokens` of KV cache, `max_sequence` prompt + completion tokens."""

    slots: int
    kv_tokens: int
    max_sequence: int


@dataclass(frozen=True)
class EngineStats:
    running: int
    waiting: int
    kv_tokens_used: int
    tokens_per_s: float


class Engine(Protocol):
    """All methods are called on one event loop and must not block it.

    `failed`, there after `start`, gets the error when the engine's own loop dies and nothing will finish any more.
    """

    name: str
    failed: asyncio.Future[EngineError]

    async def start(self) -> Capacity:
        """Load and allocate. Raises `ModelError` for a model that cannot be loaded."""
        ...

    def submit(self, request: SampleRequest) -> asyncio.Future[Sample]:
        """Queue one sample; first come, first served. The future fails with `EngineError`, or is cancelled by `cancel`.

        Raises `EngineError` at once when the sequence cannot fit.
        """
        ...

    def cancel(self, sample_id: SampleId) -> None:
        """Stop one sample; unknown ids are ignored."""
        ...

    async def stage(self, manifest: Manifest, body: memoryview) -> None:
        """Check names, shapes and dtypes of a version whose digests were verified, and keep it for `commit`.

        `body` holds `manifest.total_bytes` bytes and belongs to the engine from now on. Generation goes on.
        Raises `WeightsError` naming the tensor; the engine then stays as it was.
        """
        ...

    async def commit(self, version: int) -> float:
        """Swap the staged weights in between two decode steps; returns the seconds decoding paused.

        Samples in flight go on and get a new span. Raises `WeightsError` when `version` is not staged.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
