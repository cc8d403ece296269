"""One unit against a scripted head: a real gRPC server that speaks Units, says what the test wants, and can die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import numpy as np
import pytest

from services import wire
from services.config import Config
from services.errors import EngineError, GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc
from services.rpc import Credentials, Server
from services.samples import SampleId, SamplingParams
from services.transport.grpc import GrpcWeightServer
from services.transport.manifest import Source
from services.transport.packing import pack
from services.unit.agent import UnitAgent
from services.unit.engines.emulated import EmulatedEngine

PLAIN = Credentials(None, None, None, 4 << 20)
TOKEN = dataclasses.replace(PLAIN, token="secret")
WAIT_S = 30.0


def config(slots=8, step_s=0.005, **sgs):
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": {"path": "unused.jsonl"}},
            "reward": {"fn": "tests:none"},
            "sampling": {"max_tokens": 100},
            "sgs": {"heartbeat_s": 0.05, "reconnect_s": 20, "unit_timeout_s": 5, **sgs},
            "engine": {
                "kind": "emulated",
                "slots": slots,
                "max_sequence_tokens": 128,
                "emulated": {"ptl_base_s": step_s, "lengths": "constant", "mean": 1000},
            },
        }
    )


class Stream:
    """One attached unit, as the head sees it."""

    def __init__(self, register):
        self.register = register
        self.events = asyncio.Queue()
        self.commands = asyncio.Queue()
        self.heartbeats = 0
        self.samples = {}

    async def send(self, **command):
        await self.commands.put(pb.HeadCommand(**command))

    async def next(self, kind):
        """The next event of one kind; others are passed over, but samples are noted."""
        while True:
            event = await asyncio.wait_for(self.events.get(), WAIT_S)
            if event is None:
                raise AssertionError(f"the unit ended its stream, `{kind}` was expected")
            if event.WhichOneof("event") == "finished":
                for sample in event.finished.samples:
                    self.samples.setdefault(wire.sample_id(sample.id), []).append(wire.sample(sample))
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)

    async def weights(self, state):
        while True:
            message = await self.next("weights")
            if message.state == state:
                return message

    async def collect(self, count):
        """Wait until `count` different samples are in."""
        while len(self.samples) < count:
            await self.next("finished")
        return self.samples


class ScriptedHead(streamrl_pb2_grpc.UnitsServicer):
    def __init__(self, credentials=PLAIN, first=None):
        self._credentials = credentials
        self._first = first or pb.HeadCommand(welcome=pb.Welcome(heartbeat_s=0.05))
        self.streams = asyncio.Queue()

    async def start(self, port=0):
        self._server = Server(self._credentials, "scripted head")
        self._server.add(streamrl_pb2_grpc.add_UnitsServicer_to_server, self, "streamrl.v1.Units")
        self.port = await self._server.start("127.0.0.1", port)
        return self

    async def kill(self):
        await self._server.stop(0)

    async def attached(self):
        return await asyncio.wait_for(self.streams.get(), WAIT_S)

    async def Attach(self, request_iterator, context):
        first = await request_iterator.__anext__()
        stream = Stream(first.register)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        if self._first.WhichOneof("command"):
            yield self._first
        await self.streams.put(stream)
        try:
            while (command := await stream.commands.get()) is not None:
                yield command
        finally:
            reader.cancel()

    async def _read(self, request_iterator, stream):
        async for event in request_iterator:
            if event.WhichOneof("event") == "heartbeat":
                stream.heartbeats += 1
            await stream.events.put(event)
        await stream.events.put(None)
        await stream.commands.put(None)


class Unit:
    def __init__(self, head_port, settings=None, credentials=PLAIN, engine=None):
        settings = settings or config()
        self.engine = engine or EmulatedEngine(settings)
        self.agent = UnitAgent(settings, self.engine, f"127.0.0.1:{head_port}", "unit-0", credentials)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.agent.run(self.stop))

    async def end(self):
        self.stop.set()
        await asyncio.wait_for(self.task, WAIT_S)


@contextlib.asynccontextmanager
async def pair(**options):
    head = await ScriptedHead().start()
    unit = Unit(head.port, **options)
    try:
        yield head, unit, await head.attached()
    finally:
        if not unit.task.done():
            await unit.end()
        await head.kill()


def assign(prompt_id="p", ks=(0,), max_tokens=4, session="s1", seed=1):
    params = SamplingParams(max_tokens)
    group = pb.AssignedGroup(prompt=pb.Prompt(prompt_id=prompt_id, token_ids=[5, 6]), ks=ks, queued_at=1.0)
    return pb.Assign(run_id="r", session=session, seed=seed, sampling=wire.sampling_pb(params), groups=[group])


def ids(prompt_id="p", ks=(0,)):
    return [pb.SampleId(prompt_id=prompt_id, k=k) for k in ks]


def commit_of(stage):
    return pb.Commit(version=stage.manifest.version, transfer_id=stage.manifest.transfer_id)


async def weights_at(version, corrupt=False, transfer_id=None):
    values = np.random.default_rng(version).integers(0, 256, 100_000, dtype=np.uint8)
    transfer_id = transfer_id or f"t{version}-{time.monotonic_ns()}"
    manifest, body = pack(version, transfer_id, [("w", "uint8", values.shape, values)])
    if corrupt:
        body[50_000] ^= 1
    server = GrpcWeightServer(PLAIN)
    server.put(manifest, body)
    port = await server.start("127.0.0.1", 0)
    manifest = dataclasses.replace(manifest, sources=(Source("grpc", f"127.0.0.1:{port}"),))
    return server, pb.Stage(manifest=wire.manifest_pb(manifest), deadline_s=20)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 90))


def test_samples_come_back_one_by_one_and_the_unit_says_goodbye():
    async def work():
        async with pair() as (_head, unit, stream):
            register = stream.register
            assert (register.unit_id, register.engine, register.slots) == ("unit-0", "emulated", 8)
            assert (register.version, register.max_sequence, register.kv_tokens) == (-1, 128, 8 * 128)
            await stream.send(assign=assign(ks=range(3)))
            await stream.send(assign=assign("q", ks=[7], max_tokens=9))
            samples = await stream.collect(4)
            assert samples.keys() == {SampleId("p", k) for k in range(3)} | {SampleId("q", 7)}
            for sample_id, copies in samples.items():
                assert len(copies) == 1
                assert len(copies[0].token_ids) == (9 if sample_id.prompt_id == "q" else 4)
                assert copies[0].unit_id == "unit-0"
                assert copies[0].timings.queued_at == 1.0
            await stream.next("heartbeat")
            unit.stop.set()
            assert (await stream.next("leaving")).reason == "told to stop"
            await asyncio.wait_for(unit.task, WAIT_S)

    run(work())


def test_a_token_authenticates_the_stream_and_a_wrong_one_ends_the_unit():
    async def work():
        head = await ScriptedHead(TOKEN).start()
        unit = Unit(head.port, credentials=TOKEN)
        stream = await head.attached()
        await stream.send(assign=assign())
        await stream.collect(1)
        await unit.end()
        stranger = Unit(head.port, credentials=dataclasses.replace(PLAIN, token="wrong"))
        with pytest.raises(GenerationError, match=r"head 127\.0\.0\.1:\d+ turned this unit away: UNAUTHENTICATED"):
            await asyncio.wait_for(stranger.task, WAIT_S)
        await head.kill()

    run(work())


def test_the_engine_goes_on_without_a_head_and_the_next_one_gets_everything_not_forgotten():
    async def work():
        head = await ScriptedHead().start()
        unit = Unit(head.port, settings=config(step_s=0.03))
        stream = await head.attached()
        await stream.send(assign=assign(ks=[0, 1], max_tokens=2))
        await stream.send(assign=assign("slow", ks=[0], max_tokens=10))
        await stream.send(assign=assign("slower", ks=[0], max_tokens=100))
        await stream.collect(2)
        await stream.send(forget=pb.Forget(ids=ids(ks=[0])))
        await stream.send(cancel=pb.Cancel(ids=ids("nobody")))
        await stream.next("heartbeat")
        await head.kill()
        head = await ScriptedHead().start(head.port)
        stream = await head.attached()
        assert (stream.register.run_id, stream.register.session) == ("r", "s1")
        running = {wire.sample_id(message) for message in stream.register.running}
        assert SampleId("slower", 0) in running <= {SampleId("slow", 0), SampleId("slower", 0)}
        samples = await stream.collect(3)
        assert samples.keys() == {SampleId("p", 1), SampleId("slow", 0), SampleId("slower", 0)}
        assert {len(copies) for copies in samples.values()} == {1}
        assert len(samples[SampleId("slower", 0)][0].token_ids) == 100
        await unit.end()
        await head.kill()

    run(work())


def test_what_is_finished_already_is_sent_again_when_assigned_again():
    async def work():
        async with pair() as (_head, _unit, stream):
            await stream.send(assign=assign())
            await stream.collect(1)
            await stream.send(assign=assign())
            await stream.next("finished")
            first, second = stream.samples[SampleId("p", 0)]
            assert first == second

    run(work())


def test_a_version_is_fetched_beside_generation_and_a_commit_splits_the_spans():
    async def work():
        async with pair(settings=config(step_s=0.02)) as (_head, _unit, stream):
            server, stage = await weights_at(4)
            await stream.send(stage=stage)
            staged = await stream.weights(pb.UnitWeights.STAGED)
            assert staged.version == 4
            assert 0 < staged.stage_started_at <= staged.staged_at
            await stream.send(commit=commit_of(stage))
            committed = await stream.weights(pb.UnitWeights.COMMITTED)
            assert committed.committed_at >= committed.staged_at == staged.staged_at
            await stream.send(assign=assign(max_tokens=100))
            other, stage = await weights_at(5)
            await stream.send(stage=stage)
            await stream.weights(pb.UnitWeights.STAGED)
            await stream.send(commit=commit_of(stage))
            await stream.weights(pb.UnitWeights.COMMITTED)
            (sample,) = (await stream.collect(1))[SampleId("p", 0)]
            assert [span.version for span in sample.spans] == [4, 5]
            assert (sample.spans[0].start, sample.spans[1].end) == (0, 100)
            assert sample.spans[0].end == sample.spans[1].start
            await server.stop()
            await other.stop()

    run(work())


def test_a_corrupt_version_fails_by_name_and_the_unit_stays_on_the_old_one():
    async def work():
        async with pair() as (head, unit, stream):
            good, stage = await weights_at(1)
            await stream.send(stage=stage)
            await stream.weights(pb.UnitWeights.STAGED)
            await stream.send(commit=commit_of(stage))
            await stream.weights(pb.UnitWeights.COMMITTED)
            bad, corrupt = await weights_at(2, corrupt=True)
            await stream.send(stage=corrupt)
            failed = await stream.weights(pb.UnitWeights.FAILED)
            assert failed.version == 2
            assert "v2: digest of `w` does not match" in failed.error
            await stream.send(commit=commit_of(corrupt))
            failed = await stream.weights(pb.UnitWeights.FAILED)
            assert "v2 cannot be committed" in failed.error
            await stream.send(assign=assign())
            (sample,) = (await stream.collect(1))[SampleId("p", 0)]
            assert [span.version for span in sample.spans] == [1]
            await head.kill()
            head_again = await ScriptedHead().start(head.port)
            stream = await head_again.attached()
            assert stream.register.version == 1
            retried, sound = await weights_at(2)
            await stream.send(stage=sound)
            assert (await stream.weights(pb.UnitWeights.STAGED)).version == 2
            await unit.end()
            for server in (good, bad, retried):
                await server.stop()
            await head_again.kill()

    run(work())


def test_one_number_from_two_trainers_is_two_versions():
    async def work():
        async with pair() as (_head, _unit, stream):
            old, first = await weights_at(3, transfer_id="old")
            new, second = await weights_at(3, transfer_id="new")
            await stream.send(stage=first)
            assert (await stream.weights(pb.UnitWeights.STAGED)).transfer_id == "old"
            await stream.send(commit=commit_of(second))
            refused = await stream.weights(pb.UnitWeights.FAILED)
            assert refused.transfer_id == "new" and "not what is staged" in refused.error
            await stream.send(commit=commit_of(first))
            assert (await stream.weights(pb.UnitWeights.COMMITTED)).transfer_id == "old"
            await stream.send(stage=second)
            assert (await stream.weights(pb.UnitWeights.STAGED)).transfer_id == "new"
            await stream.send(commit=commit_of(first))
            refused = await stream.weights(pb.UnitWeights.FAILED)
            assert refused.transfer_id == "old"
            await stream.send(commit=commit_of(second))
            assert (await stream.weights(pb.UnitWeights.COMMITTED)).transfer_id == "new"
            for server in (old, new):
                await server.stop()

    run(work())


def test_an_unsound_manifest_is_refused_before_any_fetch():
    async def work():
        async with pair() as (_head, _unit, stream):
            server, stage = await weights_at(1)
            stage.manifest.tensors[0].nbytes += 1
            await stream.send(stage=stage)
            assert "`w` lists 100001 bytes" in (await stream.weights(pb.UnitWeights.FAILED)).error
            await server.stop()

    run(work())


def test_a_newer_version_takes_the_place_of_one_still_on_its_way():
    async def work():
        async with pair() as (_head, _unit, stream):
            server, gone = await weights_at(1)
            await server.stop()  # its source never answers, so version 1 stays on its way
            await stream.send(stage=gone)
            await stream.weights(pb.UnitWeights.STAGING)
            server, stage = await weights_at(2)
            await stream.send(stage=stage)
            assert (await stream.weights(pb.UnitWeights.STAGED)).version == 2
            await stream.send(stage=stage)
            assert (await stream.weights(pb.UnitWeights.STAGED)).version == 2
            for _ in range(2):
                await stream.send(commit=commit_of(stage))
                assert (await stream.weights(pb.UnitWeights.COMMITTED)).version == 2
            await stream.send(stage=stage)  # what a new head asks that does not know
            assert (await stream.weights(pb.UnitWeights.STAGED)).version == 2
            await stream.send(commit=commit_of(stage))
            assert (await stream.weights(pb.UnitWeights.COMMITTED)).version == 2
            await server.stop()

    run(work())


def test_cancel_and_a_new_session_stop_what_runs():
    async def work():
        async with pair(settings=config(slots=1, step_s=0.02)) as (_head, unit, stream):
            await stream.send(assign=assign("old", ks=[0, 1, 2], max_tokens=100))
            await stream.send(cancel=pb.Cancel(ids=ids("old", [0, 1])))
            await stream.send(assign=assign("new", max_tokens=3, session="s2"))
            finished = await stream.next("finished")
            assert (finished.session, [wire.sample_id(s.id) for s in finished.samples]) == ("s2", [SampleId("new", 0)])
            assert (unit.engine.stats().running, unit.engine.stats().waiting) == (0, 0)

    run(work())


def test_what_the_engine_refuses_is_a_typed_failure():
    async def work():
        async with pair() as (_head, _unit, stream):
            await stream.send(assign=assign(max_tokens=1000))
            (failure,) = (await stream.next("finished")).failures
            assert (wire.sample_id(failure.id), failure.code) == (SampleId("p", 0), pb.Failure.ENGINE)
            assert "1000 completion tokens" in failure.message
            assert "unit-0" in failure.message
            await stream.send(assign=assign())
            await stream.collect(1)

    run(work())


class DyingEngine(EmulatedEngine):
    """Breaks when it is told to, from inside its own timer."""

    def break_now(self):
        self._batch.advance = lambda _now: 1 / 0


def test_an_engine_that_dies_takes_the_unit_with_it_and_the_head_hears_why():
    async def work():
        async with pair(engine=DyingEngine(config(step_s=0.02))) as (_head, unit, stream):
            await stream.send(assign=assign(max_tokens=50))
            await stream.next("heartbeat")
            unit.engine.break_now()
            assert "the emulated engine died: ZeroDivisionError" in (await stream.next("leaving")).reason
            with pytest.raises(EngineError, match="the emulated engine died"):
                await asyncio.wait_for(unit.task, WAIT_S)
            assert stream.samples == {}

    run(work())


def test_a_refused_unit_ends_with_the_reason():
    async def work():
        head = await ScriptedHead(first=pb.HeadCommand(refuse=pb.Refuse(reason="wrong model"))).start()
        unit = Unit(head.port)
        with pytest.raises(GenerationError, match="refused unit unit-0: wrong model"):
            await asyncio.wait_for(unit.task, WAIT_S)
        await head.kill()

    run(work())


def test_a_head_that_never_comes_or_never_answers_is_given_up_with_what_was_waited_for():
    async def work():
        head = await ScriptedHead(first=pb.HeadCommand()).start()
        silent = Unit(head.port, settings=config(reconnect_s=0.3, unit_timeout_s=0.2))
        with pytest.raises(GenerationError, match=r"unit unit-0: no head at 127\.0\.0\.1:\d+ for 0\.3 s.*no answer"):
            await asyncio.wait_for(silent.task, WAIT_S)
        await head.kill()
        absent = Unit(head.port, settings=config(reconnect_s=0.3))
        with pytest.raises(GenerationError, match=r"no head at .*\(sgs.reconnect_s\); last: UNAVAILABLE"):
            await asyncio.wait_for(absent.task, WAIT_S)

    run(work())


def test_a_stop_while_no_head_is_there_ends_quietly():
    async def work():
        head = await ScriptedHead().start()
        await head.kill()
        unit = Unit(head.port)
        await asyncio.sleep(0.3)
        await unit.end()

    run(work())
