"""Fully sharded data parallel (torch's `fully_shard`): each rank holds a slice of weights, gradients and moments.

Every forward and backward is collective, so all ranks run the same number of micro-batches. Gradients are
reduce-scattered after each micro-batch: nobody knows which is the last of a step, and whole gradients never pile up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.config import Config
from services.errors import TrainingError
from services.transport.manifest import TensorMeta
from trainer.algorithms.logprobs import Policy
from trainer.algorithms.stats import MicroStats
from trainer.backends import models
from trainer.backends.base import Objective
from trainer.data.batch import MicroBatch
from trainer.peers import PeerError, waiting_for_peers


class FSDP2Backend:
    """See `Backend`. Shards each decoder layer, then the rest with the root; float32 reduction under bfloat16."""

    def __init__(self, config: Config, model_path: Path, rank: int, world: int) -> None:
        self.device = models.choose_device(config)
        self.dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
        self._config, self._source, self._rank, self._world = config, model_path, rank, world
        self._mesh = _mesh(self.device, world)
        self._policy = self._sharded(models.load_model(model_path, config))
        self._parameters = dict(self._policy.model.named_parameters())
        self._reference: Policy | None = None
        if config.algorithm.kl_coef > 0:
            self._reference = self._sharded(models.load_model(model_path, config).requires_grad_(False))
        self._optimizer = models.adamw(config, list(self._parameters.values()))
        self._steps = 0

    def _sharded(self, model: nn.Module) -> Policy:
        policy = Policy(model, self._config.sampling.temperature)
        precision = MixedPrecisionPolicy()
        if self._config.model.dtype == "bfloat16":
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = set(getattr(model, "_no_split_modules", None) or ())
        blocks = [module for module in model.modules() if type(module).__name__ in layers]
        # Keeping weights between forward and backward costs memory, which a CPU has; a second gather costs time.
        reshard = self.device.type != "cpu"
        for module in (*blocks, policy):
            fully_shard(module, mesh=self._mesh, mp_policy=precision, reshard_after_forward=reshard)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # Plain sums: the division by the global denominator comes once, at the step.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return policy

    @property
    def steps(self) -> int:
        return self._steps

    def accumulate(self, batch: MicroBatch, objective: Objective) -> MicroStats:
        try:
            loss, stats = objective(self._policy, self._reference, batch)
            loss.backward()
        except dist.DistError as error:
            raise PeerError(f"rank {self._rank}: waiting for the other ranks' shards: {error}") from error
        return stats

    def step(self, denominator: float, lr: float) -> float:
        gradients = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        square = torch.stack([g.to(torch.float64).square().sum() for g in gradients]).sum()
        with waiting_for_peers(self._rank, "the other ranks' gradients"):
            dist.all_reduce(square)
        norm = math.sqrt(float(square)) / denominator
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {self._steps + 1}: the gradient's norm is {norm}; weights were left as they were"
            )
        torch._foreach_mul_(gradients, min(1.0, self._config.optimizer.max_grad_norm / max(norm, 1e-12)) / denominator)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        self.clear()
        return norm

    def clear(self) -> None:
        self._optimizer.zero_grad()

    def tensor_metas(self) -> list[TensorMeta]:
        return models.metas(self._parameters, models.model_dtype(self._config))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = models.model_dtype(self._config)
        for name, parameter in self._parameters.items():
            yield name, _full(parameter).to("cpu", dtype)

    def save(self, directory: Path) -> None:
        # All ranks gather; only rank 0 keeps what comes.
        parameters = {}
        moments = {}
        for name, parameter in self._parameters.items():
            whole = {name: _full(parameter)}
            if self._steps:
                state = self._optimizer.state[parameter]
                whole.update({f"{name}.{kind}": _full(state[kind]) for kind in models.MOMENTS})
            if self._rank == 0:
                parameters[name] = whole.pop(name).cpu()
                moments.update({key: tensor.cpu() for key, tensor in whole.items()})
        if self._rank == 0:
            models.save_model(self._policy.model, iter(parameters.items()), self._source, directory)
            models.save_optimizer(moments, self._steps, directory)
        if self._world > 1:
            dist.barrier()

    def load(self, directory: Path) -> None:
        loaded = dict(models.load_model(directory, self._config).named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(_shard(loaded[name].detach(), parameter))
        self._steps = models.load_optimizer(self._optimizer, self._parameters, directory, _shard)
        self.clear()


def _mesh(device: torch.device, world: int) -> DeviceMesh:
    if not dist.is_initialized():
        if world > 1:
            raise TrainingError("the fsdp2 backend needs a process group: start the trainer under torchrun")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (world,))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a tensor that all ranks have; nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
