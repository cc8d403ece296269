"""Whole runs end to end: modes, ranks, log-probs, gradients, evaluation, what a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import assert_whole_ledger, config_tree, finished, make_model, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(("mode", "ranks"), [("batch", 1), ("stream", 2), ("async", 2)])
def test_every_mode_trains_every_sample_once(place: Path, mode: str, ranks: int) -> None:
    config = write_config(
        place,
        pipeline={"iterations": 4, "prompts_per_iteration": 5, "mode": mode},
        trainer={"micro_batch_tokens": 256, "ranks": ranks},
        data={"train": config_tree(place)["data"]["train"], "eval": config_tree(place)["data"]["train"]},
        eval={"every": 2},
        checkpoint={"every": 2, "keep": 1},
    )
    run = finished(config)
    assert_whole_ledger(run, iterations=4, prompts=5, n=4)
    summary = run.summary()
    assert summary["finished"] and summary["mode"] == mode and summary["samples"] == 80
    assert summary["staleness_max"] == (1 if mode == "async" else 0)
    evals = [row for row in run.rows("metrics.jsonl") if row["kind"] == "eval"]
    assert [row["samples"] for row in evals] == [40, 40, 40]
    AutoModelForCausalLM.from_pretrained(run.directory / "model")
    AutoTokenizer.from_pretrained(run.directory / "model")
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == ["step-000004"]
    assert (run.directory / "report.html").stat().st_size > 10_000
    lanes = {row["lane"] for row in run.rows("timeline.jsonl")}
    assert {"trainer/0", "unit/unit-0", "unit/unit-1", "weights/unit-0"} <= lanes


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.7, "top_k": 5}]
)
def test_trainer_recomputes_what_the_engine_sampled_from(place: Path, sampling: dict[str, float]) -> None:
    config = write_config(
        place, sampling={"n": 4, "max_tokens": 24, **sampling}, pipeline={"iterations": 3, "prompts_per_iteration": 4}
    )
    rows = finished(config).iterations()
    assert len(rows) == 3
    # The third iteration runs on weights that went through two updates and two transfers.
    assert all(0 < row["logprob_gap_max"] < 1e-4 for row in rows)


def test_gradient_does_not_depend_on_mode_or_ranks(place: Path) -> None:
    norms, weights = [], []
    for number, (mode, ranks) in enumerate([("batch", 1), ("stream", 1), ("stream", 2)]):
        here = place / str(number)
        here.mkdir()
        (here / "model").symlink_to(place / "model")
        config = write_config(
            here,
            model={"path": str(here / "model"), "dtype": "float64"},
            pipeline={"iterations": 1, "prompts_per_iteration": 8, "mode": mode},
            trainer={"ranks": ranks, "micro_batch_tokens": 96},
        )
        run = finished(config)
        norms.append(run.iterations()[0]["grad_norm"])
        model = AutoModelForCausalLM.from_pretrained(run.directory / "model", dtype=torch.float64)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for norm in norms[1:]:
        assert norm == pytest.approx(norms[0], rel=1e-9)
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-7, atol=1e-9)


def test_several_steps_per_iteration(place: Path) -> None:
    config = write_config(
        place, pipeline={"iterations": 2, "prompts_per_iteration": 6, "steps_per_iteration": 3, "mode": "async"}
    )
    run = finished(config)
    assert_whole_ledger(run, iterations=2, prompts=6, n=4)


def test_sharded_backend(place: Path) -> None:
    config = write_config(place, trainer={"ranks": 2, "backend": "fsdp2", "micro_batch_tokens": 256})
    run = finished(config)
    assert_whole_ledger(run, iterations=3, prompts=6, n=4)
    assert all(row["logprob_gap_max"] < 1e-4 for row in run.iterations())


def test_a_reward_that_fails_leaves_samples_unscored(place: Path) -> None:
    config = write_config(place, reward={"fn": "flaky:reward"})
    (place / "flaky.py").write_text(
        "def reward(prompt, completion, answer):\n"
        "    if len(completion) % 3 == 0:\n"
        "        raise ValueError('no')\n"
        "    return float(len(completion) % 2)\n"
    )
    run = finished(config)
    ledger = run.rows("ledger.jsonl")
    unscored = [row for row in ledger if row["outcome"] == "unscored"]
    assert unscored and len(unscored) == run.summary()["samples_unscored"]
    assert_whole_ledger(run, iterations=3, prompts=6, n=4)
