"""A tiny model, samples, and one iteration computed the slow way; shared by the tests of the learner and its ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from services.config import Config
from services.samples import SampleId
from trainer.data.batch import TrainSample

# Several threads per process on a busy machine wait for each other.
torch.set_num_threads(1)

VOCAB = 23
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

# How losses add up, and how samples lie on the ranks. Weights are made sample by sample, wherever that is, so that
# each layout is needed with one of them only: the one whose weights differ.
CASES = (
    ("token_mean", "even"),
    ("sequence_mean", "even"),
    ("constant", "even"),
    ("sequence_mean", "lopsided"),
    ("sequence_mean", "idle"),
)


def write_model(path: Path, architecture: str = "gpt2") -> Path:
    """GPT-2 computes in float64 throughout; Qwen2 casts to float32 in its norms and rounds there."""
    torch.manual_seed(5)
    if architecture == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, n_inner=24)
        )
    else:
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=32, tie_word_embeddings=True, **shape
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(torch.float64).save_pretrained(path)
    vocabulary = {str(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1").save_pretrained(path)
    return path


def make_config(path: Path, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": path, "dtype": "float64"},
        "data": {"train": {"kind": "function", "fn": "a:b"}},
        "reward": {"fn": "a:b"},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 1e9, "eps": 1e-3},
        "sampling": {"temperature": 0.8, "max_tokens": 9},
    }
    return Config.model_validate(base | sections)


def make_samples(count: int, seed: int = 0, cut: bool = True) -> list[TrainSample]:
    """Lengths differ; with `cut`, every third sample carries kept sets."""
    draw = random.Random(seed)
    samples = []
    for k in range(count):
        completion = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 9)))
        kept = [sorted({token, *draw.sample(range(VOCAB), 6)}) if cut and k % 3 == 0 else [] for token in completion]
        samples.append(
            TrainSample(
                id=SampleId("p", k),
                prompt=tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))),
                completion=completion,
                behaviour_logprobs=tuple(draw.uniform(-4, -1) for _ in completion),
                advantage=draw.uniform(-2, 2),
                kept_counts=tuple(map(len, kept)) if any(kept) else (),
                kept_ids=tuple(token for ids in kept for token in ids),
            )
        )
    return samples


def slow_gradient(path: Path, config: Config, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss, one token at a time in float64, without any code of the trainer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    algorithm = config.algorithm
    total, terms = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        logits = model(torch.tensor([sample.prompt + sample.completion])).logits[0] / config.sampling.temperature
        at = 0
        losses = []
        for t, token in enumerate(sample.completion):
            row = logits[len(sample.prompt) + t - 1]
            kept = slice(None)
            if sample.kept_counts:
                kept = list(sample.kept_ids[at : at + sample.kept_counts[t]])
                at += sample.kept_counts[t]
            logprob = row[token] - torch.log(torch.exp(row[kept]).sum())
            ratio = torch.exp(logprob - sample.behaviour_logprobs[t])
            clipped = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
            losses.append(-torch.min(ratio * sample.advantage, clipped * sample.advantage))
        one = torch.stack(losses)
        if algorithm.aggregation == "sequence_mean":
            total, terms = total + one.mean(), terms + 1
        else:
            each = len(losses) if algorithm.aggregation == "token_mean" else config.sampling.max_tokens
            total, terms = total + one.sum(), terms + each
    (total / terms).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference over all tensors, relative to the largest value of all."""
    assert got.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((got[name] - value).abs().max()) for name, value in expected.items()) / scale
