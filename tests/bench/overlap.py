"""Iteration time over max(generation time, training time) in the three modes, on emulated hardware.

    python tests/bench/overlap.py [--iterations 8]

Real head, units, trainer and streams; the engine sleeps by a latency profile and training sleeps by its tokens, sized
so that both stages take about the same time. The stages' own times are those of the `batch` run, where nothing
overlaps: a perfect overlap is 1.0, none is 2.0. Below 1.0 the tail of one iteration's generation runs beside the next
one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from services.config import ModelInit
from trainer.tiny_model import build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GROUP, UNITS, SLOTS = 64, 8, 2, 64
MEAN_TOKENS, STEP_S = 64, 0.01
WAVES = PROMPTS * GROUP / (UNITS * SLOTS)
GENERATION_S = WAVES * MEAN_TOKENS * STEP_S
TAIL = 1.3  # lengths differ, so that the last samples of an iteration leave slots idle
SECONDS_PER_TOKEN = TAIL * GENERATION_S / (PROMPTS * GROUP * (MEAN_TOKENS + 6))
SKIPPED = 2


def write_inputs(directory: Path) -> Path:
    init = ModelInit(hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64)
    tokenizer = build_tokenizer(init.alphabet)
    model = directory / "model"
    build_model(init, tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = directory / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i:03}+1=", "answer": ""}) + "\n" for i in range(1000)))
    return model


def run(mode: str, iterations: int, directory: Path) -> list[dict[str, Any]]:
    config = {
        "run": {"name": mode},
        "model": {"path": str(directory / "model")},
        "data": {"train": {"path": str(directory / "prompts.jsonl")}},
        "reward": {"fn": "bench_tasks:random_reward"},
        "sampling": {"n": GROUP, "max_tokens": 4 * MEAN_TOKENS},
        "trainer": {
            "backend": "emulated",
            "micro_batch_tokens": 4096,
            "emulated": {"seconds_per_token": SECONDS_PER_TOKEN, "seconds_per_step": 0.01},
        },
        "engine": {
            "kind": "emulated",
            "slots": SLOTS,
            "emulated": {"ptl_base_s": STEP_S, "lengths": "uniform", "mean": MEAN_TOKENS},
        },
        "sgs": {"units": UNITS},
        "pipeline": {"mode": mode, "iterations": iterations, "prompts_per_iteration": PROMPTS},
        "checkpoint": {"every": 1000},
    }
    path = directory / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "services.cli", "run", str(path), "--out", str(directory / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT / "tests/bench", env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"streamrl failed:\n{done.stderr[-2000:]}")
    metrics = next((directory / "runs").glob(f"{mode}-*")) / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if row["kind"] == "iteration"][SKIPPED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8)
    options = parser.parse_args()
    print(f"{'mode':<8} {'iteration s':>12} {'generation s':>13} {'training s':>11} {'over max':>9}")
    ratios: dict[str, float] = {}
    longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory)
        for mode in ("batch", "stream", "async"):
            rows = run(mode, options.iterations, directory)
            middle = {key: statistics.median(row[key] for row in rows) for key in ("iteration_s", "train_s")}
            generation = statistics.median(row["generation_s"] for row in rows)
            if mode == "batch":
                longest = max(generation, middle["train_s"])
            ratios[mode] = middle["iteration_s"] / longest
            print(
                f"{mode:<8} {middle['iteration_s']:12.2f} {generation:13.2f} {middle['train_s']:11.2f} "
                f"{ratios[mode]:9.3f}",
                flush=True,
            )
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
