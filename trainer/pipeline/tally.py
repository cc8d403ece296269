"""Numbers of one iteration, summed on each rank and reduced once at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.samples import Sample

SUMS = (
    "samples",
    "tokens",
    "reward",
    "scored",
    "staleness",
    "unscored",
    "failed",
    "stale",
    "lost",
    "duplicated",
    "groups",
    "zero_advantage_groups",
)
MAXIMA = ("staleness", "length", "finished_at", "started_before", "wait_s", "train_s")


@dataclass
class Tally:
    """`sums` add up over ranks, `maxima` take the largest; both keep a fixed order so that ranks agree."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, -math.inf))

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] += value

    def peak(self, **values: float) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima[name], value)

    def sample(self, sample: Sample, staleness: int) -> None:
        """Count one sample that arrived; `started_before` is negated so that the maximum finds the earliest."""
        length = len(sample.token_ids)
        self.add(samples=1, tokens=length, staleness=staleness)
        self.peak(
            staleness=staleness,
            length=length,
            finished_at=sample.timings.finished_at,
            started_before=-sample.timings.started_at,
        )

    def vector(self) -> list[float]:
        """As numbers, for an all-gather; `merge` reads them back."""
        return [*self.sums.values(), *self.maxima.values()]

    @classmethod
    def merge(cls, vectors: Sequence[Sequence[float]]) -> Tally:
        """The tally over all ranks."""
        sums = [sum(column) for column in zip(*(vector[: len(SUMS)] for vector in vectors), strict=True)]
        maxima = [max(column) for column in zip(*(vector[len(SUMS) :] for vector in vectors), strict=True)]
        return cls(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))

    def mean(self, total: str, count: str) -> float:
        """0 when there is nothing to average."""
        return self.sums[total] / self.sums[count] if self.sums[count] else 0.0

    @property
    def generation_s(self) -> float:
        """From the first sample's start to the last one's end, seconds, by the units' clocks.

        In async mode the samples of an iteration start while an earlier one trains, so that this may exceed the
        iteration's own time.
        """
        return max(0.0, self.maxima["finished_at"] + self.maxima["started_before"]) if self.sums["samples"] else 0.0
