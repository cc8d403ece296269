"""The samples in flight as arrays: row i of every array, and of the KV cache, is one sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.samples import FinishReason, Sample, Timings, VersionSpan
from services.unit.engines.base import SampleRequest
from services.unit.engines.embedded.sampling import Draw, Settings, stream_of, uniforms


@dataclass
class Flight:
    """What one sample in flight carries beside its arrays. `prompt_version` computed the prompt's keys and
    values; `starts` are (version, first completion token)."""

    ticket: int
    request: SampleRequest
    started_at: float
    prompt_version: int
    starts: list[tuple[int, int]]
    kept: list[NDArray[np.int64]] = field(default_factory=list)


class Batch:
    """Rows 0..size-1 are in flight. `max_tokens` bounds prompt + completion of a row."""

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.size = 0
        self.flights: list[Flight | None] = [None] * rows
        self.length: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._prompt: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._limit: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._stream: NDArray[np.uint64] = np.zeros(rows, dtype=np.uint64)
        self._temperature: NDArray[np.float32] = np.ones(rows, dtype=np.float32)
        self._top_p: NDArray[np.float64] = np.ones(rows, dtype=np.float64)
        self._top_k: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._stop: NDArray[np.int64] = np.full((rows, 1), -1, dtype=np.int64)
        self._tokens: NDArray[np.int64] = np.zeros((rows, max_tokens), dtype=np.int64)
        self._logprobs: NDArray[np.float32] = np.zeros((rows, max_tokens), dtype=np.float32)
        self._index = np.arange(rows)

    def _arrays(self) -> list[NDArray[Any]]:
        settings: list[NDArray[Any]] = [self._temperature, self._top_p, self._top_k, self._stop]
        return [self.length, self._prompt, self._limit, self._stream, *settings, self._tokens, self._logprobs]

    def flight(self, row: int) -> Flight:
        flight = self.flights[row]
        assert flight is not None, f"row {row} is empty"
        return flight

    def put(self, row: int, flight: Flight) -> None:
        """Start a sample in a free row."""
        request, params = flight.request, flight.request.params
        prompt = len(request.prompt)
        stops = params.stop_token_ids
        if len(stops) > self._stop.shape[1]:
            more = np.full((len(self._stop), len(stops) - self._stop.shape[1]), -1, dtype=np.int64)
            self._stop = np.concatenate([self._stop, more], axis=1)
        self.flights[row] = flight
        self.length[row] = self._prompt[row] = prompt
        self._limit[row] = prompt + params.max_tokens
        self._stream[row] = stream_of(request.seed)
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k
        self._stop[row] = -1
        self._stop[row, : len(stops)] = stops
        self._tokens[row, :prompt] = request.prompt

    def move(self, source: int, target: int) -> None:
        """Move a sample to another row, and leave `source` empty."""
        for array in self._arrays():
            array[target] = array[source]
        self.flights[target], self.flights[source] = self.flights[source], None

    def swap(self, one: int, other: int) -> None:
        for array in self._arrays():
            array[[one, other]] = array[[other, one]]
        self.flights[one], self.flights[other] = self.flights[other], self.flights[one]

    def release(self, row: int) -> None:
        """Empty a row; `size` stays."""
        self.flights[row] = None
        self.length[row] = 0

    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The newest token of each row and its position, both [size]."""
        positions = self.length[: self.size] - 1
        return self._tokens[self._index[: self.size], positions], positions

    def settings(self) -> Settings:
        n = self.size
        return Settings(self._temperature[:n], self._top_p[:n], self._top_k[:n])

    def uniforms(self) -> NDArray[np.float64]:
        n = self.size
        return uniforms(self._stream[:n], self.length[:n] - self._prompt[:n])

    def append(self, drawn: Draw) -> NDArray[np.int64]:
        """Add one token to each row; returns the rows that are over: stopped, full, or without a finite token."""
        n = self.size
        at = self.length[:n]
        self._tokens[self._index[:n], at] = drawn.tokens
        self._logprobs[self._index[:n], at] = drawn.logprobs
        for row, ids in drawn.kept.items():
            self.flight(row).kept.append(ids)
        self.length[:n] += 1
        stopped = (self._stop[:n] == drawn.tokens[:, None]).any(axis=1)
        return np.flatnonzero(stopped | (self.length[:n] >= self._limit[:n]) | ~drawn.finite)

    def generated(self, row: int) -> int:
        return int(self.length[row] - self._prompt[row])

    def new_version(self, version: int) -> None:
        """Tokens from here on belong to `version`."""
        for row in range(self.size):
            starts, start = self.flight(row).starts, self.generated(row)
            if starts[-1][1] == start:
                starts.pop()
            starts.append((version, start))

    def sample(self, row: int, now: float) -> Sample:
        """The finished sample of a row; `now` in Unix seconds."""
        flight, count = self.flight(row), self.generated(row)
        request = flight.request
        completion = slice(int(self._prompt[row]), int(self.length[row]))
        tokens = tuple(self._tokens[row, completion].tolist())
        ends = [start for _, start in flight.starts[1:]] + [count]
        return Sample(
            id=request.id,
            token_ids=tokens,
            logprobs=tuple(self._logprobs[row, completion].tolist()),
            finish_reason=FinishReason.STOP if tokens[-1] in request.params.stop_token_ids else FinishReason.LENGTH,
            spans=tuple(
                VersionSpan(version, start, end) for (version, start), end in zip(flight.starts, ends, strict=True)
            ),
            timings=Timings(request.queued_at, flight.started_at, now),
            kept_counts=tuple(len(ids) for ids in flight.kept),
            kept_ids=tuple(np.concatenate(flight.kept).tolist()) if flight.kept else (),
        )
