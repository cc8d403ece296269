"""Continuous batching on paper: when each sample of a batch finishes, given a latency profile.

Time is an argument (seconds, any origin, never going back), so the emulated engine drives this with a real clock and a
simulator with a virtual one. Results do not depend on how often `advance` is called.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

from services.samples import SampleId, VersionSpan

_ROUNDING = 1e-7


@dataclass(frozen=True)
class LatencyProfile:
    """A decode step of batch b takes `base_s + per_sequence_s * b`; a prompt's prefill stops the batch, token by token.

    All seconds are multiplied by `time_scale`.
    """

    base_s: float
    per_sequence_s: float = 0.0
    prefill_s_per_token: float = 0.0
    time_scale: float = 1.0

    def step_s(self, batch: int) -> float:
        return (self.base_s + self.per_sequence_s * batch) * self.time_scale

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_s_per_token * tokens * self.time_scale


@dataclass(frozen=True)
class Job:
    """One sample to emulate: `tokens` >= 1 decode steps after a prompt of `prompt_tokens`."""

    id: SampleId
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class FinishedJob:
    job: Job
    started_at: float
    finished_at: float
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class _Waiting:
    job: Job
    since: float


@dataclass(frozen=True)
class _Running:
    job: Job
    first_step: int
    started_at: float

    @property
    def last_step(self) -> int:
        return self.first_step + self.job.tokens


class BatchEmulation:
    """First come, first served into `slots`; samples join at step boundaries. Siblings share a prompt's prefill."""

    def __init__(self, profile: LatencyProfile, slots: int, version: int = -1) -> None:
        self._profile = profile
        self._slots = slots
        self._clock = 0.0  # of the last boundary; ahead of time while a prefill runs
        self._step = 0
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[SampleId, _Running] = {}
        self._ends: list[tuple[int, int, SampleId]] = []
        self._joined = 0
        self._live: Counter[str] = Counter()  # unfinished samples of a prompt
        self._prefilled: set[str] = set()
        self._swaps: list[tuple[int, int]] = [(0, version)]
        self.tokens_made = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Prompt and completion tokens of the running samples."""
        return sum(r.job.prompt_tokens + self._step - r.first_step for r in self._running.values())

    def submit(self, job: Job, now: float) -> None:
        """Queue `job`; call `advance(now)` first. Its id must not be in here."""
        self._waiting.append(_Waiting(job, now))
        self._live[job.id.prompt_id] += 1

    def cancel(self, sample_id: SampleId) -> None:
        """Drop one sample at the last step boundary; unknown ids are ignored."""
        running = self._running.pop(sample_id, None)
        if running is None:
            kept = deque(w for w in self._waiting if w.job.id != sample_id)
            if len(kept) == len(self._waiting):
                return
            self._waiting = kept
        self._release(sample_id)

    def commit(self, version: int, now: float) -> None:
        """Swap weights at the first step boundary at or after `now`, and drop shared prefills.

        Call `advance(now)` first.
        """
        in_step = bool(self._running) and now > self._clock + _ROUNDING
        oldest = min((running.first_step for running in self._running.values()), default=self._step)
        while len(self._swaps) > 1 and self._swaps[1][0] <= oldest:
            del self._swaps[0]
        self._swaps.append((self._step + 1 if in_step else self._step, version))
        self._prefilled.clear()

    def next_event(self) -> float | None:
        """When `advance` has something to do next; None while there is nothing to decode."""
        if self._may_admit(self._clock):
            return self._clock
        steps = self._steps_to_event()
        if steps is not None:
            return self._clock + steps * self._profile.step_s(len(self._running))
        return max(self._clock, self._waiting[0].since) if self._waiting else None

    def advance(self, now: float) -> list[FinishedJob]:
        """Everything that finished up to `now`, in order."""
        finished: list[FinishedJob] = []
        while self._clock <= now + _ROUNDING:
            if not self._running and self._waiting:
                self._clock = max(self._clock, self._waiting[0].since)
            if self._may_admit(self._clock):
                self._admit()
                continue
            steps = self._steps_to_event()
            if steps is None:
                self._clock = max(self._clock, now)
                break
            step_s = self._profile.step_s(len(self._running))
            if self._clock + steps * step_s > now + _ROUNDING:
                self._decode(int((now - self._clock) / step_s) if step_s > 0 else steps, step_s)
                break
            self._decode(steps, step_s)
            finished.extend(self._pop_finished())
        return finished

    def _may_admit(self, clock: float) -> bool:
        return bool(self._waiting) and len(self._running) < self._slots and self._waiting[0].since <= clock + _ROUNDING

    def _admit(self) -> None:
        if not self._running:
            self._swaps = [(self._step, self._swaps[-1][1])]
        job = self._waiting.popleft().job
        started_at = self._clock
        if job.id.prompt_id not in self._prefilled:
            self._clock += self._profile.prefill_s(job.prompt_tokens)
            self._prefilled.add(job.id.prompt_id)
        running = _Running(job, self._step, started_at)
        self._running[job.id] = running
        self._joined += 1
        heapq.heappush(self._ends, (running.last_step, self._joined, job.id))

    def _steps_to_event(self) -> int | None:
        """Steps until the next finish, or until the boundary at which the queue's head can join; None when idle."""
        while self._ends and not self._is_live(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        steps = self._ends[0][0] - self._step
        step_s = self._profile.step_s(len(self._running))
        if self._waiting and len(self._running) < self._slots and step_s > 0:
            steps = min(steps, math.ceil((self._waiting[0].since - self._clock - _ROUNDING) / step_s))
        return max(steps, 0)

    def _is_live(self, end: tuple[int, int, SampleId]) -> bool:
        running = self._running.get(end[2])
        return running is not None and running.last_step == end[0]

    def _decode(self, steps: int, step_s: float) -> None:
        self._step += steps
        self._clock += steps * step_s
        self.tokens_made += steps * len(self._running)

    def _pop_finished(self) -> list[FinishedJob]:
        finished = []
        while self._ends and (self._ends[0][0] <= self._step or not self._is_live(self._ends[0])):
            end = heapq.heappop(self._ends)
            if self._is_live(end):
                running = self._running.pop(end[2])
                finished.append(FinishedJob(running.job, running.started_at, self._clock, self._spans(running)))
                self._release(end[2])
        return finished

    def _spans(self, running: _Running) -> tuple[VersionSpan, ...]:
        spans = []
        swap_steps = [step for step, _ in self._swaps[1:]] + [running.last_step]
        for (begin, version), until in zip(self._swaps, swap_steps, strict=True):
            start = max(begin, running.first_step) - running.first_step
            end = min(until, running.last_step) - running.first_step
            if start < end:
                spans.append(VersionSpan(version, start, end))
        return tuple(spans)

    def _release(self, sample_id: SampleId) -> None:
        self._live[sample_id.prompt_id] -= 1
        if not self._live[sample_id.prompt_id]:
            del self._live[sample_id.prompt_id]
            self._prefilled.discard(sample_id.prompt_id)
