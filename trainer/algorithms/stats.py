"""What micro-batches and steps report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class MicroStats:
    """Sums over the completion tokens of a micro-batch; `+` joins micro-batches, rounds and ranks.

    Only tokens that were trained on are seen: without a KL term, samples of zero advantage have no gradient and are
    left out of every sum here (they do count in the denominator).

    `gap_*` is |new - behaviour log-prob| over tokens of staleness 0; `entropy_sum` is the sum of -log-prob, whose
    mean estimates the policy's entropy; `seconds` is forward and backward.
    """

    loss_sum: float = 0.0
    samples: int = 0
    tokens: int = 0
    clipped: int = 0
    gap_tokens: int = 0
    gap_sum: float = 0.0
    gap_max: float = 0.0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: MicroStats) -> MicroStats:
        joined = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        joined["gap_max"] = max(self.gap_max, other.gap_max)
        return MicroStats(**joined)

    def vector(self) -> tuple[float, ...]:
        """As numbers, for an all-gather; `of` reads them back."""
        return astuple(self)

    @classmethod
    def of(cls, values: Sequence[float]) -> MicroStats:
        numbers: dict[str, Any] = {
            field.name: int(value) if field.type == "int" else value
            for field, value in zip(fields(cls), values, strict=True)
        }
        return cls(**numbers)


@dataclass(frozen=True)
class StepStats:
    """The same on all ranks but for `seconds`; `grad_norm` is before clipping; `skipped`: nothing to train on."""

    grad_norm: float
    lr: float
    seconds: float
    skipped: bool = False
