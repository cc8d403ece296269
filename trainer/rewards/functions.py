"""The reward functions behind `reward.kind`, all with one signature. Imports nothing heavy until it is asked for."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from services.errors import ConfigError
from trainer.plugins import load_function

# (prompt text, completion text, the row's answer, the row's other values) -> score
Reward = Callable[[str, str, Any, dict[str, Any]], Any]


def load_reward(config: dict[str, Any]) -> Reward:
    """The function for a `RewardConfig` as JSON data; raises `ConfigError` when it cannot be imported."""
    kind = config["kind"]
    if kind == "function":
        function = load_function(config["fn"], "reward.fn")
        return lambda prompt, completion, answer, extra: function(prompt, completion, answer)
    if kind == "math_verify":
        return _math_verify()
    if kind == "reasoning_gym":
        return _reasoning_gym()
    raise ConfigError(f"reward.kind: unknown kind {kind!r}")


def _math_verify() -> Reward:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it has no timeout of its own

    @functools.lru_cache(maxsize=4096)
    def parsed_gold(gold: str) -> list[Any]:
        found = parse(gold, parsing_timeout=None) or parse(f"${gold}$", parsing_timeout=None)
        if not found:
            raise ValueError(f"math-verify finds no expression in the row's answer {gold!r}")
        return found

    def reward(prompt: str, completion: str, answer: Any, extra: dict[str, Any]) -> float:
        gold = parsed_gold(str(answer))
        # The worker is killed past the deadline; the library's own timeouts need the main thread's alarm.
        return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))

    return reward


def _reasoning_gym() -> Reward:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    @functools.lru_cache(maxsize=64)
    def dataset(spec: str) -> Any:
        made = json.loads(spec)
        return reasoning_gym.create_dataset(made["name"], size=made["size"], seed=made["seed"], **made["options"])

    def reward(prompt: str, completion: str, answer: Any, extra: dict[str, Any]) -> float:
        text = extract_answer(completion)
        if text is None:
            text = completion.strip()
        made = extra.get("reasoning_gym")
        if made is not None:  # entries hold tuples and integer keys, which JSON would change: make the entry again
            scorer = dataset(json.dumps(made, sort_keys=True))
            return scorer.score_answer(answer=text, entry=scorer[extra["index"]])
        entry = {"question": prompt, "answer": answer, "metadata": extra["metadata"]}
        return reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=text, entry=entry)

    return reward
