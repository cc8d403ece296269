"""Training that only sleeps, to measure pipelines where real training would drown what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from services.config import Config
from services.transport.manifest import TensorMeta, layout
from trainer.algorithms.stats import MicroStats
from trainer.backends import models
from trainer.backends.base import Objective
from trainer.data.batch import MicroBatch

_NAME = "emulated.step"


class EmulatedBackend:
    """See `Backend`. Sleeps per token and per step; its only weight says how many steps were made."""

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._cost = config.trainer.emulated
        self._rank = rank
        self._steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    def accumulate(self, batch: MicroBatch, objective: Objective) -> MicroStats:
        if batch.samples == 0:
            return MicroStats()
        time.sleep(self._cost.seconds_per_token * batch.tokens)
        return MicroStats(samples=batch.samples, tokens=len(batch.targets))

    def step(self, denominator: float, lr: float) -> float:
        time.sleep(self._cost.seconds_per_step)
        self._steps += 1
        return 0.0

    def clear(self) -> None:
        """There are no gradients."""

    def tensor_metas(self) -> list[TensorMeta]:
        return layout([(_NAME, "float32", (1,), 4)])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield _NAME, torch.tensor([float(self._steps)])

    def save(self, directory: Path) -> None:
        if self._rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / models.OPTIMIZER_STATE).write_text(json.dumps({"steps": self._steps}))

    def load(self, directory: Path) -> None:
        self._steps = models.read_steps(directory)
