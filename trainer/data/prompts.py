"""Rows as token ids, each checked to fit before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.config import Config, SourceConfig
from services.errors import ConfigError, DataError, PromptTooLongError
from trainer.data.sources import Row


@dataclass(frozen=True)
class PromptItem:
    """One prompt: `index` counts the rows of its dataset, `text` is what the reward function sees."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    answer: Any
    row: Row


@dataclass(frozen=True)
class TokenLimit:
    """`tokens` is the most that prompt and completion may have together; `name` is the setting that says so."""

    tokens: int
    name: str


def token_limit(config: Config, max_positions: int | None) -> TokenLimit:
    """The tightest bound on prompt + completion; `max_positions` is the model's (None: unbounded)."""
    limits = [
        TokenLimit(config.engine.max_sequence_tokens, "engine.max_sequence_tokens"),
        TokenLimit(config.trainer.micro_batch_tokens, "trainer.micro_batch_tokens"),
    ]
    if max_positions is not None:
        limits.append(TokenLimit(max_positions, "the model's max_position_embeddings"))
    return min(limits, key=lambda limit: limit.tokens)


class PromptSet:
    """The prompts of one dataset, tokenised once.

    Raises `PromptTooLongError` naming the first row whose prompt does not leave room for `max_tokens` tokens, and
    `DataError` for a row that cannot be tokenised.
    """

    def __init__(
        self, rows: Sequence[Row], tokenizer: Any, source: SourceConfig, max_tokens: int, limit: TokenLimit
    ) -> None:
        self._items = [self._make(index, row, tokenizer, source.chat) for index, row in enumerate(rows)]
        for item in self._items:
            _check_fits(item, max_tokens, limit)

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> PromptItem:
        """The prompt of row `index`."""
        return self._items[index]

    @staticmethod
    def _make(index: int, row: Row, tokenizer: Any, chat: bool) -> PromptItem:
        text = _render(row, tokenizer) if chat else row.prompt
        if not isinstance(text, str):
            raise DataError(f"{row.where}: the prompt is a list of chat messages; set chat: true")
        # A chat template writes its own special tokens; plain text gets those that the tokenizer adds.
        token_ids = tuple(tokenizer(text, add_special_tokens=not chat)["input_ids"])
        if not token_ids:
            raise DataError(f"{row.where}: the prompt has no tokens")
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown in token_ids and tokenizer.unk_token not in text:
            raise DataError(f"{row.where}: the prompt has characters that the tokenizer does not know: {text!r}")
        return PromptItem(index, token_ids, text, row.answer, row)


def _render(row: Row, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{row.where}: chat: true, but the tokenizer has no chat template")
    messages = row.prompt if isinstance(row.prompt, list) else [{"role": "user", "content": row.prompt}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise DataError(f"{row.where}: the chat template refuses the prompt: {' '.join(str(error).split())}") from error
    return text


def _check_fits(item: PromptItem, max_tokens: int, limit: TokenLimit) -> None:
    tokens = len(item.token_ids)
    if tokens + max_tokens > limit.tokens:
        raise PromptTooLongError(
            f"{item.row.where}: the prompt has {tokens} tokens; with up to {max_tokens} of completion it exceeds "
            f"{limit.name} = {limit.tokens}; shorten the prompt, lower sampling.max_tokens or raise the limit"
        )


def stop_token_ids(tokenizer: Any, stop: Sequence[str]) -> tuple[int, ...]:
    """The tokens that end a sample: the tokenizer's EOS first, then each of `stop`, which must be one token each.

    Raises `ConfigError` for a stop text of several tokens, and when nothing would ever end a sample.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for text in stop:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1 or (tokens[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
            raise ConfigError(
                f"sampling.stop: {text!r} is not one token of this tokenizer (it has {len(tokens)}); "
                "a stop must be a single token"
            )
        if tokens[0] not in ids:
            ids.append(int(tokens[0]))
    if not ids:
        raise ConfigError("the tokenizer has no EOS token and sampling.stop is empty: no sample would ever end")
    return tuple(ids)
