"""One process, float64: any cut into micro-batches gives the same gradient, and the learning rate warms up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from training_cases import (
    AGGREGATIONS,
    make_config,
    make_samples,
    relative_error,
    slow_gradient,
    write_model,
)

from trainer.algorithms.aggregation import denominator
from trainer.backends.models import learning_rate
from trainer.learner import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@given(
    aggregation=st.sampled_from(AGGREGATIONS),
    order=st.permutations(range(8)),
    cuts=st.lists(st.integers(0, 8), max_size=4).map(sorted),
    seed=st.integers(0, 3),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_gives_the_gradient_of_one_batch(
    model: Path, scratch: Path, aggregation: str, order: list[int], cuts: list[int], seed: int
) -> None:
    config = make_config(model, algorithm={"aggregation": aggregation})
    samples = make_samples(8, seed)
    learner = Learner(config, model, 0, 1)
    share = 0.0
    for start, end in zip([0, *cuts], [*cuts, 8], strict=True):
        micro = [samples[i] for i in order[start:end]]
        learner.accumulate(micro)
        share += denominator(micro, config)
    learner.step(share)
    learner.save(scratch)
    moments = load_file(scratch / "optimizer.safetensors")
    expected = slow_gradient(model, config, samples)
    got = {name: moments[f"{name}.exp_avg"] / (1 - config.optimizer.betas[0]) for name in expected}
    assert relative_error(got, expected) < 1e-9


def test_clipping_is_by_the_norm_after_division(model: Path, scratch: Path) -> None:
    samples = make_samples(5)
    config = make_config(model, optimizer={"max_grad_norm": 1e-3})
    learner = Learner(config, model, 0, 1)
    learner.accumulate(samples)
    stats = learner.step(denominator(samples, config))
    learner.save(scratch)
    moments = load_file(scratch / "optimizer.safetensors")
    first = [tensor / (1 - config.optimizer.betas[0]) for name, tensor in moments.items() if name.endswith("exp_avg")]
    expected = slow_gradient(model, config, samples)
    norm = torch.sqrt(sum((g.square().sum() for g in expected.values()), torch.tensor(0.0)))
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-9)
    assert float(sum(g.square().sum() for g in first)) ** 0.5 == pytest.approx(1e-3, rel=1e-9)


def test_padding_and_row_order_do_not_change_log_probs(model: Path) -> None:
    samples = make_samples(6)
    learner = Learner(make_config(model), model, 0, 1)
    alone = sum(learner.accumulate([sample]).entropy_sum for sample in samples)
    assert learner.accumulate(samples[::-1]).entropy_sum == pytest.approx(alone, rel=1e-12)


def test_learning_rate_warms_up(model: Path) -> None:
    config = make_config(model, optimizer={"lr": 1.0, "warmup_steps": 4})
    assert [learning_rate(config, done) for done in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate(make_config(model, optimizer={"lr": 1.0}), 0) == 1.0
