"""Whole runs of the command line for tests: a tiny model, configurations, processes, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.config import ModelInit
from trainer.tiny_model import build_model, build_tokenizer

DEADLINE_S = 240.0
TASKS = '''
import hashlib

def reward(prompt, completion, answer):
    """Any text has some reward, and siblings differ."""
    return int.from_bytes(hashlib.blake2b(completion.encode(), digest_size=4).digest(), "little") / 2**32
'''


def make_model(directory: Path) -> Path:
    """An untrained model that ends a completion at any step with a chance of about one in fifty."""
    init = ModelInit(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, max_positions=256)
    tokenizer = build_tokenizer(init.alphabet)
    build_model(init, tokenizer, seed=1).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def config_tree(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration that runs in seconds; `sections` override single keys."""
    rows = directory / "prompts.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)))
        (directory / "run_tasks.py").write_text(TASKS)
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "t"},
        "model": {"path": str(directory / "model")},
        "data": {"train": {"path": str(rows)}},
        "reward": {"fn": "run_tasks:reward"},
        "sampling": {"n": 4, "max_tokens": 24},
        "optimizer": {"lr": 1e-3},
        "trainer": {"micro_batch_tokens": 256},
        "engine": {"slots": 16, "max_sequence_tokens": 64},
        "pipeline": {"iterations": 3, "prompts_per_iteration": 6},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


def write_config(directory: Path, **sections: dict[str, Any]) -> Path:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config_tree(directory, **sections)))
    return path


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
    return {**kept, "PYTHONSAFEPATH": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "services.cli", *map(str, arguments)]


@dataclass
class Running:
    """One `streamrl run` in a process of its own."""

    process: subprocess.Popen[str]
    out: Path

    @property
    def directory(self) -> Path:
        return next(path for path in self.out.iterdir() if path.is_dir())

    def log(self, name: str) -> str:
        path = self.directory / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def iterations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows("metrics.jsonl") if row["kind"] == "iteration"]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def find(self, *words: str) -> list[psutil.Process]:
        """The run's processes whose command line has all `words`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it printed."""
        _out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.process.communicate()[1]}"
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.05)


@contextmanager
def started(config: Path, *arguments: str) -> Iterator[Running]:
    """`streamrl run CONFIG` beside it; killed with all it started when the block ends first."""
    out = config.parent / "runs"
    process = subprocess.Popen(
        command("run", config, "--out", out, *arguments),
        cwd=config.parent,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process, out)
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                try:
                    each.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
        process.communicate()


def finished(config: Path, *arguments: str) -> Running:
    """A whole run that must end well."""
    with started(config, *arguments) as run:
        code, err = run.wait()
    assert code == 0, f"{err}\n{run.log('trainer')[-3000:]}"
    return run


def assert_whole_ledger(run: Running, iterations: int, prompts: int, n: int) -> None:
    """Every sample id of every iteration stands in the ledger once."""
    ids = Counter((row["prompt_id"], row["k"]) for row in run.rows("ledger.jsonl"))
    assert set(ids) == {(f"train/{p}", k) for p in range(iterations * prompts) for k in range(n)}
    assert set(ids.values()) == {1}
    summary = run.summary()
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
