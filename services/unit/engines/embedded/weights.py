"""Weights of one version: checked against the model when they arrive, copied into it at a safe point."""

from __future__ import annotations

from typing import Any

import torch

from services.errors import WeightsError
from services.transport.manifest import Manifest, TensorMeta


def stage(model: torch.nn.Module, manifest: Manifest, body: memoryview) -> dict[str, torch.Tensor]:
    """Views over `body`, one per parameter name of the manifest; nothing is copied unless `body` is read-only.

    The manifest must name each of the model's parameters and nothing else; of names that are tied, such as
    `lm_head.weight`, one is enough. Any floating dtype is taken. Raises `WeightsError` naming the first tensor that
    is missing, foreign, misshapen or out of the body.
    """
    where = f"weights v{manifest.version}"
    parameters = dict(model.named_parameters(remove_duplicate=False))
    data = memoryview(bytearray(body)) if body.readonly else body
    staged: dict[str, torch.Tensor] = {}
    for meta in manifest.tensors:
        if meta.name not in parameters:
            raise WeightsError(f"{where}: `{meta.name}` is not a parameter of the model")
        if meta.name in staged:
            raise WeightsError(f"{where}: `{meta.name}` comes twice")
        shape = tuple(parameters[meta.name].shape)
        if meta.shape != shape:
            raise WeightsError(f"{where}: `{meta.name}` has shape {list(meta.shape)}, the model's is {list(shape)}")
        staged[meta.name] = _view(meta, data, where)
    given = {id(parameters[name]) for name in staged}
    for name, parameter in parameters.items():
        if id(parameter) not in given:
            raise WeightsError(f"{where}: `{name}` is missing")
    return staged


def _view(meta: TensorMeta, data: memoryview, where: str) -> torch.Tensor:
    dtype: Any = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WeightsError(f"{where}: `{meta.name}` has dtype {meta.dtype}, which is not a floating dtype of torch")
    count = 1
    for size in meta.shape:
        count *= size
    if meta.nbytes != count * dtype.itemsize or meta.offset < 0 or meta.offset + meta.nbytes > len(data):
        raise WeightsError(
            f"{where}: `{meta.name}` takes {count * dtype.itemsize} bytes; the manifest places {meta.nbytes} at "
            f"{meta.offset} of a body of {len(data)}"
        )
    return torch.frombuffer(data, dtype=dtype, count=count, offset=meta.offset).view(meta.shape)


def apply(model: torch.nn.Module, staged: dict[str, torch.Tensor]) -> None:
    """Copy the staged tensors over the parameters, cast to the model's dtype."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in staged.items():
        parameters[name].data.copy_(tensor)
