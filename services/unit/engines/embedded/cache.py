"""The KV cache: preallocated rows of `max_sequence_tokens`, one row per sample in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVCache:
    """Planes of shape [..., rows, kv_heads, positions, head_dim], all zero at first.

    Positions past a sample's length hold leftovers; they are masked, so they must only ever be finite: `clear` a row
    whose numbers may not be.
    """

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = list(planes)

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `target`."""
        for plane in self._planes:
            plane[..., target, :, :positions, :] = plane[..., source, :, :positions, :]

    def swap(self, one: int, other: int, positions: int) -> None:
        """Exchange the first `positions` positions of two rows."""
        for plane in self._planes:
            kept = plane[..., one, :, :positions, :].clone()
            plane[..., one, :, :positions, :] = plane[..., other, :, :positions, :]
            plane[..., other, :, :positions, :] = kept

    def clear(self, row: int) -> None:
        for plane in self._planes:
            plane[..., row, :, :, :] = 0
