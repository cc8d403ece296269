"""TRL's GRPOTrainer on a CPU over given prompts and model; prints one JSON object. Runs in TRL's own environment.

Imports nothing of this project: whatever both sides need comes as files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset


def digit_share(completions: list[str], **_: Any) -> list[float]:
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]


class StepClock(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class TimedTrainer(trl.GRPOTrainer):
    """Also knows how long generation took and how many tokens came."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.generation_seconds: list[float] = []
        self.generated_tokens: list[int] = []

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*arguments, **options)
        self.generation_seconds.append(time.perf_counter() - start)
        completions = result[0] if isinstance(result[0][0], list) else result[1]
        self.generated_tokens.append(sum(map(len, completions)))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON lines with a key `prompt`")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=64, help="samples")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    samples = options.prompts_per_step * options.generations
    accumulation = samples // options.micro_batch
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as directory:
        config = trl.GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation,
            num_generations=options.generations,
            max_completion_length=options.max_tokens,
            max_steps=options.steps,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            num_iterations=1,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        clock = StepClock()
        trainer = TimedTrainer(
            model=model,
            reward_funcs=digit_share,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    step = statistics.median(clock.seconds[1:])
    print(
        json.dumps(
            {
                "peer": f"trl {trl.__version__}",
                "samples_per_s": samples / step,
                "step_s": step,
                "generation_s": statistics.median(trainer.generation_seconds[1:]),
                "tokens_per_sample": statistics.mean(trainer.generated_tokens) / samples,
            }
        )
    )


if __name__ == "__main__":
    main()
