from __future__ import annotations

from statistics import median, quantiles

import pytest

from trainer.tasks.addition import examples, reward, rows


def test_worked_examples_earn_the_reward() -> None:
    for prompt, completion in examples(200, 0):
        answer = sum(map(int, prompt[:-1].split("+")))
        assert reward(prompt, completion, answer) == 1.0
        first, *_rest = completion.split(";")
        assert first.split("=")[0] == "+".join(prompt[:-1].split("+")[:2])
        assert completion.count(";") == prompt.count("+") - 1


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("17+8=25;25+93=118", 1.0),
        ("118", 1.0),
        ("17+8=26;26+93=118", 1.0),
        ("17+8=25;25+93=119", 0.0),
        ("17+8=25;25+93=118;118", 0.0),
        ("=118=", 0.0),
        ("118=25", 0.0),
        (" 118", 0.0),
        ("0118", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_final_answer_counts(completion: str, expected: float) -> None:
    assert reward("17+8+93=", completion, 118) == expected


def test_rows_repeat_with_the_seed() -> None:
    assert rows(50, 1) == rows(50, 1)
    assert rows(50, 1) != rows(50, 2)
    assert rows(20, 1) == rows(50, 1)[:20]
    assert all(row["answer"] == eval(row["prompt"][:-1]) for row in rows(50, 1))


def test_held_out_prompts_are_in_no_training_set() -> None:
    held_out = {row["prompt"] for seed in range(3) for row in rows(1000, seed, held_out=True)}
    trained = {row["prompt"] for seed in range(3) for row in rows(3000, seed)}
    warmed = {prompt for seed in range(3) for prompt, _ in examples(3000, seed)}
    assert not held_out & trained
    assert not held_out & warmed


def test_output_lengths_are_long_tailed_and_follow_the_prompt() -> None:
    lengths = [len(completion) for _, completion in examples(4000, 0)]
    assert quantiles(lengths, n=10)[-1] >= 3 * median(lengths)
    by_terms: dict[int, list[int]] = {}
    for prompt, completion in examples(4000, 0):
        by_terms.setdefault(prompt.count("+"), []).append(len(completion))
    means = [sum(by_terms[terms]) / len(by_terms[terms]) for terms in sorted(by_terms)]
    assert means == sorted(means)
    assert len(means) == 9
