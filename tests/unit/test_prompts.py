from __future__ import annotations

from pathlib import Path

import pytest

from services.config import Config, SourceConfig
from services.errors import ConfigError, DataError, PromptTooLongError
from trainer.data.prompts import PromptSet, TokenLimit, stop_token_ids, token_limit
from trainer.data.sources import Row
from trainer.tiny_model import build_tokenizer

SOURCE = SourceConfig(path=Path("data.jsonl"))
CHAT = SourceConfig(path=Path("data.jsonl"), chat=True)
LIMIT = TokenLimit(10, "engine.max_sequence_tokens")
TOKENIZER = build_tokenizer("0123456789+=;:\nuser")


def row(prompt: object, where: str = "data.jsonl:1") -> Row:
    return Row(prompt, 1, where, {})  # type: ignore[arg-type]


def test_items_are_tokens_of_the_text() -> None:
    prompts = PromptSet([row("1+1="), row("2+2=")], TOKENIZER, SOURCE, 4, LIMIT)
    assert len(prompts) == 2
    item = prompts.item(1)
    assert (item.index, item.text, item.answer, item.row.prompt) == (1, "2+2=", 1, "2+2=")
    assert TOKENIZER.decode(item.token_ids) == "2+2="
    assert len(item.token_ids) == 4


def test_a_prompt_must_leave_room_for_its_completion() -> None:
    rows = [row("1+1="), row("12+34=", "data.jsonl:7")]
    PromptSet(rows, TOKENIZER, SOURCE, 4, LIMIT)
    with pytest.raises(PromptTooLongError, match=r"data\.jsonl:7: the prompt has 6 tokens; with up to 5 .* = 10"):
        PromptSet(rows, TOKENIZER, SOURCE, 5, LIMIT)


def test_unknown_characters_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:1: .* characters that the tokenizer does not know: 'x='"):
        PromptSet([row("x=")], TOKENIZER, SOURCE, 4, LIMIT)


def test_chat_template() -> None:
    tokenizer = build_tokenizer("0123456789+=:user\n")
    with pytest.raises(DataError, match="no chat template"):
        PromptSet([row("1+1=")], tokenizer, CHAT, 4, LIMIT)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    for prompt in ("1+", [{"role": "user", "content": "1+"}]):
        item = PromptSet([row(prompt)], tokenizer, CHAT, 1, LIMIT).item(0)
        assert item.text == "user:1+\n"
        assert tokenizer.decode(item.token_ids) == item.text
    with pytest.raises(DataError, match="set chat: true"):
        PromptSet([row([{"role": "user", "content": "1+"}])], tokenizer, SOURCE, 1, LIMIT)


def test_a_template_that_refuses_names_the_row() -> None:
    tokenizer = build_tokenizer("0123456789+=")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"data\.jsonl:1: the chat template refuses the prompt: roles must alternate"):
        PromptSet([row("1+1=")], tokenizer, CHAT, 4, LIMIT)


def test_the_tightest_limit_is_named() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}},
        "reward": {"fn": "a:b"},
        "engine": {"max_sequence_tokens": 300},
        "trainer": {"micro_batch_tokens": 400},
        "sampling": {"max_tokens": 100},
    }
    config = Config.model_validate(tree)
    assert token_limit(config, None) == TokenLimit(300, "engine.max_sequence_tokens")
    assert token_limit(config, 200) == TokenLimit(200, "the model's max_position_embeddings")
    small = config.model_copy(update={"trainer": config.trainer.model_copy(update={"micro_batch_tokens": 150})})
    assert token_limit(small, 200) == TokenLimit(150, "trainer.micro_batch_tokens")


def test_stop_tokens() -> None:
    eos = TOKENIZER.eos_token_id
    (semicolon,) = TOKENIZER(";")["input_ids"]
    assert stop_token_ids(TOKENIZER, []) == (eos,)
    assert stop_token_ids(TOKENIZER, [";", ";", "<eos>"]) == (eos, semicolon)
    for text in ("1+", "x", ""):
        with pytest.raises(ConfigError, match="must be a single token"):
            stop_token_ids(TOKENIZER, [text])


def test_something_must_end_a_sample() -> None:
    tokenizer = build_tokenizer("01;")
    tokenizer.eos_token = None
    assert stop_token_ids(tokenizer, [";"]) == tuple(tokenizer(";")["input_ids"])
    with pytest.raises(ConfigError, match="no sample would ever end"):
        stop_token_ids(tokenizer, [])
