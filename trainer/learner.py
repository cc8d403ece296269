"""One rank's learner: micro-batches in, one optimizer step, weights out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from services.config import Config
from services.transport.manifest import TensorMeta
from trainer.algorithms.aggregation import token_weights
from trainer.algorithms.loss import GRPO
from trainer.algorithms.stats import MicroStats, StepStats
from trainer.backends.base import Backend
from trainer.backends.ddp import DDPBackend
from trainer.backends.emulated import EmulatedBackend
from trainer.backends.fsdp2 import FSDP2Backend
from trainer.backends.models import learning_rate
from trainer.data.batch import TrainSample, collate

_BACKENDS: dict[str, type[Backend]] = {"ddp": DDPBackend, "fsdp2": FSDP2Backend, "emulated": EmulatedBackend}


class Learner:
    """Accumulates unnormalised gradients over any cut into micro-batches, divides once, and steps.

    The update does not depend on how an iteration's samples were cut into micro-batches, rounds or ranks. With more
    than one rank the default process group must be initialised.
    """

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None:
        """Load the model of `model_path`, which is also the reference when `kl_coef` > 0. Raises `ModelError`."""
        self._config = config
        self._backend: Backend = _BACKENDS[config.trainer.backend](config, model_path, rank, world)
        self._objective = GRPO(config.algorithm)

    def accumulate(self, micro: Sequence[TrainSample]) -> MicroStats:
        """Forward and backward of one micro-batch; adds to the gradients.

        An empty one takes part in the same collectives and adds nothing. All ranks must run the same number.
        Raises `TrainingError` naming a malformed sample.
        """
        started = time.perf_counter()
        batch = collate(micro, token_weights(micro, self._config), self._backend.dtype, self._backend.device)
        stats = self._backend.accumulate(batch, self._objective)
        return replace(stats, seconds=time.perf_counter() - started)

    def step(self, denominator: float) -> StepStats:
        """Divide by `denominator` (summed over ranks), reduce, clip the global norm, and update. Collective.

        A denominator of 0 means that nothing was trained on: the update is skipped and gradients are cleared.
        Raises `TrainingError` when the gradient is not finite.
        """
        started = time.perf_counter()
        lr = learning_rate(self._config, self._backend.steps)
        if denominator == 0:
            self._backend.clear()
            return StepStats(grad_norm=0.0, lr=lr, seconds=time.perf_counter() - started, skipped=True)
        norm = self._backend.step(denominator, lr)
        return StepStats(grad_norm=norm, lr=lr, seconds=time.perf_counter() - started)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters on the CPU, one at a time, named as in the model's state dict, tied ones once.

        Tensors may share memory with the model: copy before the next step. Collective: exhaust it on all ranks.
        """
        return self._backend.weights()

    def tensor_metas(self) -> list[TensorMeta]:
        """Names, dtypes, shapes and places of what `weights` yields, in its order; digests are empty."""
        return self._backend.tensor_metas()

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory (with tokenizer) plus optimizer state and step count. Collective.

        Only rank 0 writes; `load` reads it at any number of ranks.
        """
        self._backend.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote; accumulated gradients are dropped. Collective."""
        self._backend.load(directory)
