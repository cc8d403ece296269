"""Backends in one process: weights, checkpoints across backends, guards, and training that only sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_cases import make_config, make_samples, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.errors import ModelError, TrainingError
from trainer.algorithms.aggregation import denominator
from trainer.learner import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(autouse=True, scope="module")
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def learner_on(backend: str, path: Path, **sections: Any) -> Learner:
    return Learner(make_config(path, trainer={"backend": backend, "device": "cpu"}, **sections), path, 0, 1)


def step(learner: Learner, model: Path, seed: int = 0) -> None:
    samples = make_samples(5, seed=seed)
    learner.accumulate(samples)
    learner.step(denominator(samples, make_config(model)))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_weights_are_those_of_the_state_dict(backend: str, model: Path) -> None:
    learner = learner_on(backend, model)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    names = [name for name, _ in expected.named_parameters()]
    weights = dict(learner.weights())
    assert list(weights) == names and "lm_head.weight" not in names
    assert all(torch.equal(weights[name], expected.state_dict()[name]) for name in names)
    metas = learner.tensor_metas()
    assert [(meta.name, meta.dtype, meta.shape, meta.nbytes) for meta in metas] == [
        (name, "float64", tuple(tensor.shape), tensor.nbytes) for name, tensor in weights.items()
    ]


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_a_checkpoint_loads_in_the_other_backend_and_in_transformers(
    first: str, second: str, model: Path, tmp_path: Path
) -> None:
    learner = learner_on(first, model)
    for seed in range(3):
        step(learner, model, seed)
    learner.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    weights = dict(learner.weights())
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.named_parameters())
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "1"
    other = learner_on(second, model)
    other.load(tmp_path)
    step(learner, model, 9)
    step(other, model, 9)
    continued = dict(other.weights())
    for name, tensor in learner.weights():
        assert torch.allclose(continued[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_bfloat16_trains_float32_masters_and_publishes_bfloat16(backend: str, model: Path, tmp_path: Path) -> None:
    learner = learner_on(backend, model, model={"path": model, "dtype": "bfloat16"})
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    step(learner, model)
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.weights())
    learner.save(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_zero_denominator_skips_the_update(backend: str, model: Path) -> None:
    learner = learner_on(backend, model)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.accumulate(make_samples(3))
    assert learner.step(0.0).skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights())
    stats = learner.accumulate([])
    assert (stats.loss_sum, stats.tokens) == (0.0, 0)
    # What was accumulated before the skip is gone.
    assert learner.step(1.0).grad_norm == 0.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_samples_of_zero_advantage_may_be_left_out_of_all_but_the_denominator(aggregation: str, model: Path) -> None:
    samples = [replace(s, advantage=0.0) if s.id.k % 2 else s for s in make_samples(7)]
    algorithm = {"aggregation": aggregation}
    total = denominator(samples, make_config(model, algorithm=algorithm))
    trained = []
    for micro in (samples, [sample for sample in samples if sample.advantage]):
        learner = learner_on("ddp", model, algorithm=algorithm)
        learner.accumulate(micro)
        learner.step(total)
        trained.append(dict(learner.weights()))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_gradient_that_is_not_finite_is_refused(backend: str, model: Path) -> None:
    learner = learner_on(backend, model)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    bad = replace(make_samples(1, cut=False)[0], advantage=-1e308)
    learner.accumulate([replace(bad, behaviour_logprobs=tuple(-700.0 for _ in bad.completion))])
    with pytest.raises(TrainingError, match="step 1: the gradient's norm is"):
        learner.step(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights())


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: cannot be loaded"):
        Learner(make_config(tmp_path / "nowhere"), tmp_path / "nowhere", 0, 1)


def test_emulated_training_needs_no_model_and_changes_its_weight(tmp_path: Path) -> None:
    emulated = {"seconds_per_token": 0.0, "seconds_per_step": 0.0}
    config = make_config(tmp_path, trainer={"backend": "emulated", "emulated": emulated})
    learner = Learner(config, tmp_path / "nowhere", 0, 1)
    stats = learner.accumulate(make_samples(3))
    assert stats.samples == 3 and stats.tokens == sum(len(s.completion) for s in make_samples(3))
    first = dict(learner.weights())
    learner.step(1.0)
    second = dict(learner.weights())
    assert list(first) == [meta.name for meta in learner.tensor_metas()]
    assert not torch.equal(*first.values(), *second.values())
    learner.save(tmp_path)
    again = Learner(config, tmp_path / "nowhere", 0, 1)
    again.load(tmp_path)
    assert torch.equal(*dict(again.weights()).values(), *second.values())
