"""Samples per second of a whole training step: streamrl over TRL's GRPOTrainer, same models, prompts and threads.

    python tests/bench/vs_trl.py [--sizes 1m,14m] [--lengths uniform,long_tail] [--modes async] [--rounds 3]

(a) uniform: an untrained model, up to 64 tokens a sample. (b) long tail: a model warmed up so that most completions
have 3-12 tokens and about one in eight runs to the limit of 192. TRL runs in `.venv-trl`, made on the first run.
Runs alternate; medians are compared. TRL's micro-batches are 64 samples, streamrl's 2048 padded tokens (it packs by
tokens; the cut does not change the gradient). TRL has two torch threads; streamrl one for its DP unit and one for its
trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench_tasks import additions, length_mix

from services.config import ModelInit, WarmupConfig
from trainer.tiny_model import build_model, build_tokenizer, encode_examples, warm_up

ROOT = Path(__file__).resolve().parents[2]
PEER_ENV = ROOT / ".venv-trl"
PEER_PACKAGES = ["torch==2.13.0", "trl==1.16.0", "accelerate", "datasets"]
NO_PEER = 3
PROMPTS, GROUP, MICRO = 32, 8, 64
MICRO_TOKENS = 2048
DEFAULT_ROUNDS = {"1m": 3, "14m": 1}
SHAPES = {
    "1m": ModelInit(hidden_size=128, layers=4, heads=4, kv_heads=4, intermediate_size=512),
    "14m": ModelInit(hidden_size=320, layers=10, heads=5, kv_heads=5, intermediate_size=1024),
}


@dataclass(frozen=True)
class Case:
    size: str
    mix: str
    max_tokens: int
    model: Path
    prompts: Path


def peer_python() -> Path:
    """TRL's own interpreter; exits with 3 when it cannot be installed."""
    python = PEER_ENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENV)], check=True)
    probe = subprocess.run([python, "-c", "import trl"], capture_output=True, check=False)
    if probe.returncode:
        install = subprocess.run([python, "-m", "pip", "install", "-q", *PEER_PACKAGES], check=False)
        if install.returncode:
            print("TRL cannot be installed here: no comparison")
            sys.exit(NO_PEER)
    return python


def make_case(size: str, mix: str, directory: Path) -> Case:
    model = directory / f"{size}-{mix}"
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in additions(2000, seed=0)))
    init = SHAPES[size]
    tokenizer = build_tokenizer(init.alphabet)
    network = build_model(init, tokenizer, seed=0)
    if mix == "long_tail":
        examples = encode_examples(length_mix(4000, seed=1), tokenizer, init)
        warmup = WarmupConfig(examples="bench_tasks:length_mix", steps=120 if size == "1m" else 60, batch_size=32)
        warm_up(network, examples, warmup, 0, lambda *_: None)
    network.save_pretrained(model)
    tokenizer.save_pretrained(model)
    return Case(size, mix, 64 if mix == "uniform" else 192, model, prompts)


def run_peer(case: Case, python: Path, steps: int) -> dict[str, Any]:
    command = [python, ROOT / "tests/bench/peers/trl_grpo.py", "--model", case.model, "--prompts", case.prompts]
    command += ["--prompts-per-step", PROMPTS, "--generations", GROUP, "--micro-batch", MICRO]
    command += ["--max-tokens", case.max_tokens, "--steps", steps, "--threads", 2]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_ours(case: Case, mode: str, steps: int, directory: Path) -> dict[str, Any]:
    config = {
        "run": {"name": f"{case.size}-{case.mix}-{mode}"},
        "model": {"path": str(case.model)},
        "data": {"train": {"path": str(case.prompts)}},
        "reward": {"fn": "bench_tasks:digit_share"},
        "sampling": {"n": GROUP, "max_tokens": case.max_tokens},
        "optimizer": {"lr": 1e-6},
        "trainer": {"threads": 1, "micro_batch_tokens": MICRO_TOKENS},
        "engine": {"slots": PROMPTS * GROUP, "threads": 1, "max_sequence_tokens": case.max_tokens + 64},
        "sgs": {"units": 1},
        "pipeline": {"mode": mode, "iterations": steps, "prompts_per_iteration": PROMPTS},
        "checkpoint": {"every": 1000},
    }
    path = directory / f"{case.size}-{case.mix}-{mode}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "services.cli", "run", str(path), "--out", str(directory / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT / "tests/bench", env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"streamrl failed:\n{done.stderr[-2000:]}")
    run = max((directory / "runs").glob(f"{case.size}-{case.mix}-{mode}-*"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if row["kind"] == "iteration"][2:]
    step = statistics.median(row["iteration_s"] for row in steady)
    return {
        "samples_per_s": PROMPTS * GROUP / step,
        "step_s": step,
        "generation_s": statistics.median(row["generation_s"] for row in steady),
        "train_s": statistics.median(row["train_s"] for row in steady),
        "tokens_per_sample": statistics.mean(row["length_mean"] for row in steady),
    }


def compare(case: Case, python: Path, rounds: int, modes: list[str], directory: Path) -> dict[str, float]:
    """Median ratios of samples/s over TRL, of runs that alternate."""
    speeds: dict[str, list[dict[str, Any]]] = {name: [] for name in ("trl", *modes)}
    peer_steps, our_steps = (5, 12) if case.size == "1m" else (3, 5)
    for _ in range(rounds):
        speeds["trl"].append(run_peer(case, python, peer_steps))
        for mode in modes:
            speeds[mode].append(run_ours(case, mode, our_steps, directory))
    for name, results in speeds.items():
        middle = {key: statistics.median(row[key] for row in results) for key in results[0] if key != "peer"}
        train = f"{middle['train_s']:9.2f}" if "train_s" in middle else " " * 9
        print(
            f"{case.size:>5} {case.mix:<10} {name:<7} {middle['samples_per_s']:10.1f} {middle['step_s']:8.2f} "
            f"{middle['generation_s']:8.2f} {train} {middle['tokens_per_sample']:8.1f}",
            flush=True,
        )
    peer = statistics.median(row["samples_per_s"] for row in speeds["trl"])
    return {mode: statistics.median(row["samples_per_s"] for row in speeds[mode]) / peer for mode in modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1m,14m")
    parser.add_argument("--lengths", default="uniform,long_tail")
    parser.add_argument("--modes", default="async", help="of streamrl, for example stream,async")
    parser.add_argument("--rounds", type=int, help="default: 3 for 1m, 1 for 14m")
    options = parser.parse_args()
    python = peer_python()
    print("model lengths    system   samples/s   step s    gen s   train s  tok/smp")
    modes = options.modes.split(",")
    ratios: dict[str, dict[str, dict[str, float]]] = {mix: {} for mix in options.lengths.split(",")}
    with tempfile.TemporaryDirectory() as name:
        for size in options.sizes.split(","):
            for mix in ratios:
                case = make_case(size, mix, Path(name))
                ratios[mix][size] = compare(case, python, options.rounds or DEFAULT_ROUNDS[size], modes, Path(name))
    print("\nsamples/s over TRL")
    for mix, by_size in ratios.items():
        for size, by_mode in by_size.items():
            print(f"{size:>5} {mix:<10} " + "   ".join(f"{mode} {ratio:.2f}x" for mode, ratio in by_mode.items()))
    worst = {
        f"ratio_{mix}": min(max(by_mode.values()) for by_mode in by_size.values()) for mix, by_size in ratios.items()
    }
    print(json.dumps({**worst, "by_model": ratios}))


if __name__ == "__main__":
    main()
