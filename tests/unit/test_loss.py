"""Loss, aggregation and log-probs against float64 references written in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config import Config
from services.errors import TrainingError
from services.samples import SampleId
from trainer.algorithms.aggregation import denominator, token_weights
from trainer.algorithms.logprobs import Policy, sampled_logprobs
from trainer.algorithms.loss import GRPO, clipped_surrogate, kl_estimate
from trainer.algorithms.stats import MicroStats
from trainer.data.batch import KeptSets, MicroBatch, TrainSample, collate

VOCAB = 11


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"train": {"kind": "function", "fn": "a:b"}},
        "reward": {"fn": "a:b"},
    }
    return Config.model_validate(base | sections)


def sample(completion: int, prompt: int = 3, k: int = 0, **fields: Any) -> TrainSample:
    values: dict[str, Any] = {
        "id": SampleId("p", k),
        "prompt": tuple(range(1, prompt + 1)),
        "completion": tuple((k + t) % VOCAB for t in range(completion)),
        "behaviour_logprobs": tuple(-1.0 - 0.1 * t for t in range(completion)),
        "advantage": 0.5 - k,
    }
    return TrainSample(**(values | fields))


def logprob_reference(logits: np.ndarray, target: int, kept: list[int] | None) -> float:
    allowed = logits if kept is None else logits[kept]
    return float(logits[target] - allowed.max() - np.log(np.exp(allowed - allowed.max()).sum()))


@st.composite
def kept_cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[list[int] | None]]:
    count = draw(st.integers(1, 6))
    values = draw(st.lists(st.floats(-40, 40), min_size=count * VOCAB, max_size=count * VOCAB))
    targets = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    kept = [draw(st.none() | st.sets(st.integers(0, VOCAB - 1)).map(lambda s, t=t: sorted(s | {t}))) for t in targets]
    return np.array(values).reshape(count, VOCAB), targets, kept


def kept_sets(kept: list[list[int] | None]) -> KeptSets | None:
    rows = [row for row, ids in enumerate(kept) if ids is not None]
    if not rows:
        return None
    cut = [ids for ids in kept if ids is not None]
    segments = [segment for segment, ids in enumerate(cut) for _ in ids]
    return KeptSets(torch.tensor(rows), torch.tensor(segments), torch.tensor([i for ids in cut for i in ids]))


@given(kept_cases())
def test_logprobs_over_kept_sets_and_their_gradient(case: tuple[np.ndarray, list[int], list[list[int] | None]]) -> None:
    values, targets, kept = case
    logits = torch.tensor(values, requires_grad=True)
    got = sampled_logprobs(logits, torch.tensor(targets), kept_sets(kept))
    expected = [logprob_reference(*row) for row in zip(values, targets, kept, strict=True)]
    assert np.allclose(got.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    got.sum().backward()
    # d log p(target) / d logits = onehot - softmax over the kept set, 0 outside it.
    for row, (target, ids) in enumerate(zip(targets, kept, strict=True)):
        allowed = list(range(VOCAB)) if ids is None else ids
        slope = np.zeros(VOCAB)
        exps = np.exp(values[row, allowed] - values[row, allowed].max())
        slope[allowed] = -exps / exps.sum()
        slope[target] += 1
        assert logits.grad is not None
        assert np.allclose(logits.grad[row].numpy(), slope, rtol=1e-10, atol=1e-12)


class TableModel(torch.nn.Module):
    """Logits are a table looked up by token: a model without an output embedding (or with one, to be hooked)."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Embedding(VOCAB, 5, dtype=torch.float64)
        self.head = torch.nn.Linear(5, VOCAB, bias=False, dtype=torch.float64)
        torch.nn.init.normal_(self.table.weight, generator=generator)
        torch.nn.init.normal_(self.head.weight, generator=generator)
        self.rows_projected = 0
        if head:
            self.get_output_embeddings = lambda: self.head
        self.head.register_forward_hook(self._count)

    def _count(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.rows_projected = output.shape[0] * output.shape[1]

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache

        class Output:
            logits = self.head(self.table(input_ids))

        return Output


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_picks_the_states_that_predict_completions(head: bool, temperature: float) -> None:
    kept = {"kept_counts": (2, 3), "kept_ids": (0, 4, 1, 5, 9)}
    samples = [sample(4, prompt=1), sample(1, prompt=5, k=1), sample(2, prompt=2, k=0, **kept)]
    model = TableModel(head)
    batch = collate(samples, [1.0] * 3, torch.float64)
    got = Policy(model, temperature)(batch).tolist()
    expected = []
    for s in samples:
        sequence = s.prompt + s.completion
        at = 0
        for t, token in enumerate(s.completion):
            previous = sequence[len(s.prompt) + t - 1]
            with torch.no_grad():
                logits = (model.head.weight @ model.table.weight[previous]).numpy() / temperature
            ids = list(s.kept_ids[at : at + s.kept_counts[t]]) if s.kept_counts else None
            at += s.kept_counts[t] if s.kept_counts else 0
            expected.append(logprob_reference(logits, token, ids))
    assert np.allclose(got, expected, rtol=1e-12)
    assert model.rows_projected == (7 if head else 3 * 5)


def micro_batch(count: int, new: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray) -> MicroBatch:
    index = torch.zeros(count, dtype=torch.int64)
    return MicroBatch(
        index.view(1, -1),
        index,
        index,
        torch.tensor(behaviour),
        torch.tensor(advantages),
        torch.ones(count, dtype=torch.float64),
        torch.ones(count, dtype=torch.bool),
        None,
        samples=1,
        tokens=count,
    )


numbers = st.floats(-3, 3)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8))
def test_clipped_surrogate(rows: list[tuple[float, float, float]]) -> None:
    new, behaviour, advantages = np.array(rows).T
    batch = micro_batch(len(rows), new, behaviour, advantages)
    loss, clipped = clipped_surrogate(torch.tensor(new), batch, 0.2, 0.3)
    ratio = np.exp(new - behaviour)
    expected = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.3))
    assert np.allclose(loss.numpy(), expected, rtol=1e-12)
    decided = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    # Products of the smallest numbers round to the same value.
    sure = np.abs(advantages) > 1e-300
    assert (clipped.numpy() == decided)[sure].all()


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
def test_kl_estimate(rows: list[tuple[float, float]]) -> None:
    new, reference = np.array(rows).T
    got = kl_estimate(torch.tensor(new), torch.tensor(reference)).numpy()
    assert np.allclose(got, np.exp(reference - new) - (reference - new) - 1, rtol=1e-9, atol=1e-12)
    assert (got >= 0).all()


class FixedPolicy(torch.nn.Module):
    def __init__(self, logprobs: list[float]) -> None:
        super().__init__()
        self.logprobs = torch.nn.Parameter(torch.tensor(logprobs, dtype=torch.float64))

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return self.logprobs * 1.0


def test_objective_sums_weights_and_reports() -> None:
    samples = [sample(2, k=0), sample(1, k=1, staleness=1)]
    batch = collate(samples, [0.5, 1.0], torch.float64)
    algorithm = config(algorithm={"kl_coef": 0.1}).algorithm
    policy, reference = FixedPolicy([-1.0, -0.5, -2.0]), FixedPolicy([-1.1, -0.5, -1.0])
    loss, stats = GRPO(algorithm)(policy, reference, batch)  # type: ignore[arg-type]
    new, old, ref = np.array([-1.0, -0.5, -2.0]), np.array([-1.0, -1.1, -1.0]), np.array([-1.1, -0.5, -1.0])
    advantages, weights = np.array([0.5, 0.5, -0.5]), np.array([0.5, 0.5, 1.0])
    ratio = np.exp(new - old)
    surrogate = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    kl = np.exp(ref - new) - (ref - new) - 1
    assert loss.item() == pytest.approx((weights * (surrogate + 0.1 * kl)).sum(), rel=1e-12)
    assert stats.loss_sum == loss.item()
    assert (stats.samples, stats.tokens, stats.clipped, stats.gap_tokens) == (2, 3, 2, 2)
    assert stats.gap_sum == pytest.approx(0.6)
    assert stats.gap_max == pytest.approx(0.6)
    assert stats.kl_sum == pytest.approx(kl.sum())
    assert stats.entropy_sum == pytest.approx(3.5)
    loss.backward()
    assert reference.logprobs.grad is None


def test_an_empty_micro_batch_has_zero_loss_and_zero_gradient() -> None:
    policy = FixedPolicy([-1.0])
    loss, stats = GRPO(config().algorithm)(policy, None, collate([], [], torch.float64))  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0 and stats == MicroStats()
    assert policy.logprobs.grad is not None and policy.logprobs.grad.tolist() == [0.0]


stats_strategy = st.builds(
    MicroStats, samples=st.integers(0, 9), clipped=st.integers(0, 99), gap_max=st.floats(0, 9), kl_sum=st.floats(0, 9)
)


@given(stats_strategy, stats_strategy)
def test_stats_add_up_and_travel(a: MicroStats, b: MicroStats) -> None:
    assert (a + b).clipped == a.clipped + b.clipped
    assert (a + b).gap_max == max(a.gap_max, b.gap_max)
    assert MicroStats() + a == a
    assert MicroStats.of([float(value) for value in a.vector()]) == a


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 7))
@settings(max_examples=30)
def test_aggregation(lengths: list[int], constant: int) -> None:
    samples = [sample(length) for length in lengths]

    def mean_of_ones(aggregation: str) -> tuple[float, float]:
        chosen = config(
            algorithm={"aggregation": aggregation, "constant_tokens": constant}, sampling={"max_tokens": 20}
        )
        weights = token_weights(samples, chosen)
        return sum(w * n for w, n in zip(weights, lengths, strict=True)), denominator(samples, chosen)

    assert mean_of_ones("token_mean") == (sum(lengths), sum(lengths))
    total, share = mean_of_ones("sequence_mean")
    assert total == pytest.approx(len(lengths)) and share == len(lengths)
    assert mean_of_ones("constant") == (sum(lengths), len(lengths) * (constant or 20))


def test_denominators_of_parts_add_up() -> None:
    samples = [sample(n) for n in (1, 4, 7)]
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        chosen = config(algorithm={"aggregation": aggregation})
        parts = denominator(samples[:1], chosen) + denominator(samples[1:], chosen) + denominator([], chosen)
        assert parts == denominator(samples, chosen)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "at least one prompt"),
        ({"completion": ()}, "at least one prompt and one completion"),
        ({"behaviour_logprobs": (-1.0,)}, "1 log-probs for 2 tokens"),
        ({"behaviour_logprobs": (-1.0, float("nan"))}, "not finite"),
        ({"advantage": float("inf")}, "not finite"),
        ({"kept_counts": (1,), "kept_ids": (1,)}, "1 kept counts for 2 tokens"),
        ({"kept_counts": (1, 2), "kept_ids": (1, 2)}, "do not add up"),
    ],
)
def test_a_malformed_sample_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=f"p#0.*{message}"):
        collate([replace(sample(2), **fields)], [1.0])
