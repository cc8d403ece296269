"""What the decode loop asks of a model, and the line that cuts a batch of mixed lengths into parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.unit.engines.embedded.cache import KVCache


class Forward(Protocol):
    """A model over its own KV cache. Called on one thread, under `torch.inference_mode`."""

    cache: KVCache
    splits: bool
    """Whether attention is cut into parts by length, so that it pays to keep long rows together."""

    def prefill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Write the keys and values of each prompt to positions [0, len(prompt)) of its row."""
        ...

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """One step of rows 0..B-1: write the key and value of `tokens[row]` at `positions[row]`.

        Returns the next token's logits, [B, vocabulary], float32 (float64 for a float64 model).
        """
        ...

    def refresh(self) -> None:
        """The model's parameters have changed in place."""
        ...


def pad(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids int64 [prompts, longest], padded with 0 at the right."""
    tokens = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return torch.from_numpy(tokens)
