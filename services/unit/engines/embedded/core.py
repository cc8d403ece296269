"""Continuous batching on one thread: samples join and leave between decode steps.

A prompt is prefilled without its last token; the last token is the sample's first decode input. So siblings share one
prefill by copying keys and values, a late sibling copies from one still in flight, and every token is sampled in one
place. When weights are committed, samples in flight keep the keys and values they have; prompts that arrive later are
never given keys and values of an older version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.errors import EngineError
from services.samples import Sample
from services.unit.engines.base import SampleRequest
from services.unit.engines.embedded import weights
from services.unit.engines.embedded.batch import Batch, Flight
from services.unit.engines.embedded.buckets import arrange
from services.unit.engines.embedded.forward import Forward
from services.unit.engines.embedded.sampling import draw

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill call at most, unless one prompt alone is longer."""

ARRANGE_STEPS = 16
"""Decode steps between two looks at the order of the rows."""


class Outcome(NamedTuple):
    """How a submitted sample ended."""

    ticket: int
    result: Sample | EngineError


class Core:
    """The decode loop without its thread; every method must be called on one thread."""

    def __init__(
        self, model: torch.nn.Module, forward: Forward, rows: int, max_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.version = -1
        self.batch = Batch(rows, max_tokens)
        self.waiting: deque[tuple[int, SampleRequest]] = deque()
        self._model, self._forward, self._rows, self._clock = model, forward, rows, clock
        self._holes: list[int] = []
        self._steps = 0

    @property
    def running(self) -> int:
        return self.batch.size - len(self._holes)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def kv_tokens(self) -> int:
        """Tokens of the samples in flight."""
        return int(self.batch.length[: self.batch.size].sum())

    def submit(self, ticket: int, request: SampleRequest) -> None:
        self.waiting.append((ticket, request))

    def cancel(self, ticket: int) -> None:
        """Forget a sample, waiting or in flight; unknown tickets are ignored."""
        self.waiting = deque(entry for entry in self.waiting if entry[0] != ticket)
        for row in range(self.batch.size):
            flight = self.batch.flights[row]
            if flight is not None and flight.ticket == ticket:
                self._release(row)

    def commit(self, version: int, staged: dict[str, torch.Tensor]) -> None:
        """Swap the weights in; the next token of every sample in flight belongs to `version`."""
        self._settle()
        weights.apply(self._model, staged)
        self._forward.refresh()
        self.version = version
        self.batch.new_version(version)

    def step(self) -> list[Outcome]:
        """Admit what fits, decode one token of every sample in flight, and return the samples that ended."""
        if self.waiting:
            self._admit()
        self._settle()
        batch = self.batch
        if not batch.size:
            return []
        self._steps += 1
        if self._forward.splits and self._steps % ARRANGE_STEPS == 0:
            self._arrange()
        logits = self._forward.decode(*batch.inputs())
        drawn = draw(logits, batch.settings(), batch.uniforms())
        ended = batch.append(drawn)
        if not len(ended):
            return []
        now = self._clock()
        outcomes = []
        for row in ended.tolist():
            flight, finite = batch.flight(row), bool(drawn.finite[row])
            result = batch.sample(row, now) if finite else self._not_finite(row)
            outcomes.append(Outcome(flight.ticket, result))
            self._release(row)
        if not drawn.finite.all():
            self._scrub()
        return outcomes

    def _not_finite(self, row: int) -> EngineError:
        return EngineError(
            f"sample {self.batch.flight(row).request.id}: the model gave NaN or infinite logits at completion token "
            f"{self.batch.generated(row) - 1} with weights v{self.version}; look for a diverged training step"
        )

    def _release(self, row: int) -> None:
        self.batch.release(row)
        self._holes.append(row)

    def _scrub(self) -> None:
        """Zero every row that is not in flight: a masked NaN would still spoil the row's next sample.

        Called in the step that failed; an admitted sample is decoded in the same step, so no NaN outlives it.
        """
        for row in range(self._rows):
            if self.batch.flights[row] is None:
                self._forward.cache.clear(row)

    def _admit(self) -> None:
        """Give free rows to waiting samples, first come first served, and fill in their prompts."""
        batch = self.batch
        free = sorted(self._holes) + list(range(batch.size, self._rows))
        donors = {
            flight.request.id.prompt_id: row
            for row, flight in enumerate(batch.flights[: batch.size])
            if flight is not None and flight.prompt_version == self.version
        }
        now = self._clock()
        prefills: list[tuple[SampleRequest, int]] = []
        copies: list[tuple[int, int, int]] = []
        for row in free[: len(self.waiting)]:
            ticket, request = self.waiting.popleft()
            donor = donors.get(request.id.prompt_id)
            if donor is not None and batch.flight(donor).request.prompt == request.prompt:
                copies.append((donor, row, len(request.prompt) - 1))
            else:
                prefills.append((request, row))
                donors[request.id.prompt_id] = row
            batch.put(row, Flight(ticket, request, now, self.version, [(self.version, 0)]))
            if row < batch.size:
                self._holes.remove(row)
            else:
                batch.size = row + 1
        self._prefill(prefills)
        for donor, row, positions in copies:
            self._forward.cache.copy(donor, row, positions)

    def _prefill(self, prefills: Sequence[tuple[SampleRequest, int]]) -> None:
        todo = sorted(((request.prompt[:-1], row) for request, row in prefills), key=lambda entry: len(entry[0]))
        part: list[tuple[tuple[int, ...], int]] = []
        for prompt, row in [entry for entry in todo if entry[0]]:
            if part and (len(part) + 1) * len(prompt) > PREFILL_TOKENS:
                self._forward.prefill(*zip(*part, strict=True))
                part = []
            part.append((prompt, row))
        if part:
            self._forward.prefill(*zip(*part, strict=True))

    def _settle(self) -> None:
        """Close the holes: rows 0..size-1 are in flight afterwards."""
        batch = self.batch
        alive = self.running
        free = [row for row in self._holes if row < alive]
        last = [row for row in range(alive, batch.size) if batch.flights[row] is not None]
        for source, target in zip(last, free, strict=True):
            self._forward.cache.copy(source, target, int(batch.length[source]) - 1)
            batch.move(source, target)
        batch.size = alive
        self._holes.clear()

    def _arrange(self) -> None:
        batch = self.batch
        for one, other in arrange(batch.length[: batch.size], ARRANGE_STEPS):
            longest = int(np.maximum(batch.length[one], batch.length[other])) - 1
            self._forward.cache.swap(one, other, longest)
            batch.swap(one, other)
