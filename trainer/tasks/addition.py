"""Repeated addition: `4+7*12=` asks for the last digit of 4 + 7 * 12, which is 8.

It can be guessed at once (`8`), or worked out by adding 7 twelve times while counting down, keeping last digits only:
`12:1;11:8;10:5; ... ;1:8`. Each step needs only the step before it, so a small model that writes the steps is right
where one that guesses is not. How long the worked answer is follows from the prompt, and is long-tailed: the number
of additions k has P(k) ~ 1/k.

Most demonstrations guess, so that is what a warmed-up model does. That writing the steps pays is left to
reinforcement learning to find out. Demonstrations, training and held-out prompts are disjoint thirds of all prompts, so
that no answer was seen before.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

STEPS = (2, 3, 7)
ADDITIONS = range(2, 25)
GUESSED = 0.6
"""Share of the demonstrations that answer at once."""

_PARTS = ("demonstrations", "training", "held out")


class Problem(NamedTuple):
    """The last digit of `start` + `step` * `additions`."""

    start: int
    step: int
    additions: int

    @property
    def prompt(self) -> str:
        return f"{self.start}+{self.step}*{self.additions}="

    @property
    def answer(self) -> str:
        return str((self.start + self.step * self.additions) % 10)

    @property
    def steps(self) -> str:
        """The worked answer: `additions left before this one:last digit after it`, separated by `;`."""
        digits = [(self.start + self.step * (done + 1)) % 10 for done in range(self.additions)]
        return ";".join(f"{self.additions - done}:{digit}" for done, digit in enumerate(digits))


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` demonstrations (prompt, completion) for supervised warm-up, `GUESSED` of them without the steps."""
    guess = random.Random(f"guess/{seed}")
    problems = islice(_problems(f"examples/{seed}", "demonstrations"), count)
    return [(p.prompt, p.answer if guess.random() < GUESSED else p.steps) for p in problems]


def rows(count: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """`count` rows {"prompt", "answer", "additions"}. Prompts repeat: there are 690 different ones in all."""
    problems = islice(_problems(f"rows/{seed}", "held out" if held_out else "training"), count)
    return [{"prompt": p.prompt, "answer": p.answer, "additions": p.additions} for p in problems]


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 when what follows the last `:` (all, when there is none) is the answer, else 0."""
    return float(completion.rpartition(":")[2] == answer)


def _problems(seed: str, part: str) -> Iterator[Problem]:
    by_additions: dict[int, list[Problem]] = defaultdict(list)
    for start in range(10):
        for step in STEPS:
            for additions in ADDITIONS:
                problem = Problem(start, step, additions)
                if _part(problem.prompt) == part:
                    by_additions[additions].append(problem)
    counts = sorted(by_additions)
    weights = [1 / additions for additions in counts]
    rng = random.Random(seed)
    while True:
        (additions,) = rng.choices(counts, weights)
        yield rng.choice(by_additions[additions])


def _part(prompt: str) -> str:
    """A property of the prompt alone, so that no choice of seeds lets a prompt into two parts."""
    return _PARTS[hashlib.blake2b(prompt.encode()).digest()[0] % len(_PARTS)]
