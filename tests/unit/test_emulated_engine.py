"""The emulated engine behind the engine interface, on a real event loop with short latencies."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from services.config import Config
from services.errors import ConfigError, EngineError, WeightsError
from services.samples import FinishReason, SampleId, SamplingParams, VersionSpan, sample_seed
from services.transport.packing import pack
from services.unit.engines.base import SampleRequest
from services.unit.engines.emulated import EmulatedEngine
from services.unit.engines.factory import make_engine


def config(slots=4, **emulated):
    profile = {"ptl_base_s": 0.001, "lengths": "uniform", "mean": 8, **emulated}
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": {"path": "unused.jsonl"}},
            "reward": {"fn": "tests:none"},
            "sampling": {"max_tokens": 32},
            "engine": {"kind": "emulated", "slots": slots, "max_sequence_tokens": 64, "emulated": profile},
        }
    )


def request(k=0, prompt_id="p", params=None, prompt=(5, 6, 7), seed=0):
    sample_id = SampleId(prompt_id, k)
    return SampleRequest(sample_id, prompt, params or SamplingParams(32), sample_seed(seed, sample_id), 12.5)


def generate(requests, **options):
    async def work():
        engine = make_engine(config(**options))
        await engine.start()
        try:
            return await asyncio.wait_for(asyncio.gather(*(engine.submit(r) for r in requests)), 60)
        finally:
            await engine.close()

    return asyncio.run(work())


def test_a_sample_depends_on_its_seed_only():
    requests = [request(k) for k in range(12)]
    one, other = generate(requests), generate(requests[::-1], slots=2)[::-1]
    assert [(s.id, s.token_ids, s.logprobs) for s in one] == [(s.id, s.token_ids, s.logprobs) for s in other]
    assert len({len(s.token_ids) for s in one}) > 1
    for sample in one:
        assert set(sample.token_ids) <= {5, 6, 7}
        assert len(sample.logprobs) == len(sample.token_ids)
        assert max(sample.logprobs) <= 0
        assert sample.spans == (VersionSpan(-1, 0, len(sample.token_ids)),)
        assert sample.timings.queued_at == 12.5
        assert sample.timings.started_at < sample.timings.finished_at


def test_max_tokens_cuts_the_same_sample_shorter():
    long = generate([request(k, params=SamplingParams(32, stop_token_ids=(9,))) for k in range(8)])
    short = generate([request(k, params=SamplingParams(6, stop_token_ids=(9,))) for k in range(8)])
    for a, b in zip(long, short, strict=True):
        assert len(b.token_ids) == min(len(a.token_ids), 6)
        assert a.finish_reason is FinishReason.STOP
        assert (b.finish_reason is FinishReason.STOP) == (len(a.token_ids) <= 6)
        assert (b.token_ids[-1] == 9) == (b.finish_reason is FinishReason.STOP)
    assert {s.finish_reason for s in short} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_trace_gives_the_lengths_and_its_gaps_are_errors(tmp_path):
    trace = tmp_path / "lengths.jsonl"
    trace.write_text(json.dumps({"prompt_id": "p", "lengths": [3, 7]}) + "\n")
    samples = generate([request(0), request(1)], lengths="trace", trace=str(trace))
    assert [len(s.token_ids) for s in samples] == [3, 7]
    with pytest.raises(EngineError, match=r"sample q#0: .*lengths.jsonl has no lengths"):
        generate([request(0, "q")], lengths="trace", trace=str(trace))
    trace.write_text('{"prompt_id": "p"}\n')
    with pytest.raises(ConfigError, match=r"lengths.jsonl:1: expected"):
        EmulatedEngine(config(lengths="trace", trace=str(trace)))
    with pytest.raises(ConfigError, match="trace"):
        EmulatedEngine(config(lengths="trace", trace=str(tmp_path / "none")))


def test_top_p_samples_carry_the_kept_set():
    (sample,) = generate([request(params=SamplingParams(32, top_p=0.9))])
    assert sample.kept_counts == (1,) * len(sample.token_ids)
    assert sample.kept_ids == sample.token_ids
    assert set(sample.logprobs) == {0.0}


def test_what_does_not_fit_or_comes_twice_is_refused_at_once():
    async def work():
        engine = EmulatedEngine(config())
        await engine.start()
        with pytest.raises(EngineError, match=r"sample p#0: 60 prompt \+ 32 completion tokens"):
            engine.submit(request(prompt=(1,) * 60))
        engine.submit(request())
        with pytest.raises(EngineError, match="p#0 is already"):
            engine.submit(request())
        await engine.close()

    asyncio.run(work())


def test_commit_in_flight_splits_spans_and_needs_a_staged_version():
    async def work():
        engine = EmulatedEngine(config(lengths="constant", mean=30, ptl_base_s=0.03))
        await engine.start()
        values = np.zeros(3, np.float32)
        manifest, body = pack(7, "t7", [("w", "float32", (3,), values)])
        with pytest.raises(WeightsError, match="v7 cannot be committed: nothing is staged"):
            await engine.commit(7)
        with pytest.raises(WeightsError, match="body has 4 bytes"):
            await engine.stage(manifest, body[:4])
        future = engine.submit(request())
        await asyncio.sleep(0.05)
        await engine.stage(manifest, body)
        assert await engine.commit(7) >= 0
        sample = await asyncio.wait_for(future, 60)
        await engine.close()
        return sample

    spans = asyncio.run(work()).spans
    assert [span.version for span in spans] == [-1, 7]
    assert spans[0].start == 0
    assert spans[0].end == spans[1].start
    assert spans[1].end == 30


def test_cancel_ends_the_future_and_lets_the_next_one_in():
    async def work():
        engine = EmulatedEngine(config(slots=1, lengths="constant", mean=30, ptl_base_s=0.01))
        await engine.start()
        first, second = engine.submit(request(0)), engine.submit(request(1))
        await asyncio.sleep(0)
        assert (engine.stats().running, engine.stats().waiting) == (1, 1)
        engine.cancel(SampleId("p", 0))
        engine.cancel(SampleId("nobody", 0))
        assert first.cancelled()
        sample = await asyncio.wait_for(second, 60)
        assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_tokens_used) == (0, 0, 0)
        await engine.close()
        return sample

    assert len(asyncio.run(work()).token_ids) == 30


def test_a_dead_engine_fails_what_waits_and_says_so(monkeypatch):
    async def work():
        engine = EmulatedEngine(config())
        await engine.start()
        future = engine.submit(request())

        def broken(_now):
            raise RuntimeError("cosmic ray")

        monkeypatch.setattr(engine._batch, "advance", broken)
        with pytest.raises(EngineError, match="the emulated engine died: RuntimeError: cosmic ray"):
            await asyncio.wait_for(future, 60)
        assert "cosmic ray" in str(engine.failed.result())
        with pytest.raises(EngineError, match="died"):
            engine.submit(request(1))
        await engine.close()

    asyncio.run(work())
