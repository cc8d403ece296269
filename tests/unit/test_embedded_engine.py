"""The embedded engine on tiny random models: what it samples, and what weights do to it.

Seeds give the same tokens whatever the batch: the float32 logits of two batch shapes differ by about 1e-6, so that
only a uniform so close to a boundary of the CDF could change a token; none of the seeds here is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from services.config import Config
from services.errors import EngineError, ModelError, WeightsError
from services.samples import FinishReason, Sample, SampleId, SamplingParams, VersionSpan
from services.transport.manifest import Manifest, layout
from services.unit.engines.base import SampleRequest
from services.unit.engines.embedded import EmbeddedEngine

torch.set_num_threads(1)

VOCABULARY, POSITIONS = 40, 96
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2-gqa-tied": lambda: Qwen2Config(**SMALL | {"num_key_value_heads": 2}, tie_word_embeddings=True),
    "llama-gqa-biased": lambda: LlamaConfig(
        **SMALL | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5
    ),
    "qwen3": lambda: Qwen3Config(**SMALL | {"num_key_value_heads": 2}, head_dim=16),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def make_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        make_model(config()).save_pretrained(root / name)
    return {name: root / name for name in FAMILIES}


def config_for(path: Path, slots: int = 8, dtype: str = "float32", positions: int = POSITIONS) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "dtype": dtype},
            "data": {"train": {"path": "unused.jsonl"}},
            "reward": {"fn": "unused:fn"},
            "sampling": {"max_tokens": 32},
            "engine": {"slots": slots, "max_sequence_tokens": positions, "device": "cpu"},
        }
    )


def with_engine(
    path: Path, use: Callable[[EmbeddedEngine], Awaitable[Any]], slots: int = 8, generic: bool = False
) -> Any:
    async def run() -> Any:
        engine = EmbeddedEngine(config_for(path, slots), generic=generic)
        await engine.start()
        try:
            return await asyncio.wait_for(use(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(run())


def request(k: int, prompt: tuple[int, ...], max_tokens: int = 12, **params: Any) -> SampleRequest:
    return SampleRequest(
        SampleId(f"p{prompt[:3]}", k), prompt, SamplingParams(max_tokens, **params), seed=1000 + k, queued_at=1.0
    )


def mixed(count: int, seed: int = 0, **params: Any) -> list[SampleRequest]:
    """Prompts of 1-20 tokens, about three siblings each, 1-30 tokens at most."""
    rng = random.Random(seed)
    requests: list[SampleRequest] = []
    while len(requests) < count:
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
        for _ in range(min(rng.randint(1, 5), count - len(requests))):
            requests.append(request(len(requests), prompt, rng.randint(1, 30), **params))
    return requests


async def gather(engine: EmbeddedEngine, requests: list[SampleRequest]) -> list[Sample]:
    return list(await asyncio.gather(*[engine.submit(one) for one in requests]))


def recompute(model: Any, asked: SampleRequest, sample: Sample) -> torch.Tensor:
    """The sample's log-probs from one plain forward over prompt + completion."""
    tokens = torch.tensor([asked.prompt + sample.token_ids])
    logits = model(tokens).logits[0, len(asked.prompt) - 1 : -1].double()
    logits = logits / (asked.params.temperature or 1.0)
    if sample.kept_counts:
        mask = torch.full_like(logits, -torch.inf)
        kept = iter(sample.kept_ids)
        for step, count in enumerate(sample.kept_counts):
            mask[step, [next(kept) for _ in range(count)]] = 0
        logits = logits + mask
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def assert_logprobs(model: Any, requests: list[SampleRequest], samples: list[Sample]) -> None:
    for asked, sample in zip(requests, samples, strict=True):
        assert sample.id == asked.id
        difference = (recompute(model, asked, sample) - torch.tensor(sample.logprobs)).abs().max()
        assert difference < 1e-4, f"{sample.id}: {difference}"


def body_of(model: Any, version: int, dtype: torch.dtype = torch.float32) -> tuple[Manifest, memoryview]:
    tensors = [(name, p.detach().to(dtype).contiguous()) for name, p in model.named_parameters()]
    metas = layout((n, str(dtype).removeprefix("torch."), tuple(t.shape), t.nbytes) for n, t in tensors)
    body = bytearray(b"".join(t.view(torch.uint8).numpy().tobytes() for _, t in tensors))
    return Manifest(version, "t", tuple(metas)), memoryview(body)


async def load(engine: EmbeddedEngine, model: Any, version: int, dtype: torch.dtype = torch.float32) -> None:
    await engine.stage(*body_of(model, version, dtype))
    assert await engine.commit(version) >= 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize("generic", [False, True], ids=["lean", "generic"])
def test_logprobs_are_those_of_a_plain_forward(
    directories: dict[str, Path], params: dict[str, Any], generic: bool
) -> None:
    requests = mixed(20, **params)
    samples = with_engine(directories["qwen2"], lambda engine: gather(engine, requests), generic=generic)
    model = AutoModelForCausalLM.from_pretrained(directories["qwen2"])
    assert_logprobs(model, requests, samples)
    for asked, sample in zip(requests, samples, strict=True):
        assert bool(sample.kept_counts) == asked.params.truncates
        assert sum(sample.kept_counts) == len(sample.kept_ids)
        assert len(sample.token_ids) == asked.params.max_tokens
        assert sample.spans == (VersionSpan(-1, 0, len(sample.token_ids)),)
        assert 1.0 == sample.timings.queued_at < sample.timings.started_at <= sample.timings.finished_at


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_and_generic_agree_on_every_family(directories: dict[str, Path], family: str) -> None:
    requests = mixed(16, seed=3)
    chosen = with_engine(directories[family], lambda engine: gather(engine, requests))
    generic = with_engine(directories[family], lambda engine: gather(engine, requests), generic=True)
    model = AutoModelForCausalLM.from_pretrained(directories[family])
    assert_logprobs(model, requests, chosen)
    assert_logprobs(model, requests, generic)
    assert [s.token_ids for s in chosen] == [s.token_ids for s in generic]


def test_greedy_is_the_greedy_of_transformers(directories: dict[str, Path]) -> None:
    requests = [request(k, (k, 3, 7, 1 + k), 20, temperature=0.0) for k in range(6)]
    samples = with_engine(directories["llama-gqa-biased"], lambda engine: gather(engine, requests))
    model = AutoModelForCausalLM.from_pretrained(directories["llama-gqa-biased"])
    for asked, sample in zip(requests, samples, strict=True):
        tokens = torch.tensor([asked.prompt])
        model.generation_config.eos_token_id = None
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert output[0, len(asked.prompt) :].tolist() == list(sample.token_ids)


@pytest.mark.parametrize("generic", [False, True], ids=["lean", "generic"])
def test_a_seed_gives_one_sample_whatever_shares_its_batch(directories: dict[str, Path], generic: bool) -> None:
    requests = mixed(32, seed=5)
    path = directories["qwen2-gqa-tied"]

    async def one_by_one(engine: EmbeddedEngine) -> list[Sample]:
        return [await engine.submit(one) for one in requests]

    alone = with_engine(path, one_by_one, slots=1, generic=generic)
    together = with_engine(path, lambda engine: gather(engine, requests), slots=32, generic=generic)
    backwards = with_engine(path, lambda engine: gather(engine, requests[::-1]), slots=7, generic=generic)
    assert [s.token_ids for s in alone] == [s.token_ids for s in together]
    assert [s.token_ids for s in alone] == [s.token_ids for s in backwards[::-1]]


def test_random_arrivals_and_cancels_change_no_other_sample(directories: dict[str, Path]) -> None:
    requests = mixed(60, seed=9)
    rng = random.Random(1)

    async def storm(engine: EmbeddedEngine) -> list[Sample | BaseException]:
        futures = []
        for one in requests:
            futures.append(engine.submit(one))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.2:
                engine.cancel(rng.choice(requests[: len(futures)]).id)
        engine.cancel(SampleId("unknown", 0))
        return await asyncio.gather(*futures, return_exceptions=True)

    outcomes = with_engine(directories["qwen2"], storm, slots=6)
    reference = with_engine(directories["qwen2"], lambda engine: gather(engine, requests), slots=1)
    cancelled = [outcome for outcome in outcomes if isinstance(outcome, asyncio.CancelledError)]
    assert 0 < len(cancelled) < len(requests)
    for outcome, expected in zip(outcomes, reference, strict=True):
        if not isinstance(outcome, asyncio.CancelledError):
            assert isinstance(outcome, Sample), outcome
            assert outcome.token_ids == expected.token_ids


def test_a_cancelled_id_may_come_again_at_once(directories: dict[str, Path]) -> None:
    asked = request(0, (1, 2, 3), 40)

    async def again(engine: EmbeddedEngine) -> Sample:
        first = engine.submit(asked)
        engine.cancel(asked.id)
        second = engine.submit(asked)
        assert first.cancelled()
        return await second

    assert len(with_engine(directories["qwen2"], again).token_ids) == 40


def test_stop_tokens_end_a_sample_and_belong_to_it(directories: dict[str, Path]) -> None:
    free = mixed(12, seed=2)
    unstopped = with_engine(directories["qwen2"], lambda engine: gather(engine, free))
    stops = (3, 7, 11, 19)
    stopping = [
        SampleRequest(one.id, one.prompt, SamplingParams(one.params.max_tokens, stop_token_ids=stops), one.seed)
        for one in free
    ]
    samples = with_engine(directories["qwen2"], lambda engine: gather(engine, stopping))
    for sample, whole in zip(samples, unstopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in stops]
        length = ends[0] + 1 if ends else len(whole.token_ids)
        assert sample.token_ids == whole.token_ids[:length]
        assert sample.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert {sample.finish_reason for sample in samples} == set(FinishReason)


def test_what_cannot_fit_or_is_wrong_is_refused_at_submit(directories: dict[str, Path]) -> None:
    async def refusals(engine: EmbeddedEngine) -> None:
        for bad, words in [
            (request(0, (1,) * 50, 47), "max_sequence_tokens"),
            (request(0, (1, VOCABULARY)), "vocabulary"),
            (request(0, (1, -1)), "vocabulary"),
            (request(0, (1, 2), 0), "max_tokens"),
            (SampleRequest(SampleId("empty", 0), (), SamplingParams(4), 0), "empty"),
            (request(0, (1, 2), temperature=-1.0), "temperature"),
        ]:
            with pytest.raises(EngineError, match=words):
                engine.submit(bad)
        assert len((await engine.submit(request(0, (1,) * 50, 46))).token_ids) == 46
        future = engine.submit(request(1, (1, 2)))
        with pytest.raises(EngineError, match="already"):
            engine.submit(request(1, (1, 2)))
        await future
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)

    with_engine(directories["qwen2"], refusals)


def test_committing_the_same_weights_changes_spans_and_nothing_else(directories: dict[str, Path]) -> None:
    path = directories["qwen2-gqa-tied"]
    model = AutoModelForCausalLM.from_pretrained(path)
    requests = [request(k, (5, k, 9), 60) for k in range(12)]

    async def commits(engine: EmbeddedEngine) -> list[Sample]:
        futures = [engine.submit(one) for one in requests]
        for version in range(4):
            await load(engine, model, version)
            await asyncio.sleep(0.01)
        return list(await asyncio.gather(*futures))

    samples = with_engine(path, commits, slots=8)
    assert [s.token_ids for s in samples] == [
        s.token_ids for s in with_engine(path, lambda engine: gather(engine, requests), slots=8)
    ]
    assert_logprobs(model, requests, samples)
    for sample in samples:
        ends = [0, *(span.end for span in sample.spans)]
        assert [span.start for span in sample.spans] == ends[:-1]
        assert ends[-1] == len(sample.token_ids)
        assert all(span.start < span.end for span in sample.spans)
        versions = [span.version for span in sample.spans]
        assert versions == sorted(set(versions))
    assert any(len(sample.spans) > 1 for sample in samples)


@pytest.mark.parametrize("generic", [False, True], ids=["lean", "generic"])
def test_new_weights_rule_every_later_sample_even_siblings(
    directories: dict[str, Path], tmp_path: Path, generic: bool
) -> None:
    """A sibling of a sample that is in flight across a commit equals that of a fresh engine on the new weights."""
    other = make_model(FAMILIES["qwen2-gqa-tied"](), seed=8)
    other.save_pretrained(tmp_path / "other")
    long, late = request(0, (4, 5, 6, 7), 80), request(1, (4, 5, 6, 7), 20)

    async def across(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        first = engine.submit(long)
        for _ in range(10_000):
            if engine.stats().running:
                break
            await asyncio.sleep(0.001)
        await load(engine, other, 5)
        second = await engine.submit(late)
        return await first, second

    crossing, after = with_engine(directories["qwen2-gqa-tied"], across, generic=generic)
    (fresh,) = with_engine(tmp_path / "other", lambda engine: gather(engine, [late]), generic=generic)
    assert after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert after.spans == (VersionSpan(5, 0, 20),)
    assert crossing.spans[-1] == VersionSpan(5, crossing.spans[-1].start, 80)
    if len(crossing.spans) == 2:
        old = AutoModelForCausalLM.from_pretrained(directories["qwen2-gqa-tied"])
        start = crossing.spans[1].start
        expected = recompute(old, long, crossing)[:start]
        assert (expected - torch.tensor(crossing.logprobs[:start])).abs().max() < 1e-4


def test_weights_may_travel_in_another_dtype(directories: dict[str, Path]) -> None:
    other = make_model(FAMILIES["qwen2"](), seed=4)
    requests = mixed(6)

    async def switched(engine: EmbeddedEngine) -> list[Sample]:
        await load(engine, other, 1, torch.bfloat16)
        return await gather(engine, requests)

    samples = with_engine(directories["qwen2"], switched)
    for parameter in other.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert_logprobs(other, requests, samples)


def test_wrong_manifests_name_the_tensor_and_leave_the_old_weights(directories: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directories["qwen2"])
    manifest, body = body_of(model, 3)
    first = manifest.tensors[0]
    rest = manifest.tensors[1:]
    wrong = {
        "missing": rest,
        "not a parameter": (first._replace(name="model.foreign"), *rest),
        "twice": (first, *manifest.tensors),
        "has shape": (first._replace(shape=first.shape[::-1]), *rest),
        "floating": (first._replace(dtype="int32"), *rest),
        "places": (first._replace(dtype="float64"), *rest),
        "of a body": (first._replace(offset=len(body)), *rest),
    }
    requests = mixed(5)

    async def attempts(engine: EmbeddedEngine) -> tuple[list[Sample], list[Sample]]:
        before = await gather(engine, requests)
        for words, tensors in wrong.items():
            with pytest.raises(WeightsError, match=words) as caught:
                await engine.stage(Manifest(3, "t", tensors), memoryview(bytearray(body)))
            assert first.name in str(caught.value) or "model.foreign" in str(caught.value)
            with pytest.raises(WeightsError, match="not staged"):
                await engine.commit(3)
        return before, await gather(engine, requests)

    before, after = with_engine(directories["qwen2"], attempts)
    assert [(s.token_ids, s.logprobs, s.spans) for s in before] == [(s.token_ids, s.logprobs, s.spans) for s in after]


def test_a_tied_head_may_come_along_or_stay_away(directories: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directories["qwen2-gqa-tied"])
    manifest, body = body_of(model, 2)
    table = next(t for t in manifest.tensors if t.name == "model.embed_tokens.weight")
    assert not any(t.name == "lm_head.weight" for t in manifest.tensors)

    async def both(engine: EmbeddedEngine) -> None:
        await engine.stage(manifest, body)
        await engine.stage(Manifest(3, "t", (*manifest.tensors, table._replace(name="lm_head.weight"))), body)
        await engine.stage(Manifest(4, "t", manifest.tensors), memoryview(bytes(body)))
        await engine.commit(4)

    with_engine(directories["qwen2-gqa-tied"], both)


def test_weights_with_nan_fail_each_sample_and_good_weights_heal(directories: dict[str, Path]) -> None:
    good = AutoModelForCausalLM.from_pretrained(directories["qwen2"])
    bad = AutoModelForCausalLM.from_pretrained(directories["qwen2"])
    bad.model.layers[0].mlp.down_proj.weight.data[3, 3] = float("nan")
    requests = mixed(10)

    async def sick(engine: EmbeddedEngine) -> list[Sample]:
        await load(engine, bad, 1)
        outcomes = await asyncio.gather(*map(engine.submit, requests), return_exceptions=True)
        for asked, outcome in zip(requests, outcomes, strict=True):
            assert isinstance(outcome, EngineError)
            assert str(asked.id) in str(outcome)
        await load(engine, good, 2)
        return await gather(engine, requests)

    samples = with_engine(directories["qwen2"], sick, slots=4)
    assert_logprobs(good, requests, samples)


def test_a_dying_loop_fails_every_sample_and_is_noticed(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.unit.engines.embedded.core import Core

    def broken(core: Core) -> None:
        raise MemoryError("no pages left")

    async def dying(engine: EmbeddedEngine) -> None:
        monkeypatch.setattr(Core, "step", broken)
        futures = [engine.submit(one) for one in mixed(5)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) and "no pages left" in str(outcome) for outcome in outcomes)
        assert isinstance(await engine.failed, EngineError)
        with pytest.raises(EngineError, match="no pages left"):
            engine.submit(mixed(1)[0])

    with_engine(directories["qwen2"], dying)


def test_a_model_that_cannot_be_loaded_is_one_clear_line(directories: dict[str, Path], tmp_path: Path) -> None:
    async def start(config: Config) -> None:
        await EmbeddedEngine(config).start()

    with pytest.raises(ModelError, match=r"no config\.json"):
        asyncio.run(start(config_for(tmp_path / "nowhere")))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        asyncio.run(start(config_for(tmp_path)))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        asyncio.run(start(config_for(directories["qwen2"], positions=129)))
    Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=0).save_pretrained(tmp_path)
    make_model(Qwen2Config.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sliding window of 16"):
        asyncio.run(start(config_for(tmp_path)))


def test_work_waits_for_start_and_is_cancelled_by_close(directories: dict[str, Path]) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(config_for(directories["qwen2"], slots=2))
        with pytest.raises(EngineError, match="start"):
            engine.submit(mixed(1)[0])
        capacity = await engine.start()
        assert (capacity.slots, capacity.kv_tokens, capacity.max_sequence) == (2, 2 * POSITIONS, POSITIONS)
        futures = [engine.submit(one) for one in mixed(30)]
        assert engine.stats().waiting + engine.stats().running > 0
        await engine.close()
        assert all(future.done() for future in futures)

    asyncio.run(run())
