"""All that a run reads of its data: prompts that fit, in a known order, and how samples are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from services.config import Config, SourceConfig
from services.errors import ModelError
from services.samples import SamplingParams
from trainer.data.loader import Loader, fingerprint
from trainer.data.prompts import PromptSet, stop_token_ids, token_limit
from trainer.data.sources import load_rows


@dataclass(frozen=True)
class Data:
    tokenizer: Any
    train: PromptSet
    held_out: PromptSet | None
    loader: Loader
    sampling: SamplingParams


def load_data(config: Config, model: Path) -> Data:
    """Read and check everything. Raises `DataError`, `PromptTooLongError`, `ConfigError` or `ModelError`."""
    tokenizer, max_positions = _tokenizer(model)
    sampling = SamplingParams(
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=stop_token_ids(tokenizer, config.sampling.stop),
    )
    limit = token_limit(config, max_positions)

    def prompts(source: SourceConfig) -> PromptSet:
        return PromptSet(load_rows(source), tokenizer, source, sampling.max_tokens, limit)

    train = prompts(config.data.train)
    held_out = prompts(config.data.eval) if config.data.eval is not None else None
    loader = Loader(
        len(train),
        config.run.seed,
        config.data.shuffle,
        fingerprint(train.item(index).text for index in range(len(train))),
    )
    return Data(tokenizer, train, held_out, loader, sampling)


def _tokenizer(model: Path) -> tuple[Any, int | None]:
    """The tokenizer, and the model's largest sequence (None: unbounded)."""
    if not (model / "config.json").is_file():
        raise ModelError(f"model.path: {model} is not a model directory in Hugging Face format (no config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        settings = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {model}: {' '.join(str(error).split())}") from error
    return tokenizer, getattr(settings, "max_position_embeddings", None)
