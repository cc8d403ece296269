"""Samples through a real head: once each, whatever breaks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import grpc
import pytest
from peers import Peers, head_and_peers, head_config, running_head, until

from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.samples import SampleId


def ids(prompts: list[str], n: int) -> set[SampleId]:
    return {SampleId(prompt, k) for prompt in prompts for k in range(n)}


def test_head_streams_every_sample_once_and_forgets() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers):
            unit = await peers.unit("u0", auto=True)
            await peers.unit("u1", auto=True)
            rank = peers.rank()
            rank.request({"a": 5, "b": 9, "c": 3}, n=4)
            await rank.finished()
            assert rank.code == grpc.StatusCode.OK
            assert Counter(rank.samples) == Counter(ids(["a", "b", "c"], 4))
            await rank.acknowledge(rank.samples)
            await until(lambda: not server.head.ledger.streams)
            await until(lambda: set(unit.assigned) == set(unit.forgotten))

    asyncio.run(scenario())


def test_head_longest_prompt_first_and_never_over_capacity() -> None:
    async def scenario() -> None:
        async with head_and_peers(lookahead=1) as (_server, peers):
            unit = await peers.unit("u0", slots=2)
            rank = peers.rank()
            rank.request({"short": 2, "long": 90, "middle": 30, "tiny": 1})
            await until(lambda: len(unit.assigned) == 3)
            assert [sample.prompt_id for sample in unit.assigned] == ["long", "middle", "short"]
            await unit.finish([SampleId("middle", 0)])
            await until(lambda: len(unit.assigned) == 4)
            await unit.finish(ids(["long", "short", "tiny"], 1))
            await rank.finished()

    asyncio.run(scenario())


def test_head_waits_for_all_ranks_of_a_stream() -> None:
    async def scenario() -> None:
        async with head_and_peers(window_s=60.0) as (_server, peers):
            unit = await peers.unit("u0", slots=1)
            first, second = peers.rank(rank=0), peers.rank(rank=1)
            first.request({"a": 5}, total=2)
            await until(lambda: bool(_server.head.ledger.streams))
            assert unit.assigned == []
            second.request({"b": 50}, total=2)
            await until(lambda: unit.assigned == [SampleId("b", 0)])

    asyncio.run(scenario())


def test_head_plans_after_the_window_without_the_others() -> None:
    async def scenario() -> None:
        async with head_and_peers(window_s=0.05) as (_server, peers):
            unit = await peers.unit("u0")
            peers.rank().request({"a": 5}, total=2)
            await until(lambda: unit.assigned == [SampleId("a", 0)])

    asyncio.run(scenario())


def test_head_unit_death_requeues_and_delivers_once() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            dying = await peers.unit("dying", slots=4)
            rank = peers.rank()
            rank.request({"a": 5, "b": 5}, n=2)
            await until(lambda: len(dying.assigned) == 4)
            await dying.finish([dying.assigned[0]])
            await until(lambda: len(rank.samples) == 1)
            await dying.close()
            other = await peers.unit("other", auto=True)
            await rank.finished()
            assert Counter(rank.samples) == Counter(ids(["a", "b"], 2))
            assert set(other.assigned) == set(dying.assigned[1:])

    asyncio.run(scenario())


def test_head_silent_unit_counts_as_dead() -> None:
    async def scenario() -> None:
        async with head_and_peers(unit_timeout_s=0.3) as (server, peers):
            silent = await peers.unit("silent")
            rank = peers.rank()
            rank.request({"a": 5})
            await until(lambda: len(silent.assigned) == 1)
            await until(lambda: not server.head.units)
            await peers.unit("other", auto=True)
            await rank.finished()
            assert rank.samples == [SampleId("a", 0)]

    asyncio.run(scenario())


def test_head_leaving_unit_hands_back_at_once() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            leaving = await peers.unit("leaving")
            rank = peers.rank()
            rank.request({"a": 5})
            await until(lambda: len(leaving.assigned) == 1)
            await leaving.send(leaving=pb.Leaving(reason="scaled down"))
            await peers.unit("other", auto=True)
            await rank.finished()

    asyncio.run(scenario())


def test_head_rank_reconnects_with_what_it_has() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0")
            rank = peers.rank()
            rank.request({"a": 5}, n=4)
            await until(lambda: len(unit.assigned) == 4)
            a = [SampleId("a", k) for k in range(4)]
            await unit.finish(a[:2])
            await until(lambda: len(rank.samples) == 2)
            await rank.break_stream()
            await unit.finish(a[2:3])
            rank.samples.clear()
            rank.request({"a": 5}, n=4, have=a[:1])
            await until(lambda: len(rank.samples) == 2)
            assert Counter(rank.samples) == Counter(a[1:3])
            await unit.finish(a[3:])
            await rank.finished()
            assert Counter(rank.samples) == Counter(a[1:])
            assert len(unit.assigned) == 4
            assert unit.forgotten == a[:1]

    asyncio.run(scenario())


def test_head_lost_rank_is_dropped_and_its_work_cancelled() -> None:
    async def scenario() -> None:
        async with head_and_peers(reconnect_s=0.2) as (server, peers):
            unit = await peers.unit("u0")
            rank = peers.rank()
            rank.request({"a": 5})
            await until(lambda: len(unit.assigned) == 1)
            await rank.break_stream()
            await until(lambda: unit.cancelled == unit.assigned)
            assert not server.head.ledger.streams

    asyncio.run(scenario())


def test_head_successor_adopts_running_and_held_samples() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers):
            b = [SampleId("b", k) for k in range(3)]
            message = [pb.SampleId(prompt_id=i.prompt_id, k=i.k) for i in b[1:2]]
            unit = await peers.unit("u0", run_id="run", session="s1", running=message)
            await unit.finish(b[:1])
            await until(lambda: server.head.ledger.load("u0").samples == 1 and server.head.units["u0"].finished == 1)
            rank = peers.rank()
            rank.request({"b": 5}, n=3)
            await until(lambda: rank.samples == b[:1] and unit.assigned == b[2:])
            await unit.finish(b[1:])
            await rank.finished()
            assert Counter(rank.samples) == Counter(b)
            assert unit.cancelled == []

    asyncio.run(scenario())


def test_head_successor_cancels_what_nobody_asks_for() -> None:
    async def scenario() -> None:
        async with head_and_peers(reconnect_s=0.2) as (_server, peers):
            unit = await peers.unit("u0", run_id="run", session="s1", running=[pb.SampleId(prompt_id="old", k=0)])
            await unit.finish([SampleId("done", 0)])
            await until(lambda: unit.cancelled == [SampleId("old", 0)] and unit.forgotten == [SampleId("done", 0)])

    asyncio.run(scenario())


def test_head_deadline_redispatches_elsewhere_then_fails_typed() -> None:
    async def scenario() -> None:
        async with head_and_peers(max_attempts=2, unit_timeout_s=60.0) as (_server, peers):
            first = await peers.unit("u0")
            second = await peers.unit("u1")
            rank = peers.rank()
            rank.request({"a": 5}, deadline_s=0.2)
            await rank.finished()
            a = [SampleId("a", 0)]
            assert first.assigned == first.cancelled == second.assigned == a
            await until(lambda: second.cancelled == a)
            assert [(o.unit_id, o.attempt) for o in rank.overdue] == [("u0", 1)]
            (failure,) = rank.failures
            assert failure.code == pb.Failure.DEADLINE
            assert all(part in failure.message for part in ("a#0", "u0", "u1", "2"))
            assert rank.samples == []

    asyncio.run(scenario())


def test_head_engine_failure_is_tried_elsewhere_then_fails_typed() -> None:
    async def scenario() -> None:
        async with head_and_peers(max_attempts=2) as (_server, peers):
            first = await peers.unit("u0")
            rank = peers.rank()
            rank.request({"a": 5})
            await until(lambda: len(first.assigned) == 1)
            second = await peers.unit("u1")
            await first.fail(first.assigned)
            await until(lambda: len(second.assigned) == 1)
            await second.fail(second.assigned)
            await rank.finished()
            (failure,) = rank.failures
            assert failure.code == pb.Failure.ENGINE and "boom" in failure.message and "u0, u1" in failure.message

    asyncio.run(scenario())


def test_head_sample_that_fits_no_unit_fails_typed() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            await peers.unit("u0", auto=True, max_sequence=64)
            rank = peers.rank()
            rank.request({"long": 60, "short": 10})
            await rank.finished()
            assert rank.samples == [SampleId("short", 0)]
            (failure,) = rank.failures
            assert failure.code == pb.Failure.DOES_NOT_FIT and "long#0" in failure.message and "64" in failure.message

    asyncio.run(scenario())


def test_head_without_units_fails_with_what_is_missing() -> None:
    async def scenario() -> None:
        async with head_and_peers(no_unit_timeout_s=0.2) as (server, peers):
            rank = peers.rank()
            rank.request({"a": 5})
            await rank.finished()
            assert rank.code == grpc.StatusCode.FAILED_PRECONDITION
            assert "no unit is attached" in rank.details and "train/0" in rank.details
            assert not server.head.ledger.streams

    asyncio.run(scenario())


def test_head_new_session_drops_the_older_one() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0")
            old, new = peers.rank(session="s1"), peers.rank(session="s2")
            old.request({"a": 5}, n=2)
            await until(lambda: len(unit.assigned) == 2)
            new.request({"a": 5}, n=2)
            await old.finished()
            assert old.code == grpc.StatusCode.FAILED_PRECONDITION and "replaced" in old.details
            await until(lambda: set(unit.cancelled) == ids(["a"], 2))
            await until(lambda: len(unit.assigned) == 4)
            unit.session = ("run", "s1")
            await unit.finish(ids(["a"], 2))
            unit.session = ("run", "s2")
            await unit.finish(ids(["a"], 2))
            await new.finished()
            assert Counter(new.samples) == Counter(ids(["a"], 2))
            old.request({"a": 5})
            await old.finished()
            assert old.code == grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [({"a": 0}, {}, "'a'"), ({"a": 1}, {"n": 0}, "n and"), ({"a": 1}, {"stream": ""}, "stream")],
)
def test_head_invalid_requests_say_where(prompts: dict[str, int], options: dict[str, object], named: str) -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            rank = peers.rank()
            rank.request(prompts, **options)  # type: ignore[arg-type]
            await rank.finished()
            assert rank.code == grpc.StatusCode.INVALID_ARGUMENT and named in rank.details

    asyncio.run(scenario())


def test_head_two_ranks_cannot_own_one_prompt() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers):
            first, second = peers.rank(rank=0), peers.rank(rank=1)
            first.request({"a": 5}, total=2)
            await until(lambda: bool(server.head.ledger.streams))
            second.request({"a": 5}, total=2)
            await second.finished()
            assert second.code == grpc.StatusCode.INVALID_ARGUMENT and "prompt a" in second.details

    asyncio.run(scenario())


def test_head_refuses_callers_without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAD_TEST_TOKEN", "secret")

    async def scenario() -> None:
        config = head_config(security={"token_env": "HEAD_TEST_TOKEN"})
        async with running_head(config) as (server, address), grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.GenerationStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Status(pb.StatusRequest())
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            peers = Peers(address)
            rank = peers.rank()
            rank.request({"a": 1})
            await rank.finished()
            assert rank.code == grpc.StatusCode.UNAUTHENTICATED
            assert not server.head.ledger.streams
            await peers.close()
            metadata = (("authorization", "Bearer secret"),)
            assert (await stub.Status(pb.StatusRequest(), metadata=metadata)).version == -1

    asyncio.run(scenario())


def test_head_events_stay_under_the_message_bound() -> None:
    async def scenario() -> None:
        async with head_and_peers(security={"token_env": None, "max_message_bytes": 64 << 10}) as (_server, peers):
            unit = await peers.unit("u0", slots=64)
            rank = peers.rank()
            rank.request({"a": 5}, n=32)
            await until(lambda: len(unit.assigned) == 32)
            await rank.break_stream()
            for sample_id in unit.assigned:
                big = pb.Sample(
                    id=pb.SampleId(prompt_id=sample_id.prompt_id, k=sample_id.k),
                    token_ids=[100_000] * 6000,
                    finish_reason=pb.FINISH_REASON_STOP,
                )
                await unit.send(finished=pb.Finished(run_id="run", session="s1", samples=[big]))
            rank.request({"a": 5}, n=32)
            await rank.finished()
            assert rank.code == grpc.StatusCode.OK and len(rank.samples) == 32

    asyncio.run(scenario())


def test_head_status_names_units_and_streams() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers):
            unit = await peers.unit("u0", slots=2)
            await unit.send(heartbeat=pb.Heartbeat(running=2, tokens_per_s=5.0))
            rank = peers.rank()
            rank.request({"a": 5}, n=3)
            await until(lambda: len(unit.assigned) == 2)
            await unit.finish(unit.assigned[:1])
            await until(lambda: len(rank.samples) == 1 and len(unit.assigned) == 3)
            status = await rank.stub.Status(pb.StatusRequest())
            (stream,), (told,) = status.streams, status.units
            assert (stream.queued, stream.running, stream.delivered, stream.connected) == (0, 2, 1, True)
            assert (told.unit_id, told.assigned, told.finished, told.heartbeat.running) == ("u0", 2, 1, 2)
            assert status.dispatch == "least_loaded"

    asyncio.run(scenario())


def test_head_that_stood_still_does_not_count_its_units_as_silent() -> None:
    async def scenario() -> None:
        async with head_and_peers(unit_timeout_s=1.0) as (server, peers):
            await peers.unit("u0")
            time.sleep(2.0)  # noqa: ASYNC251 - the event loop stands still
            server.head.tick()
            assert list(server.head.units) == ["u0"]
            await until(lambda: not server.head.units)

    asyncio.run(scenario())
