"""The version protocol through a real head."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from peers import ScriptedUnit, head_and_peers, until

from services.pb import streamrl_pb2 as pb
from services.samples import SampleId
from services.sgs import versions

A = SampleId("a", 0)
W = pb.UnitWeights


async def commit(unit: ScriptedUnit, version: int, times: int = 1) -> None:
    """Follow one publish to its end."""
    await until(lambda: [s.manifest.version for s in unit.staged].count(version) >= times)
    await unit.weights(version, W.STAGING)
    await unit.weights(version, W.STAGED)
    await until(lambda: unit.commits.count(version) == times)
    await unit.weights(version, W.COMMITTED)


def test_head_weights_only_committed_units_start_newer_requests() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            fast, slow = await peers.unit("fast"), await peers.unit("slow")
            rank = peers.rank()
            assert await rank.publish(3) == 2
            rank.request({"a": 9, "b": 5}, min_version=3)
            await commit(fast, 3)
            await until(lambda: len(fast.assigned) == 2)
            assert slow.assigned == []
            late = await peers.unit("late")
            await until(lambda: [s.manifest.version for s in late.staged] == [3])

    asyncio.run(scenario())


def test_head_weights_boundary_commits_when_empty_and_keeps_serving_older_requests() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0", slots=1)
            rank = peers.rank()
            rank.request({"a": 9, "b": 5})
            await until(lambda: unit.assigned == [A])
            await rank.publish(1)
            await until(lambda: len(unit.staged) == 1)
            await unit.weights(1, W.STAGED)
            await unit.send(heartbeat=pb.Heartbeat())
            assert unit.commits == []
            await unit.finish([A])
            await until(lambda: unit.commits == [1])
            await until(lambda: rank.samples == [A])
            assert unit.assigned == [A]
            await unit.weights(1, W.COMMITTED)
            await until(lambda: unit.assigned == [A, SampleId("b", 0)])

    asyncio.run(scenario())


def test_head_weights_immediate_commits_while_running() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0", slots=2)
            rank = peers.rank()
            rank.request({"a": 9})
            await until(lambda: unit.assigned == [A])
            await rank.publish(1, pb.COMMIT_POLICY_IMMEDIATE)
            await commit(unit, 1)
            status = await rank.stub.WeightStatus(pb.WeightStatusRequest(version=1, wait_s=20.0, until=W.COMMITTED))
            assert [(u.unit_id, u.version, u.state) for u in status.units] == [("u0", 1, W.COMMITTED)]

    asyncio.run(scenario())


def test_head_weights_failed_stage_is_retried_and_keeps_the_unit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FIRST_RETRY_S", 0.05)

    async def scenario() -> None:
        async with head_and_peers(no_unit_timeout_s=60.0) as (_server, peers):
            unit = await peers.unit("u0")
            rank = peers.rank()
            await rank.publish(1)
            rank.request({"a": 9}, min_version=1)
            await until(lambda: len(unit.staged) == 1)
            await unit.weights(1, W.FAILED, "digest of `w` does not match")
            await until(lambda: len(unit.staged) == 2)
            assert unit.assigned == [] and unit.commits == []
            await unit.weights(1, W.STAGED)
            await until(lambda: unit.commits == [1])
            await unit.weights(1, W.COMMITTED)
            await until(lambda: unit.assigned == [A])

    asyncio.run(scenario())


def test_head_weights_given_up_names_unit_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MAX_ATTEMPTS", 1)

    async def scenario() -> None:
        async with head_and_peers(no_unit_timeout_s=0.3) as (_server, peers):
            unit = await peers.unit("u0")
            rank = peers.rank()
            await rank.publish(1)
            await until(lambda: len(unit.staged) == 1)
            await unit.weights(1, W.FAILED, "digest of `w` does not match")
            status = await rank.stub.WeightStatus(pb.WeightStatusRequest(version=1, wait_s=20.0, until=W.STAGED))
            assert [(u.state, u.error) for u in status.units] == [(W.FAILED, "digest of `w` does not match")]
            rank.request({"a": 9}, min_version=1)
            await rank.finished()
            assert rank.code == grpc.StatusCode.FAILED_PRECONDITION
            assert "u0 at no weights (digest of `w` does not match)" in rank.details

    asyncio.run(scenario())


def test_head_weights_new_session_may_publish_lower_numbers() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0")
            old, new = peers.rank(session="s1"), peers.rank(session="s2")
            await old.publish(7)
            await commit(unit, 7)
            new.request({"a": 9}, min_version=5)
            await until(lambda: _server.head.versions.published is None)
            assert (await new.stub.WeightStatus(pb.WeightStatusRequest(version=5))).version == -1
            await new.publish(5)
            await until(lambda: len(unit.staged) == 2)
            assert unit.assigned == []
            await commit(unit, 5)
            await until(lambda: unit.assigned == [A])

    asyncio.run(scenario())


def test_head_weights_word_about_an_older_session_does_not_count_for_the_same_number() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0")
            old, new = peers.rank(session="s1"), peers.rank(session="s2")
            await old.publish(5)
            await until(lambda: len(unit.staged) == 1)
            stale = [pb.UnitWeights(version=5, transfer_id="ts1-5", state=state) for state in (W.STAGED, W.COMMITTED)]
            await new.publish(5)
            await until(lambda: len(unit.staged) == 2)
            for word in stale:
                await unit.send(weights=word)
            await unit.send(heartbeat=pb.Heartbeat())
            await until(lambda: _server.head.units["u0"].heartbeat is not None)
            assert _server.head.versions.units["u0"].state is versions.WeightState.STAGING and unit.commits == []
            await commit(unit, 5)
            new.request({"a": 9}, min_version=5)
            await until(lambda: unit.assigned == [A])
            assert unit.commits == [5]

    asyncio.run(scenario())


def test_head_weights_word_of_an_attachment_that_is_over_does_not_count() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers):
            rank, head = peers.rank(), server.head
            await peers.unit("u0")
            before = head.units["u0"]
            await rank.publish(4)
            staged = pb.UnitEvent(weights=W(version=4, transfer_id="ts1-4", state=W.STAGED))
            head.lose(before, "silent")
            head.receive(before, staged)
            again = await peers.unit("u0")
            await until(lambda: len(again.staged) == 1)
            head.receive(before, staged)
            assert head.versions.units["u0"].state is versions.WeightState.STAGING

    asyncio.run(scenario())


def test_head_weights_reattached_unit_with_the_current_version_needs_nothing() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            rank = peers.rank()
            await rank.publish(4)
            unit = await peers.unit("u0", version=4, transfer_id="ts1-4", run_id="run", session="s1")
            rank.request({"a": 9}, min_version=4)
            await until(lambda: unit.assigned == [A])
            assert unit.staged == []
            await unit.close()
            again = await peers.unit("u0", version=4, transfer_id="ts1-4")
            await until(lambda: again.assigned == [A])
            assert again.staged == []

    asyncio.run(scenario())


def test_head_weights_status_answers_at_once_or_after_its_wait() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            rank = peers.rank()
            await peers.unit("u0")
            await rank.publish(2)
            status = await rank.stub.WeightStatus(pb.WeightStatusRequest(version=2, wait_s=0.1, until=W.STAGED))
            assert status.version == 2 and [u.state for u in status.units] == [W.STAGING]

    asyncio.run(scenario())
