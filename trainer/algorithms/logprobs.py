"""Log-probabilities of sampled tokens, of the same distribution that the engine drew them from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainer.data.batch import KeptSets, MicroBatch


class Policy(nn.Module):
    """A causal language model seen as: micro-batch in, log-prob of each completion token out.

    The vocabulary projection sees only the states that predict a completion token: a hook in front of it selects
    them, so whatever the model does around it (scaling, soft-capping) stays as it is. A model that names no output
    embedding computes all logits, and the selection follows.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self._positions: torch.Tensor | None = None
        find_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
        head = find_head() if find_head is not None else None
        if head is not None:
            head.register_forward_pre_hook(self._select)

    def _select(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden, *rest = inputs
        return (hidden.flatten(0, 1).index_select(0, self._positions).unsqueeze(0), *rest)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """[T] log-probs (natural log), float32 or wider."""
        rows, width = batch.input_ids.shape
        self._positions = batch.positions
        try:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
        finally:
            self._positions = None
        selected = logits.shape[:2] == (1, len(batch.positions))
        logits = logits[0] if selected else logits.view(rows * width, -1).index_select(0, batch.positions)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return sampled_logprobs(logits, batch.targets, batch.kept)


def sampled_logprobs(logits: torch.Tensor, targets: torch.Tensor, kept: KeptSets | None = None) -> torch.Tensor:
    """[T] log-prob of `targets` int64 [T] under softmax of `logits` [T, vocabulary], already divided by temperature.

    Steps named in `kept` are normalised over their kept ids only. A target outside its own kept set would be a log-prob
    of something the engine cannot have drawn; the kept sets are the engine's, so it is not checked here.
    """
    if kept is None:
        return -F.cross_entropy(logits, targets, reduction="none")
    chosen = logits.gather(1, targets[:, None])[:, 0]
    entries = logits[kept.rows[kept.segments], kept.ids]
    cut = _segment_logsumexp(entries, kept.segments, len(kept.rows))
    if len(kept.rows) == len(targets):
        return chosen - cut
    whole = torch.ones(len(targets), dtype=torch.bool, device=logits.device)
    whole[kept.rows] = False
    full = logits[whole].logsumexp(-1)
    return chosen - torch.empty_like(chosen).masked_scatter(whole, full).index_copy(0, kept.rows, cut)


def _segment_logsumexp(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """log of the sum of exp over the values of each segment; every one of the `count` segments has a value."""
    top = values.new_full((count,), -torch.inf).scatter_reduce(0, segments, values.detach(), "amax")
    shifted = (values - top[segments]).exp()
    return values.new_zeros(count).index_add(0, segments, shifted).log() + top
