"""What the learner asks of a backend: hold the model, accumulate gradients, make one step, give the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Protocol

import torch

from services.transport.manifest import TensorMeta
from trainer.algorithms.logprobs import Policy
from trainer.data.batch import MicroBatch


@dataclass(frozen=True)
class MicroStats:
    """Sums over the completion tokens of a micro-batch; `+` joins micro-batches, rounds and ranks.

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
    def of(cls, values: list[float]) -> MicroStats:
        kinds = [int if field.type == "int" else float for field in fields(cls)]
        return cls(*(kind(value) for kind, value in zip(kinds, values, strict=True)))


@dataclass(frozen=True)
class StepStats:
    """The same on all ranks but for `seconds`; `grad_norm` is before clipping; `skipped`: nothing to train on."""

    grad_norm: float
    lr: float
    seconds: float
    skipped: bool = False


Objective = Callable[[Policy, "Policy | None", MicroBatch], "tuple[torch.Tensor, MicroStats]"]
"""(policy, reference or None, micro-batch) -> (scalar unnormalised loss, its stats)."""


class Backend(Protocol):
    """One rank's part of the model. Methods marked collective are called by all ranks in the same order."""

    device: torch.device
    dtype: torch.dtype

    def accumulate(self, batch: MicroBatch, objective: Objective) -> MicroStats:
        """Forward and backward; adds to the gradients. Collective for backends that shard."""
        ...

    def step(self, denominator: float, lr: float) -> float:
        """Sum gradients over ranks, divide, clip, update, clear; returns the norm before clipping. Collective.

        Raises `TrainingError` when the norm is not finite; the weights then stay as they were.
        """
        ...

    def clear(self) -> None:
        """Forget accumulated gradients."""
        ...

    def tensor_metas(self) -> list[TensorMeta]:
        """What `weights` will yield, in its order; digests are empty."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters on the CPU, one at a time, tied ones once. Collective: exhaust it on all ranks."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state; only rank 0 touches the disk. Collective."""
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, at any number of ranks. Collective."""
        ...
