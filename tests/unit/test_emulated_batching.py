"""The emulated engine's timing, against a simulation that walks every decode step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.samples import SampleId, VersionSpan
from services.unit.engines.emulation import BatchEmulation, FinishedJob, Job, LatencyProfile

PROFILE = LatencyProfile(base_s=0.01, per_sequence_s=0.002, prefill_s_per_token=0.001)

arrivals = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 3), st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=12
)


def jobs_of(rows: list[tuple[int, int, int, int]]) -> list[tuple[float, Job]]:
    """(milliseconds, prompt, prompt tokens, tokens); arrivals sit off the step grid so that no two events coincide."""
    return [
        (at * 1e-3 + i * 1.7e-5 + 3.1e-6, Job(SampleId(f"p{prompt}", i), prompt_tokens, tokens))
        for i, (at, prompt, prompt_tokens, tokens) in enumerate(sorted(rows))
    ]


def walk(arriving: list[tuple[float, Job]], slots: int, profile: LatencyProfile) -> dict[SampleId, float]:
    """When each job finishes, one step at a time."""
    clock, queue, running, prefilled = 0.0, list(arriving), {}, set()
    live = {}
    finished = {}
    for _, job in arriving:
        live.setdefault(job.id.prompt_id, set())
    while queue or running:
        if not running and queue:
            clock = max(clock, queue[0][0])
        while queue and len(running) < slots and queue[0][0] <= clock + 1e-9:
            job = queue.pop(0)[1]
            if job.id.prompt_id not in prefilled:
                clock += profile.prefill_s(job.prompt_tokens)
                prefilled.add(job.id.prompt_id)
            running[job.id] = job.tokens
        clock += profile.step_s(len(running))
        for sample_id in list(running):
            running[sample_id] -= 1
            if running[sample_id] == 0:
                del running[sample_id]
                finished[sample_id] = clock
        here = {s.prompt_id for s in running} | {job.id.prompt_id for at, job in queue if at <= clock}
        prefilled &= here
    return finished


def drive(arriving: list[tuple[float, Job]], slots: int, looks: list[float]) -> list[FinishedJob]:
    """Look at `looks` and at every arrival, then to the end."""
    batch = BatchEmulation(PROFILE, slots)
    found = []
    moments = sorted([(at, job) for at, job in arriving] + [(at, None) for at in looks], key=lambda m: m[0])
    for at, job in moments:
        found += batch.advance(at)
        if job is not None:
            batch.submit(job, at)
    while (when := batch.next_event()) is not None:
        found += batch.advance(when)
    return found


@given(arrivals, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_finish_times_are_those_of_a_step_by_step_walk(rows, slots):
    arriving = jobs_of(rows)
    expected = walk(arriving, slots, PROFILE)
    found = {finished.job.id: finished.finished_at for finished in drive(arriving, slots, [])}
    assert found.keys() == expected.keys()
    for sample_id, at in expected.items():
        assert found[sample_id] == pytest.approx(at, abs=1e-6)


@given(arrivals, st.integers(1, 4), st.lists(st.floats(0, 2), max_size=20))
@settings(max_examples=150, deadline=None)
def test_how_often_one_looks_does_not_matter(rows, slots, looks):
    arriving = jobs_of(rows)
    once, often = drive(arriving, slots, []), drive(arriving, slots, looks)
    assert [f.job.id for f in once] == [f.job.id for f in often]
    for a, b in zip(once, often, strict=True):
        assert a.finished_at == pytest.approx(b.finished_at, abs=1e-6)
        assert a.started_at == pytest.approx(b.started_at, abs=1e-6)
        assert a.spans == b.spans


def test_siblings_share_one_prefill():
    batch = BatchEmulation(LatencyProfile(1.0, prefill_s_per_token=0.5), slots=4)
    for k in range(3):
        batch.submit(Job(SampleId("p", k), 10, 2), 0.0)
    assert [f.finished_at for f in batch.advance(100)] == [7.0, 7.0, 7.0]


def test_time_scale_stretches_everything():
    batch = BatchEmulation(LatencyProfile(1.0, 0.5, 0.25, time_scale=2.0), slots=1)
    batch.submit(Job(SampleId("p", 0), 4, 3), 0.0)
    assert [f.finished_at for f in batch.advance(100)] == [2.0 + 9.0]


@given(st.lists(st.floats(0.001, 1.5), max_size=5))
@settings(max_examples=100, deadline=None)
def test_spans_cover_every_token_once_and_in_order(commits):
    batch = BatchEmulation(LatencyProfile(0.01), slots=2, version=0)
    for i, tokens in enumerate([100, 60, 90]):
        batch.submit(Job(SampleId("p", i), 1, tokens), 0.0)
    found = []
    for version, at in enumerate(sorted(commits), 1):
        found += batch.advance(at)
        batch.commit(version, at)
    found += batch.advance(100)
    assert len(found) == 3
    for finished in found:
        ends = [0] + [span.end for span in finished.spans]
        assert [span.start for span in finished.spans] == ends[:-1]
        assert ends[-1] == finished.job.tokens
        versions = [span.version for span in finished.spans]
        assert versions == sorted(set(versions))
        for span in finished.spans[:-1]:
            swapped_at = sorted(commits)[span.version]
            boundary = (swapped_at - finished.started_at) / 0.01
            assert math.floor(boundary - 1e-3) <= span.end <= math.ceil(boundary + 1e-3)


def test_a_commit_between_two_steps_splits_the_sample_there():
    batch = BatchEmulation(LatencyProfile(1.0), slots=2, version=4)
    batch.submit(Job(SampleId("p", 0), 1, 10), 0.0)
    batch.advance(3.5)
    batch.commit(5, 3.5)
    (finished,) = batch.advance(10.0)
    assert finished.spans == (VersionSpan(4, 0, 4), VersionSpan(5, 4, 10))


def test_what_starts_after_a_commit_in_an_idle_engine_is_all_new():
    batch = BatchEmulation(LatencyProfile(1.0), slots=2)
    batch.submit(Job(SampleId("p", 0), 1, 5), 0.0)
    batch.advance(2.5)
    batch.commit(0, 2.5)
    batch.cancel(SampleId("p", 0))
    batch.submit(Job(SampleId("p", 1), 1, 5), 2.5)
    (finished,) = batch.advance(50.0)
    assert finished.spans == (VersionSpan(0, 0, 5),)


def test_cancel_frees_the_slot_and_is_not_heard_of_again():
    batch = BatchEmulation(LatencyProfile(1.0), slots=1)
    first, second, third = (Job(SampleId("p", k), 1, 5) for k in range(3))
    for job in (first, second, third):
        batch.submit(job, 0.0)
    batch.advance(2.0)
    batch.cancel(first.id)
    batch.cancel(third.id)
    batch.cancel(SampleId("nobody", 0))
    assert [(f.job.id, f.finished_at) for f in batch.advance(50.0)] == [(second.id, 7.0)]
    assert (batch.running, batch.waiting, batch.next_event()) == (0, 0, None)


def test_an_id_can_come_again_after_a_cancel():
    batch = BatchEmulation(LatencyProfile(1.0), slots=2)
    job = Job(SampleId("p", 0), 1, 5)
    batch.submit(job, 0.0)
    batch.advance(0.0)
    batch.cancel(job.id)
    batch.submit(job, 0.0)
    assert [f.finished_at for f in batch.advance(50.0)] == [5.0]
