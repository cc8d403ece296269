"""What a unit keeps for the head, and how it is cut into messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.pb import streamrl_pb2 as pb
from services.samples import FailureCode, FinishReason, Sample, SampleFailure, SampleId, VersionSpan
from services.unit.outbox import Outbox


def sample(k: int, tokens: int = 3) -> Sample:
    return Sample(
        SampleId("p", k),
        tuple(range(1, tokens + 1)),
        (-0.5,) * tokens,
        FinishReason.STOP,
        (VersionSpan(0, 0, tokens),),
        unit_id="u",
    )


def failure(k: int) -> SampleFailure:
    return SampleFailure(SampleId("p", k), FailureCode.ENGINE, "it broke", "u")


def ks(outbox: Outbox) -> list[int]:
    samples, failures = outbox.take()
    return [message.id.k for message in [*samples, *failures]]


def test_everything_ready_goes_in_one_message_and_is_kept_until_forgotten():
    outbox = Outbox(1 << 20)
    for k in range(3):
        outbox.put(sample(k))
    assert ks(outbox) == [0, 1, 2]
    assert not outbox.has_unsent
    outbox.forget([SampleId("p", 1), SampleId("q", 9)])
    outbox.resend_all()
    assert ks(outbox) == [0, 2]
    assert SampleId("p", 0) in outbox
    assert SampleId("p", 1) not in outbox


def test_forget_also_drops_what_was_never_sent():
    outbox = Outbox(1 << 20)
    outbox.put(sample(0))
    outbox.forget([SampleId("p", 0)])
    assert not outbox.has_unsent


def test_failures_are_sent_once():
    outbox = Outbox(1 << 20)
    outbox.put_failure(failure(0))
    outbox.put(sample(1))
    outbox.resend_all()
    assert sorted(ks(outbox)) == [0, 1]
    outbox.resend_all()
    assert ks(outbox) == [1]
    assert SampleId("p", 0) not in outbox


def test_a_single_sample_can_be_sent_again():
    outbox = Outbox(1 << 20)
    outbox.put(sample(0))
    outbox.put(sample(1))
    outbox.take()
    outbox.resend(SampleId("p", 1))
    assert ks(outbox) == [1]


def test_a_sample_larger_than_a_message_becomes_a_failure_that_says_what_to_do():
    outbox = Outbox(1000)
    outbox.put(sample(0, tokens=500))
    samples, failures = outbox.take()
    assert samples == []
    assert "security.max_message_bytes" in failures[0].message
    assert "p#0" in failures[0].message


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(600, 1500))
def test_messages_stay_under_the_bound_and_lose_nothing(lengths, bound):
    outbox = Outbox(bound)
    for k, tokens in enumerate(lengths):
        outbox.put(sample(k, tokens))
    seen = []
    while outbox.has_unsent:
        samples, failures = outbox.take()
        assert samples or failures
        assert pb.Finished(samples=samples, failures=failures).ByteSize() <= bound
        seen += [message.id.k for message in [*samples, *failures]]
    assert seen == list(range(len(lengths)))
