"""What a unit has finished and the head may still need: sent in batches, kept until it says Forget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from services import wire
from services.pb import streamrl_pb2 as pb
from services.samples import FailureCode, Sample, SampleFailure, SampleId

_FRAMING_BYTES = 16  # tag and length of one repeated field


class _Entry(NamedTuple):
    message: pb.Sample | pb.Failure
    nbytes: int


class Outbox:
    """Samples stay until forgotten and can be sent again; failures go once: a head that missed one dispatches again."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds one `Finished` message."""
        self._max_bytes = max_bytes
        self._kept: dict[SampleId, _Entry] = {}
        self._unsent: dict[SampleId, _Entry] = {}

    def __contains__(self, sample_id: object) -> bool:
        """Whether a finished sample of that id is kept."""
        return sample_id in self._kept

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, sample: Sample) -> None:
        """Keep one sample; one too large for a message is turned into a failure that says so."""
        message = wire.sample_pb(sample)
        entry = _Entry(message, message.ByteSize() + _FRAMING_BYTES)
        if entry.nbytes > self._max_bytes:
            self.put_failure(
                SampleFailure(
                    sample.id,
                    FailureCode.ENGINE,
                    f"sample {sample.id} of unit {sample.unit_id} takes {entry.nbytes} bytes, more than one message "
                    f"({self._max_bytes}): raise security.max_message_bytes",
                    sample.unit_id,
                )
            )
            return
        self._kept[sample.id] = self._unsent[sample.id] = entry

    def put_failure(self, failure: SampleFailure) -> None:
        message = wire.failure_pb(failure)
        self._unsent[failure.id] = _Entry(message, message.ByteSize() + _FRAMING_BYTES)

    def resend(self, sample_id: SampleId) -> None:
        """Send a kept sample once more. Raises `KeyError` when it is not kept."""
        self._unsent[sample_id] = self._kept[sample_id]

    def resend_all(self) -> None:
        """For a new head: everything kept goes out again, oldest first."""
        failures = {key: entry for key, entry in self._unsent.items() if key not in self._kept}
        self._unsent = {**self._kept, **failures}

    def forget(self, ids: Iterable[SampleId]) -> None:
        """Drop these, sent or not; unknown ids are ignored."""
        for sample_id in ids:
            self._kept.pop(sample_id, None)
            self._unsent.pop(sample_id, None)

    def clear(self) -> None:
        self._kept.clear()
        self._unsent.clear()

    def take(self) -> tuple[list[pb.Sample], list[pb.Failure]]:
        """What fits into the next message, oldest first; counts as sent from now on. Empty when nothing waits."""
        samples: list[pb.Sample] = []
        failures: list[pb.Failure] = []
        room = self._max_bytes
        while self._unsent:
            sample_id, entry = next(iter(self._unsent.items()))
            if entry.nbytes > room and (samples or failures):
                break
            del self._unsent[sample_id]
            room -= entry.nbytes
            if isinstance(entry.message, pb.Sample):
                samples.append(entry.message)
            else:
                failures.append(entry.message)
        return samples, failures
