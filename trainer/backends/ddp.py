"""Data parallel: a plain copy of the model on each rank, and one all-reduce of all gradients per step.

No wrapper that reduces during backward is needed: gradients are plain sums over samples, addition commutes, so the
sum over ranks can wait until the step. Until then ranks run as many micro-batches as they like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from services.config import Config
from services.errors import TrainingError
from services.transport.manifest import TensorMeta
from trainer.algorithms.logprobs import Policy
from trainer.algorithms.stats import MicroStats
from trainer.backends import models
from trainer.backends.base import Objective
from trainer.data.batch import MicroBatch
from trainer.peers import waiting_for_peers


class DDPBackend:
    """See `Backend`. All gradients are views of one flat buffer, so that reducing and scaling are one call each."""

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None:
        self.device = models.choose_device(config)
        self.dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
        self._config, self._source, self._rank, self._world = config, model_path, rank, world
        model = models.load_model(model_path, config).to(self.device)
        self._policy = Policy(model, config.sampling.temperature)
        self._parameters = dict(model.named_parameters())
        self._reference: Policy | None = None
        if config.algorithm.kl_coef > 0:
            frozen = models.load_model(model_path, config).to(self.device).requires_grad_(False)
            self._reference = Policy(frozen, config.sampling.temperature)
        self._optimizer = models.adamw(config, list(self._parameters.values()))
        self._steps = 0
        self._gradient = self._flat_gradient()

    def _flat_gradient(self) -> torch.Tensor:
        parameters = list(self._parameters.values())
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=self.dtype, device=self.device)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        return flat

    @property
    def steps(self) -> int:
        return self._steps

    def accumulate(self, batch: MicroBatch, objective: Objective) -> MicroStats:
        if batch.samples == 0:
            return MicroStats()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._config.model.dtype == "bfloat16"):
            loss, stats = objective(self._policy, self._reference, batch)
        loss.backward()
        return stats

    def step(self, denominator: float, lr: float) -> float:
        if self._world > 1:
            with waiting_for_peers(self._rank, "the other ranks' gradients"):
                dist.all_reduce(self._gradient)
        norm = float(torch.linalg.vector_norm(self._gradient)) / denominator
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {self._steps + 1}: the gradient's norm is {norm}; weights were left as they were"
            )
        self._gradient.mul_(min(1.0, self._config.optimizer.max_grad_norm / max(norm, 1e-12)) / denominator)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        self.clear()
        return norm

    def clear(self) -> None:
        self._gradient.zero_()

    def tensor_metas(self) -> list[TensorMeta]:
        return models.metas(self._parameters, models.model_dtype(self._config))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = models.model_dtype(self._config)
        for name, parameter in self._parameters.items():
            yield name, parameter.detach().to("cpu", dtype)

    def save(self, directory: Path) -> None:
        if self._rank != 0:
            return
        tensors = ((name, parameter.detach().cpu()) for name, parameter in self._parameters.items())
        models.save_model(self._policy.model, tensors, self._source, directory)
        moments = {
            f"{name}.{kind}": self._optimizer.state[parameter][kind].cpu()
            for name, parameter in self._parameters.items()
            if self._steps
            for kind in models.MOMENTS
        }
        models.save_optimizer(moments, self._steps, directory)

    def load(self, directory: Path) -> None:
        loaded = dict(models.load_model(directory, self._config).named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(loaded[name])
        self._steps = models.load_optimizer(
            self._optimizer, self._parameters, directory, lambda tensor, parameter: tensor.to(parameter.device)
        )
        self.clear()
