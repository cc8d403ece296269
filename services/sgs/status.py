"""What the head says of itself: `Status` and `WeightStatus` replies."""

from __future__ import annotations

from collections import Counter

from services.pb import streamrl_pb2 as pb
from services.sgs.head import Head
from services.sgs.records import State, StreamRecord


def status_pb(head: Head) -> pb.StatusReply:
    return pb.StatusReply(
        started_at=head.started_at,
        version=head.versions.version,
        units=[_unit_pb(head, unit_id) for unit_id in head.units],
        streams=[_stream_pb(head, stream) for stream in head.ledger.streams.values()],
        dispatch=head.config.dispatch,
    )


def unit_weights_pb(head: Head, unit_id: str) -> pb.UnitWeights:
    """About the published version; before there is one, about what the unit has."""
    unit = head.versions.units[unit_id]
    if head.versions.published is None:
        version, transfer_id = unit.committed.transfer if unit.committed else (-1, "")
        return pb.UnitWeights(unit_id=unit_id, version=version, transfer_id=transfer_id, state=pb.UnitWeights.NONE)
    return pb.UnitWeights(
        unit_id=unit_id,
        version=head.versions.version,
        transfer_id=head.versions.published.tag.transfer.id,
        state=pb.UnitWeights.State.Name(unit.state),
        error=unit.error,
        stage_started_at=unit.stage_started_at,
        staged_at=unit.staged_at,
        committed_at=unit.committed_at,
        commit_pause_s=unit.commit_pause_s,
    )


def _unit_pb(head: Head, unit_id: str) -> pb.UnitStatus:
    link, unit = head.units[unit_id], head.versions.units[unit_id]
    return pb.UnitStatus(
        unit_id=unit_id,
        engine=link.register.engine,
        host=link.register.host,
        slots=link.register.slots,
        assigned=head.ledger.load(unit_id).samples,
        version=unit.committed.version if unit.committed else -1,
        weights=unit_weights_pb(head, unit_id),
        heartbeat=link.heartbeat,
        heartbeat_age_s=head.clock() - link.heartbeat_at,
        finished=link.finished,
        metrics_address=link.register.metrics_address,
    )


def _stream_pb(head: Head, stream: StreamRecord[pb.Sample]) -> pb.StreamStatus:
    ranks = stream.ranks.values()
    states = Counter(entry.state for rank in ranks for entry in rank.entries.values())
    return pb.StreamStatus(
        run_id=head.ledger.session.run_id if head.ledger.session else "",
        stream=stream.name,
        queued=states[State.QUEUED],
        running=states[State.RUNNING],
        delivered=sum(e.sent for r in ranks for e in r.entries.values() if e.state is State.FINISHED),
        acknowledged=sum(len(rank.acknowledged) for rank in ranks),
        failed=sum(rank.failed for rank in ranks),
        min_version=stream.min_version,
        connected=all(rank.connected or rank.ended for rank in ranks),
    )
