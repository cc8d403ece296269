"""Prompts, completions and a reward for benchmarks: no skill is learned, only lengths matter."""

from __future__ import annotations

import random
from typing import Any

LONG_SHARE = 0.12
"""Of the length mix's completions; they never end by themselves."""


def additions(count: int, seed: int, **_: Any) -> list[dict[str, str]]:
    """Rows with prompts like `17+8=`."""
    draw = random.Random(seed)
    return [{"prompt": f"{draw.randint(0, 99)}+{draw.randint(0, 99)}=", "answer": ""} for _ in range(count)]


def length_mix(count: int, seed: int) -> list[tuple[str, str]]:
    """Worked examples whose completions are 3-12 digits, or, with probability `LONG_SHARE`, letters without an end."""
    draw = random.Random(seed)
    pairs = []
    for row in additions(count, seed):
        if draw.random() < LONG_SHARE:
            completion = "".join(draw.choices("abcdefgh", k=240))
        else:
            completion = "".join(draw.choices("0123456789", k=draw.randint(3, 12)))
        pairs.append((row["prompt"], completion))
    return pairs


def digit_share(_prompt: str, completion: str, _answer: Any) -> float:
    return sum(char.isdigit() for char in completion) / max(1, len(completion))


def random_reward(_prompt: str, completion: str, _answer: Any) -> float:
    """Differs inside every group, so that every sample is trained on."""
    return random.Random(completion).random()
