"""All that a run reads of its data: prompts that fit, in a known order, and how samples are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.config import Config, SourceConfig
from services.samples import SamplingParams
from trainer.data.loader import Loader, fingerprint
from trainer.data.prompts import PromptSet, stop_token_ids, token_limit
from trainer.data.sources import load_rows
from trainer.model_files import check_model_files


@dataclass(frozen=True)
class Data:
    tokenizer: Any
    train: PromptSet
    held_out: PromptSet | None
    loader: Loader
    sampling: SamplingParams
    eval_sampling: SamplingParams


def load_data(config: Config, model: Path) -> Data:
    """Read and check everything. Raises `DataError`, `PromptTooLongError`, `ConfigError` or `ModelError`."""
    tokenizer, max_positions = check_model_files(model)
    sampling = SamplingParams(
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=stop_token_ids(tokenizer, config.sampling.stop),
    )
    limit = token_limit(config, max_positions)

    def prompts(source: SourceConfig, max_tokens: int) -> PromptSet:
        return PromptSet(load_rows(source), tokenizer, source, max_tokens, limit)

    train = prompts(config.data.train, sampling.max_tokens)
    greedy = replace(
        sampling, temperature=0.0, top_p=1.0, top_k=0, max_tokens=config.eval.max_tokens or sampling.max_tokens
    )
    held_out = prompts(config.data.eval, greedy.max_tokens) if config.data.eval is not None else None
    loader = Loader(
        len(train),
        config.run.seed,
        config.data.shuffle,
        fingerprint(train.item(index).text for index in range(len(train))),
    )
    return Data(tokenizer, train, held_out, loader, sampling, greedy)
