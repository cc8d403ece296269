"""What comes before a run: everything that can be wrong is checked, and the quickstart's small model is made.

`python -m trainer.prepare CONFIG [--set a.b=c ..]` prints JSON lines: `{"event": "warmup", "step", "steps", "loss"}`
while it trains, then `{"event": "ready", "model": directory, "cached": bool}`, or `{"event": "error", "message"}` and
the error's exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from services.config import Config, load_config
from services.errors import ConfigError, StreamRLError
from services.processes import die_with_parent
from trainer import tiny_model
from trainer.data.prompts import PromptSet, TokenLimit, stop_token_ids, token_limit
from trainer.data.sources import Row, load_rows
from trainer.model_files import check_model_files
from trainer.plugins import load_function
from trainer.rewards.scorer import Scorer

logger = logging.getLogger(__name__)

Progress = Callable[[dict[str, Any]], None]
MARKER = "warmup.json"
PROGRESS_EVENTS = 100


def prepare(config: Config, progress: Progress) -> Path:
    """Check all of `config` that can be checked before training, then return the model's directory.

    With `model.init` the directory is made by warm-up, or found in `warmup.cache`. `progress` gets the events named
    above. Starts reward workers for the check, so it must not be called from a running event loop. Raises the
    `UsageError` of whatever is wrong.
    """
    rows = load_rows(config.data.train)
    held_out = load_rows(config.data.eval) if config.data.eval is not None else []
    _warn_of_overlap(rows, held_out)
    asyncio.run(_check_reward(config))
    if config.model.path is not None:
        directory = config.model.path.expanduser()
        tokenizer, max_positions = check_model_files(directory)
        check_prompts(config, rows, held_out, tokenizer, max_positions)
        cached = False
    else:
        assert config.model.init is not None
        tokenizer = tiny_model.build_tokenizer(config.model.init.alphabet)
        check_prompts(config, rows, held_out, tokenizer, config.model.init.max_positions)
        directory, cached = _warmed_up(config, tokenizer, progress)
    progress({"event": "ready", "model": str(directory), "cached": cached})
    return directory


def check_prompts(
    config: Config, rows: list[Row], held_out: list[Row], tokenizer: Any, max_positions: int | None
) -> None:
    """Raises `PromptTooLongError`, `DataError` or `ConfigError` for a prompt or stop text that cannot be used."""
    stop_token_ids(tokenizer, config.sampling.stop)
    limit: TokenLimit = token_limit(config, max_positions)
    PromptSet(rows, tokenizer, config.data.train, config.sampling.max_tokens, limit)
    if config.data.eval is not None:
        max_tokens = config.eval.max_tokens or config.sampling.max_tokens
        PromptSet(held_out, tokenizer, config.data.eval, max_tokens, limit)


async def _check_reward(config: Config) -> None:
    scorer = Scorer(config.reward.model_copy(update={"workers": 1}))
    await scorer.start()
    await scorer.close()


def _warn_of_overlap(rows: Iterable[Row], held_out: list[Row]) -> None:
    trained = {str(row.prompt) for row in rows}
    shared = [row for row in held_out if str(row.prompt) in trained]
    if shared:
        logger.warning(
            "%d of %d data.eval prompts are in data.train as well, the first is %s; accuracy on them is not held-out",
            len(shared),
            len(held_out),
            shared[0].where,
        )


def _warmed_up(config: Config, tokenizer: Any, progress: Progress) -> tuple[Path, bool]:
    assert config.model.init is not None and config.warmup is not None
    warmup = config.warmup
    function = load_function(warmup.examples, "warmup.examples")
    cache = warmup.cache.expanduser()
    directory = cache / f"warmup-{_cache_key(config, function)}"
    if (directory / MARKER).exists():
        return directory, True
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".warmup-", dir=cache))
    except OSError as error:
        raise ConfigError(f"warmup.cache: {cache}: {error.strerror}") from None
    try:
        model = _train(config, function, tokenizer, progress)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / MARKER).write_text(json.dumps({"steps": warmup.steps, "seed": config.run.seed}))
        _move_into_place(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory, False


def _train(config: Config, function: Callable[..., Any], tokenizer: Any, progress: Progress) -> Any:
    assert config.model.init is not None and config.warmup is not None
    warmup, init, seed = config.warmup, config.model.init, config.run.seed
    examples = tiny_model.encode_examples(_examples(function, warmup.examples, warmup.count, seed), tokenizer, init)
    every = max(1, warmup.steps // PROGRESS_EVENTS)

    def report(step: int, loss: float) -> None:
        if step % every == 0 or step == warmup.steps:
            progress({"event": "warmup", "step": step, "steps": warmup.steps, "loss": loss})

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # nothing else of the run computes yet
    model = tiny_model.build_model(init, tokenizer, seed)
    tiny_model.warm_up(model, examples, warmup, seed, report)
    return model


def _examples(function: Callable[..., Any], spec: str, count: int, seed: int) -> list[tuple[str, str]]:
    try:
        examples = list(function(count, seed))
    except Exception as error:
        raise ConfigError(f"warmup.examples: {spec} failed: {type(error).__name__}: {error}") from error
    if not examples:
        raise ConfigError(f"warmup.examples: {spec} returned no examples")
    for index, example in enumerate(examples):
        if len(example) != 2 or not all(isinstance(text, str) for text in example):
            raise ConfigError(f"warmup.examples: {spec}: example {index} is not a pair (prompt text, completion text)")
    return examples


def _cache_key(config: Config, function: Callable[..., Any]) -> str:
    """Changes with whatever the warm-up's result depends on: settings, seed, the examples' and the trainer's code."""
    assert config.model.init is not None and config.warmup is not None
    content = {
        "init": config.model.init.model_dump(mode="json"),
        "warmup": config.warmup.model_dump(mode="json", exclude={"cache"}),
        "seed": config.run.seed,
        "examples": _source(function),
        "training": inspect.getsource(tiny_model),
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=10).hexdigest()


def _source(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    try:
        return inspect.getsource(module if module is not None else function)
    except (OSError, TypeError):  # a compiled module has no source: its settings alone identify it
        return repr(getattr(function, "__qualname__", type(function)))


def _move_into_place(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError:
        if not (directory / MARKER).exists():  # left by an interrupted copy; a complete one is another process's
            shutil.rmtree(directory)
            scratch.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    lines = sys.stdout

    def emit(event: dict[str, Any]) -> None:
        lines.write(json.dumps(event) + "\n")
        lines.flush()

    try:
        with contextlib.redirect_stdout(sys.stderr):  # users' modules and libraries may print
            prepare(load_config(arguments.config, arguments.overrides), emit)
    except StreamRLError as error:
        emit({"event": "error", "message": str(error)})
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
