"""Any decoder-only Hugging Face model, through its own forward, over a preallocated cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from services.errors import ModelError
from services.unit.engines.embedded.cache import KVCache
from services.unit.engines.embedded.forward import pad


class _Rows(CacheLayerMixin):
    """One layer: writes a step's keys and values at a position per row, and shows the rows up to the longest."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.rows = torch.empty(0, dtype=torch.long)
        self.at: torch.Tensor | None = None
        self.visible = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of [rows, kv_heads, tokens, head_dim]; tokens is 1 when decoding."""
        if self.at is None:
            self.keys[self.rows, :, : self.visible] = key_states
            self.values[self.rows, :, : self.visible] = value_states
            return key_states, value_states
        self.keys[self.rows, :, self.at] = key_states[:, :, 0]
        self.values[self.rows, :, self.at] = value_states[:, :, 0]
        batch = len(self.rows)
        return self.keys[:batch, :, : self.visible], self.values[:batch, :, : self.visible]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocated from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return self.visible

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()


class GenericForward:
    """`Forward` through `model(...)` with explicit position ids and a prepared 4-D mask.

    Raises `ModelError` for a model whose state is more than keys and values of every past token (recurrent layers, a
    sliding window shorter than `positions`), or whose forward takes no position ids.
    """

    splits = False

    def __init__(self, model: Any, rows: int, positions: int) -> None:
        self._model = model
        self._device: torch.device = model.device
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        name = type(model).__name__
        if "position_ids" not in accepted or self._cache_name not in accepted:
            raise ModelError(f"{name}: the embedded engine needs a forward that takes position_ids and a KV cache")
        self._keep_last = "logits_to_keep" in accepted
        _check_layers(model.config, name, positions)
        self._layers = [
            _Rows(self._zeros(rows, keys, positions), self._zeros(rows, values, positions))
            for keys, values in self._probe(name)
        ]
        self._past = Cache(layers=self._layers)
        self.cache = KVCache([plane for layer in self._layers for plane in (layer.keys, layer.values)])

    def _zeros(self, rows: int, like: torch.Tensor, positions: int) -> torch.Tensor:
        shape = (rows, like.shape[1], positions, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _probe(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of one token: every layer's shapes."""
        past = DynamicCache()
        token = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        self._model(input_ids=token, position_ids=token, use_cache=True, **{self._cache_name: past})
        layers = [(layer.keys, layer.values) for layer in past.layers]
        if not layers or any(keys is None or values is None or keys.dim() != 4 for keys, values in layers):
            raise ModelError(f"{name}: the embedded engine needs plain keys and values in every layer")
        return layers

    def refresh(self) -> None:
        """Nothing is kept beside the parameters."""

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        tokens = pad(prompts).to(self._device)
        at = torch.arange(tokens.shape[1], device=self._device)
        future = at > at[:, None]
        self._run(tokens, at.expand_as(tokens), future.expand(len(prompts), 1, -1, -1), rows=torch.tensor(rows))

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        at = torch.from_numpy(positions).to(self._device)
        future = torch.arange(int(positions.max()) + 1, device=self._device) > at[:, None]
        inputs = torch.from_numpy(tokens).to(self._device)[:, None]
        logits = self._run(inputs, at[:, None], future[:, None, None], rows=torch.arange(len(tokens)), at=at)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        future: torch.Tensor,
        rows: torch.Tensor,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of the last column, [rows, vocabulary]. `future` bool [rows, 1, tokens, visible] is masked."""
        rows = rows.to(self._device)
        for layer in self._layers:
            layer.rows, layer.at, layer.visible = rows, at, future.shape[-1]
        dtype = self._model.dtype
        mask = torch.zeros(future.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(future, torch.finfo(dtype).min)
        extra: dict[str, Any] = {self._cache_name: self._past}
        if self._keep_last:
            extra["logits_to_keep"] = 1
        output = self._model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **extra)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _check_layers(config: Any, name: str, positions: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (getattr(config, "layer_types", None) is None and window is not None)
    foreign = kinds - {"full_attention", "sliding_attention"}
    if foreign:
        raise ModelError(f"{name}: the embedded engine does not know layers of type {', '.join(sorted(foreign))}")
    if slides and window is not None and window < positions:
        raise ModelError(
            f"{name}: its sliding window of {window} tokens is shorter than engine.max_sequence_tokens ({positions}); "
            f"set engine.max_sequence_tokens to {window} or less"
        )
