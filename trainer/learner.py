"""One rank's learner: micro-batches in, one optimizer step, weights out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from services.config import Config
from services.transport.manifest import TensorMeta
from trainer.backends.base import MicroStats, StepStats
from trainer.data.batch import TrainSample


class Learner:
    """Accumulates unnormalised gradients over any cut into micro-batches, divides once, and steps."""

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None:
        raise NotImplementedError

    def accumulate(self, micro: Sequence[TrainSample]) -> MicroStats:
        raise NotImplementedError

    def step(self, denominator: float) -> StepStats:
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def tensor_metas(self) -> list[TensorMeta]:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError
