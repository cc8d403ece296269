"""Text for the reward function: a sample's tokens decoded once, its stop token left out."""

from __future__ import annotations

from typing import Any

from services.samples import FinishReason, Sample
from trainer.data.prompts import PromptItem
from trainer.rewards.scorer import Scorer


class SampleScorer:
    """Decodes and scores. Lives on the service loop."""

    def __init__(self, scorer: Scorer, tokenizer: Any) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer

    async def score(self, item: PromptItem, sample: Sample) -> float | None:
        """The reward, or None when it could not be computed."""
        tokens = sample.token_ids[:-1] if sample.finish_reason is FinishReason.STOP else sample.token_ids
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return await self._scorer.score(item.text, text, item.answer, item.row.extra)
