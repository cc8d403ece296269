"""Models and optimizer state on disk: loading, naming and saving what every torch backend shares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from services.config import Config
from services.errors import ModelError, TrainingError
from services.transport.manifest import TensorMeta, layout

OPTIMIZER_TENSORS = "optimizer.safetensors"
OPTIMIZER_STATE = "optimizer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


def choose_device(config: Config) -> torch.device:
    """`auto` is CUDA (the current device) where there is one."""
    if config.trainer.device == "cpu" or (config.trainer.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainingError("trainer.device is cuda, but torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def model_dtype(config: Config) -> torch.dtype:
    """What published weights have and, but for float32 master weights under bfloat16, what is trained in."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype


def load_model(path: Path, config: Config) -> nn.Module:
    """The model on the CPU, with float32 master weights for bfloat16, dropout off. Raises `ModelError`."""
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    logging.disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be loaded as a causal language model: {' '.join(str(error).split())}"
        ) from error
    # Dropout would make log-probs differ from those of the engine.
    return model.eval()


def learning_rate(config: Config, steps_done: int) -> float:
    """Linear warm-up: the first of `warmup_steps` steps already moves."""
    return config.optimizer.lr * min(1.0, (steps_done + 1) / max(config.optimizer.warmup_steps, 1))


def adamw(config: Config, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )


def metas(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> list[TensorMeta]:
    name = str(dtype).removeprefix("torch.")
    return layout((key, name, tuple(p.shape), p.numel() * dtype.itemsize) for key, p in parameters.items())


def save_model(model: Any, tensors: Iterator[tuple[str, torch.Tensor]], source: Path, directory: Path) -> None:
    """Write a Hugging Face directory that loads without `source`: model, its configuration, and its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    state = dict(tensors)
    # Tied parameters share one tensor under each of their names; that is how save_pretrained knows them as tied.
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state.setdefault(name, state[owners[id(parameter)]])
    model.save_pretrained(directory, state_dict=state)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, directory / file.name)


def save_optimizer(tensors: Mapping[str, torch.Tensor], steps: int, directory: Path) -> None:
    save_file(dict(tensors), directory / OPTIMIZER_TENSORS)
    (directory / OPTIMIZER_STATE).write_text(json.dumps({"steps": steps}))


def load_optimizer(
    optimizer: torch.optim.AdamW,
    parameters: Mapping[str, nn.Parameter],
    directory: Path,
    place: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> int:
    """Put the moments of `directory` into `optimizer`; returns how many steps were made.

    `place` turns a full CPU tensor into what the optimizer holds for a parameter.
    """
    steps = read_steps(directory)
    optimizer.state.clear()
    if steps == 0:
        return 0
    with safe_open(directory / OPTIMIZER_TENSORS, framework="pt") as file:
        for name, parameter in parameters.items():
            moments = {kind: place(file.get_tensor(f"{name}.{kind}"), parameter) for kind in MOMENTS}
            step = torch.tensor(float(steps), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    return steps


def read_steps(directory: Path) -> int:
    """Raises `TrainingError` when `directory` holds no optimizer state."""
    try:
        return int(json.loads((directory / OPTIMIZER_STATE).read_text())["steps"])
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{directory / OPTIMIZER_STATE}: cannot be read: {error}") from error
