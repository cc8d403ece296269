"""A small model made from nothing: Qwen2 architecture, a character tokenizer, supervised warm-up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.config import ModelInit, WarmupConfig
from services.errors import ConfigError, TrainingError

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IGNORED = -100
BATCHES_PER_BUCKET = 16

Example = tuple[list[int], int]  # token ids of prompt + completion + EOS, and how many of them are the prompt


def build_tokenizer(alphabet: str) -> Any:
    """One token per character of `alphabet`, after <pad>, <eos> and <unk>."""
    tokens = [PAD, EOS, UNK, *dict.fromkeys(alphabet)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def build_model(init: ModelInit, tokenizer: Any, seed: int) -> Any:
    """An untrained float32 model; the same weights for the same seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # seconds to import, and most runs bring their own model

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=init.hidden_size,
            intermediate_size=init.intermediate_size,
            num_hidden_layers=init.layers,
            num_attention_heads=init.heads,
            num_key_value_heads=init.kv_heads,
            max_position_embeddings=init.max_positions,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            # Far above the usual 0.02: at this width attention would start out uniform, and stay so for long.
            initializer_range=init.hidden_size**-0.5,
        )
    ).float()


def encode_examples(examples: Sequence[tuple[str, str]], tokenizer: Any, init: ModelInit) -> list[Example]:
    """Raises `ConfigError` naming the example that has unknown characters or is too long."""
    encoded = []
    for index, (prompt, completion) in enumerate(examples):
        start = tokenizer(prompt)["input_ids"]
        tokens = [*start, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        if tokenizer.unk_token_id in tokens:
            raise ConfigError(
                f"warmup.examples: example {index} has characters that are not in model.init.alphabet: "
                f"{prompt + completion!r}"
            )
        if len(tokens) > init.max_positions:
            raise ConfigError(
                f"warmup.examples: example {index} has {len(tokens)} tokens, over model.init.max_positions = "
                f"{init.max_positions}"
            )
        encoded.append((tokens, len(start)))
    return encoded


def warm_up(
    model: Any, examples: Sequence[Example], config: WarmupConfig, seed: int, progress: Callable[[int, float], None]
) -> None:
    """Supervised training on the completions, in place; calls `progress(step, loss per token)` after each step.

    A batch holds examples of about one length, and every completion token of the run weighs the same, so that the
    model learns how often each kind of example comes. The learning rate rises over the first twentieth and falls to
    a tenth along a cosine. Raises `TrainingError` when the loss is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rise = max(1, config.steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / rise, total_iters=rise),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps - rise + 1, eta_min=config.lr / 10),
        ],
        [rise],
    )
    batches = _batches(examples, config.batch_size, random.Random(seed))
    usual = config.batch_size * sum(len(tokens) - prompt for tokens, prompt in examples) / len(examples)
    model.train()
    for step in range(1, config.steps + 1):
        batch = next(batches)
        total = _loss(model, batch)
        value = total.item() / sum(len(tokens) - prompt for tokens, prompt in batch)
        if value != value or value == float("inf"):
            raise TrainingError(f"warm-up: the loss is {value} at step {step}; lower warmup.lr")
        optimizer.zero_grad()
        (total / usual).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step, value)
    model.eval()


def _batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), size * BATCHES_PER_BUCKET):
            bucket = sorted(order[start : start + size * BATCHES_PER_BUCKET], key=lambda index: len(examples[index][0]))
            batches = [bucket[at : at + size] for at in range(0, len(bucket), size)]
            rng.shuffle(batches)
            for batch in batches:
                yield [examples[index] for index in batch]


def _loss(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Sum over the completion tokens."""
    longest = max(len(tokens) for tokens, _ in batch)
    inputs = torch.full((len(batch), longest), model.config.pad_token_id)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, (tokens, prompt_tokens) in enumerate(batch):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_tokens : len(tokens)] = torch.tensor(tokens[prompt_tokens:])
    # Padding is on the right, where causal attention never looks from a real token.
    logits = model(input_ids=inputs).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
