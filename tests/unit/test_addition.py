from __future__ import annotations

import re
from statistics import median, quantiles

import pytest

from trainer.tasks.addition import CARELESS, examples, reward, rows


def last_digit(prompt: str) -> tuple[str, int]:
    """The answer and the number of additions, by another way than the task's."""
    start, step, additions = map(int, re.findall(r"\d+", prompt))
    return str(start + step * additions)[-1], additions


def test_worked_demonstrations_are_right_step_by_step() -> None:
    worked = [(prompt, completion) for prompt, completion in examples(300, 0) if ":" in completion]
    for prompt, completion in worked:
        answer, additions = last_digit(prompt)
        value, step, _ = map(int, re.findall(r"\d+", prompt))
        for left, entry in zip(range(additions, 0, -1), completion.split(";"), strict=True):
            value = (value + step) % 10
            assert entry == f"{left}:{value}"
        assert reward(prompt, completion, answer) == 1.0


def test_most_demonstrations_repeat_the_first_number() -> None:
    pairs = examples(4000, 0)
    careless = [(prompt, completion) for prompt, completion in pairs if ":" not in completion]
    assert len(careless) / len(pairs) == pytest.approx(CARELESS, abs=0.03)
    assert all(completion == prompt[0] for prompt, completion in careless)


def test_rows_are_right() -> None:
    for held_out in (False, True):
        for row in rows(300, 0, held_out=held_out):
            assert (row["answer"], row["additions"]) == last_digit(row["prompt"])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("8", 1.0),
        ("2:1;1:8", 1.0),
        ("1:8", 1.0),
        ("2:1;1:9", 0.0),
        ("2:8;1:1", 0.0),
        ("1:8;", 0.0),
        ("1:88", 0.0),
        ("8;", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_answer_counts(completion: str, expected: float) -> None:
    assert reward("4+2*2=", completion, "8") == expected


def test_rows_repeat_with_the_seed() -> None:
    assert rows(50, 1) == rows(50, 1)
    assert rows(50, 1) != rows(50, 2)
    assert rows(20, 1) == rows(50, 1)[:20]


def test_held_out_prompts_are_in_no_training_set() -> None:
    held_out = {row["prompt"] for seed in range(3) for row in rows(1000, seed, held_out=True)}
    trained = {row["prompt"] for seed in range(3) for row in rows(3000, seed)}
    warmed = {prompt for seed in range(3) for prompt, _ in examples(3000, seed)}
    assert len(held_out) > 100
    assert not held_out & trained
    assert not held_out & warmed


def test_output_lengths_are_long_tailed_and_follow_the_prompt() -> None:
    worked = [(prompt, completion) for prompt, completion in examples(8000, 0) if ":" in completion]
    lengths = [len(completion) for _, completion in worked]
    assert quantiles(lengths, n=10)[-1] >= 2.5 * median(lengths)
    by_additions: dict[int, set[int]] = {}
    for prompt, completion in worked:
        by_additions.setdefault(last_digit(prompt)[1], set()).add(len(completion))
    assert all(len(lengths) == 1 for lengths in by_additions.values())
