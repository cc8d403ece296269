"""Tokens per CPU second of the embedded engine on one thread, beside the obvious alternatives.

CPU time, not wall time: what a quiet machine would show, whatever else runs.

`python tests/bench/embedded_engine.py [--seconds 2] [--hidden 128 --layers 4]`: a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.samples import Sample, SampleId, SamplingParams
from services.unit.engines.base import SampleRequest
from services.unit.engines.embedded.core import Core
from services.unit.engines.embedded.forward import Forward
from services.unit.engines.embedded.generic import GenericForward
from services.unit.engines.embedded.lean import LeanForward

PROMPT, COMPLETION, POSITIONS, BLOCK = 24, 64, 512, 16
COUNTS = (1, 8, 32, 64, 128, 256)


def model_of(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        intermediate_size=4 * hidden,
        max_position_embeddings=POSITIONS,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def plain_loop(model: Any, sequences: int) -> int:
    """The loop everyone writes first: DynamicCache, softmax, multinomial; returns the tokens made."""
    tokens = torch.randint(0, 64, (sequences, PROMPT))
    past = None
    for _ in range(COMPLETION):
        output = model(input_ids=tokens, cache=past, use_cache=True)
        past = output.cache
        logprobs = torch.log_softmax(output.logits[:, -1], -1)
        tokens = torch.multinomial(logprobs.exp(), 1)
        logprobs.gather(-1, tokens)
    return sequences * COMPLETION


def library(model: Any, sequences: int) -> int:
    """Transformers' own continuous batching, with log-probs and without stale prefixes, as an engine would need it."""
    prompts = np.random.default_rng(0).integers(2, 64, (sequences, PROMPT)).tolist()
    blocks = sequences * (PROMPT + COMPLETION) // BLOCK + 2 * sequences
    done = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=COMPLETION, do_sample=True, eos_token_id=1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=BLOCK, num_blocks=blocks, allow_block_sharing=False, return_logprobs=True
        ),
        persistent_manager=True,
        warmup=False,
    )
    return sum(len(output.generated_tokens) for output in done.values())


def requests(lengths: list[int], siblings: int) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 64, PROMPT).tolist()) for _ in range(-(-len(lengths) // siblings))]
    return [
        SampleRequest(SampleId(str(i // siblings), i % siblings), prompts[i // siblings], SamplingParams(n), seed=i)
        for i, n in enumerate(lengths)
    ]


def through_core(model: Any, forward: Forward, rows: int, lengths: list[int], siblings: int = 8) -> int:
    core = Core(model, forward, rows, POSITIONS, time.time)
    for ticket, request in enumerate(requests(lengths, siblings)):
        core.submit(ticket, request)
    made = 0
    while not core.idle:
        made += sum(len(o.result.token_ids) for o in core.step() if isinstance(o.result, Sample))
    return made


class Unsplit(LeanForward):
    """Attention over the longest row for all."""

    splits = False

    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        from services.unit.engines.embedded import lean

        cut, lean.buckets = lean.buckets, lambda lengths: [lean.Bucket(0, len(lengths), int(lengths.max()))]
        try:
            return super().decode(tokens, positions)
        finally:
            lean.buckets = cut


def rates(ways: dict[str, Callable[[], int]], seconds: float) -> dict[str, float]:
    """Tokens/s of each way, the best of several turns taken one after the other, so that noise hits all alike."""
    best = dict.fromkeys(ways, 0.0)
    end = time.process_time() + seconds * len(ways)
    while True:
        for name, way in ways.items():
            begun = time.process_time()
            tokens = way()
            best[name] = max(best[name], tokens / (time.process_time() - begun))
        if time.process_time() > end:
            return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0, help="per way and count")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(options.hidden, options.layers)
    result: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for count in COUNTS:
            lean = LeanForward(model, count, POSITIONS)
            generic = GenericForward(model, count, POSITIONS)
            result[f"{count} sequences"] = rates(
                {
                    "plain loop": lambda count=count: plain_loop(model, count),
                    "library": lambda count=count: library(model, count),
                    "generic": lambda count=count, f=generic: through_core(model, f, count, [COMPLETION] * count),
                    "lean": lambda count=count, f=lean: through_core(model, f, count, [COMPLETION] * count),
                },
                options.seconds,
            )
        rng = np.random.default_rng(1)
        short = rng.integers(4, 65, 256).tolist()
        tail = [200 + int(x) % 50 if i % 16 == 0 else 8 + int(x) % 24 for i, x in enumerate(rng.integers(0, 999, 256))]
        for name, lengths in (("256 samples of 4-64", short), ("256 samples, 1 in 16 long", tail)):
            for rows in (32, 64, 128):
                lean, unsplit = LeanForward(model, rows, POSITIONS), Unsplit(model, rows, POSITIONS)
                result[f"{name}, {rows} slots"] = rates(
                    {
                        "lean": lambda f=lean, r=rows, n=lengths: through_core(model, f, r, n),
                        "lean, no split": lambda f=unsplit, r=rows, n=lengths: through_core(model, f, r, n),
                    },
                    options.seconds,
                )
    columns = ("plain loop", "library", "generic", "lean", "lean, no split")
    print(f"{'tokens/s':36}" + "".join(f"{column:>16}" for column in columns))
    for name, row in result.items():
        print(f"{name:36}" + "".join(f"{row[c]:16.0f}" if c in row else f"{'':16}" for c in columns))
    print(json.dumps({name: {way: round(rate) for way, rate in row.items()} for name, row in result.items()}))


if __name__ == "__main__":
    main()
