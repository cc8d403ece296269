"""Between the plain data of `services.samples` / `services.transport.manifest` and the protobuf messages."""

from __future__ import annotations

from services.pb import streamrl_pb2 as pb
from services.samples import (
    FailureCode,
    FinishReason,
    Prompt,
    Sample,
    SampleFailure,
    SampleId,
    SamplingParams,
    Timings,
    VersionSpan,
)
from services.transport.manifest import Manifest, Source, TensorMeta

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_CODES = {
    FailureCode.DEADLINE: pb.Failure.DEADLINE,
    FailureCode.DOES_NOT_FIT: pb.Failure.DOES_NOT_FIT,
    FailureCode.ENGINE: pb.Failure.ENGINE,
}
_REASONS_BACK = {value: key for key, value in _REASONS.items()}
_CODES_BACK = {value: key for key, value in _CODES.items()}


def sample_id(message: pb.SampleId) -> SampleId:
    return SampleId(message.prompt_id, message.k)


def sample_id_pb(value: SampleId) -> pb.SampleId:
    return pb.SampleId(prompt_id=value.prompt_id, k=value.k)


def prompt(message: pb.Prompt) -> Prompt:
    return Prompt(message.prompt_id, tuple(message.token_ids))


def prompt_pb(value: Prompt) -> pb.Prompt:
    return pb.Prompt(prompt_id=value.prompt_id, token_ids=value.token_ids)


def sampling(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def sampling_pb(value: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=value.max_tokens,
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        stop_token_ids=value.stop_token_ids,
    )


def sample(message: pb.Sample) -> Sample:
    return Sample(
        id=sample_id(message.id),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        finish_reason=_REASONS_BACK[message.finish_reason],
        spans=tuple(VersionSpan(span.version, span.start, span.end) for span in message.spans),
        timings=Timings(message.timings.queued_at, message.timings.started_at, message.timings.finished_at),
        unit_id=message.unit_id,
        kept_counts=tuple(message.kept_counts),
        kept_ids=tuple(message.kept_ids),
    )


def sample_pb(value: Sample) -> pb.Sample:
    return pb.Sample(
        id=sample_id_pb(value.id),
        token_ids=value.token_ids,
        logprobs=value.logprobs,
        finish_reason=_REASONS[value.finish_reason],
        spans=[pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in value.spans],
        timings=pb.Timings(
            queued_at=value.timings.queued_at,
            started_at=value.timings.started_at,
            finished_at=value.timings.finished_at,
        ),
        unit_id=value.unit_id,
        kept_counts=value.kept_counts,
        kept_ids=value.kept_ids,
    )


def failure(message: pb.Failure) -> SampleFailure:
    return SampleFailure(sample_id(message.id), _CODES_BACK[message.code], message.message, message.unit_id)


def failure_pb(value: SampleFailure) -> pb.Failure:
    return pb.Failure(id=sample_id_pb(value.id), code=_CODES[value.code], message=value.message, unit_id=value.unit_id)


def manifest(message: pb.WeightManifest) -> Manifest:
    """The sender's own total and digest are checked by the receiver against what it computes; see `manifest_pb`."""
    return Manifest(
        version=message.version,
        transfer_id=message.transfer_id,
        tensors=tuple(
            TensorMeta(t.name, t.dtype, tuple(t.shape), t.offset, t.nbytes, t.digest) for t in message.tensors
        ),
        sources=tuple(Source(s.transport, s.address) for s in message.sources),
    )


def manifest_pb(value: Manifest) -> pb.WeightManifest:
    return pb.WeightManifest(
        version=value.version,
        transfer_id=value.transfer_id,
        tensors=[
            pb.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, nbytes=t.nbytes, digest=t.digest)
            for t in value.tensors
        ],
        total_bytes=value.total_bytes,
        digest=value.digest,
        sources=[pb.WeightSource(transport=s.transport, address=s.address) for s in value.sources],
    )
