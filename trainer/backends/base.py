"""What the learner asks of a backend: hold the model, accumulate gradients, make one step, give the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from services.config import Config
from services.transport.manifest import TensorMeta
from trainer.algorithms.logprobs import Policy
from trainer.algorithms.stats import MicroStats
from trainer.data.batch import MicroBatch

Objective = Callable[[Policy, "Policy | None", MicroBatch], "tuple[torch.Tensor, MicroStats]"]
"""(policy, reference or None, micro-batch) -> (scalar unnormalised loss, its stats)."""


class Backend(Protocol):
    """One rank's part of the model. Methods marked collective are called by all ranks in the same order."""

    device: torch.device
    dtype: torch.dtype

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None: ...

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        ...

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
