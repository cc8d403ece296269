"""A real head and real unit processes with the emulated engine: killed or frozen in the middle of an iteration."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import yaml
from peers import DEADLINE_S, Peers, head_and_peers, head_config, until

from services import wire
from services.pb import streamrl_pb2 as pb
from services.rpc import Credentials
from services.samples import SampleId
from services.sgs.server import HeadServer
from services.transport.grpc import GrpcWeightServer
from services.transport.manifest import Source
from services.transport.packing import pack

UNIT = """
import sys
from pathlib import Path
from services.commands.serve import serve_unit
from services.config import load_config
serve_unit(load_config(Path(sys.argv[1])), sys.argv[2], sys.argv[3], None)
"""


HEAD = """
import sys
from pathlib import Path
from services.commands.serve import serve_head
from services.config import load_config
serve_head(load_config(Path(sys.argv[1])), "127.0.0.1", 0, Path(sys.argv[2]))
"""


def unit_config(path, step_s, **sgs):
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": "unused"},
                "data": {"train": {"path": "unused.jsonl"}},
                "reward": {"fn": "unused:unused"},
                "sampling": {"max_tokens": 64},
                "security": {"token_env": None},
                "sgs": sgs,
                "engine": {
                    "kind": "emulated",
                    "slots": 4,
                    "max_sequence_tokens": 128,
                    "emulated": {"ptl_base_s": step_s, "lengths": "uniform", "mean": 20},
                },
            }
        )
    )
    return path


def start_unit(config_path, address, unit_id):
    return subprocess.Popen([sys.executable, "-c", UNIT, str(config_path), address, unit_id])


def start_head(config_path, ready):
    return subprocess.Popen([sys.executable, "-c", HEAD, str(config_path), str(ready)])


async def publish(stub, session):
    """Serve version 0 and tell the head of it."""
    values = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    manifest, body = pack(0, f"{session}-0", [("w", "uint8", values.shape, values)])
    server = GrpcWeightServer(Credentials(None, None, None, 4 << 20))
    server.put(manifest, body)
    port = await server.start("127.0.0.1", 0)
    request = pb.PublishRequest(
        run_id="run",
        session=session,
        manifest=wire.manifest_pb(dataclasses.replace(manifest, sources=(Source("grpc", f"127.0.0.1:{port}"),))),
        commit=pb.COMMIT_POLICY_BOUNDARY,
        deadline_s=DEADLINE_S,
    )
    await stub.PublishWeights(request, timeout=DEADLINE_S)
    return server, request


async def committed(stub, units):
    """Wait until `units` units are attached and on version 0."""
    while True:
        reply = await stub.WeightStatus(
            pb.WeightStatusRequest(version=0, wait_s=1, until=pb.UnitWeights.COMMITTED), timeout=DEADLINE_S
        )
        if [unit.state for unit in reply.units] == [pb.UnitWeights.COMMITTED] * units:
            return
        await asyncio.sleep(0.05)


def test_a_killed_unit_costs_no_sample_and_doubles_none(tmp_path):
    async def work():
        async with head_and_peers(lookahead=2) as (server, peers):
            path = unit_config(tmp_path / "unit.yaml", step_s=0.01)
            units = [start_unit(path, peers.address, name) for name in ("doomed", "survivor")]
            try:
                rank = peers.rank()
                weights, _ = await publish(rank.stub, "s1")
                await asyncio.wait_for(committed(rank.stub, 2), DEADLINE_S)
                prompts = {f"p{i}": 5 for i in range(12)}
                rank.request(prompts, n=4, min_version=0, max_tokens=64)
                await until(lambda: len(rank.samples) >= 10)
                assert server.head.ledger.load("doomed").samples > 0
                units[0].send_signal(signal.SIGKILL)
                await rank.finished()
                assert Counter(rank.samples) == Counter(SampleId(p, k) for p in prompts for k in range(4))
                assert rank.failures == []
                units[1].send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(units[1].wait, DEADLINE_S) == 0
                await weights.stop()
            finally:
                for unit in units:
                    unit.kill()
                    unit.wait()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_frozen_unit_costs_no_sample_and_does_no_harm_once_it_is_thawed(tmp_path):
    async def work():
        async with head_and_peers(lookahead=2, heartbeat_s=0.1, unit_timeout_s=1.0) as (server, peers):
            path = unit_config(tmp_path / "unit.yaml", step_s=0.02)
            units = [start_unit(path, peers.address, name) for name in ("frozen", "awake")]
            try:
                rank = peers.rank()
                weights, _ = await publish(rank.stub, "s1")
                await asyncio.wait_for(committed(rank.stub, 2), DEADLINE_S)
                first = {f"p{i}": 5 for i in range(12)}
                rank.request(first, n=4, min_version=0, max_tokens=64)
                await until(lambda: len(rank.samples) >= 5 and server.head.ledger.load("frozen").samples > 0)
                units[0].send_signal(signal.SIGSTOP)
                await rank.finished()
                assert Counter(rank.samples) == Counter(SampleId(p, k) for p in first for k in range(4))
                assert rank.failures == [] and list(server.head.units) == ["awake"]

                units[0].send_signal(signal.SIGCONT)
                await until(lambda: "frozen" in server.head.units)
                rank.samples.clear()
                second = {f"q{i}": 5 for i in range(12)}
                rank.request(second, n=4, min_version=0, max_tokens=64, stream="train/1")
                await rank.finished()
                assert Counter(rank.samples) == Counter(SampleId(p, k) for p in second for k in range(4))
                assert rank.failures == [] and rank.overdue == []
                assert server.head.units["frozen"].finished > 0, "it works again"
                for unit in units:
                    unit.send_signal(signal.SIGTERM)
                assert [await asyncio.to_thread(unit.wait, DEADLINE_S) for unit in units] == [0, 0]
                await weights.stop()
            finally:
                for unit in units:
                    unit.kill()
                    unit.wait()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_head_that_was_frozen_goes_on_with_its_units_and_streams(tmp_path):
    async def work():
        path = unit_config(tmp_path / "all.yaml", step_s=0.02, heartbeat_s=0.1, unit_timeout_s=1.0)
        ready = tmp_path / "head.json"
        processes = [start_head(path, ready)]
        peers = None
        try:
            await until(ready.exists)
            address = json.loads(ready.read_text())["address"]
            processes.append(start_unit(path, address, "unit"))
            peers = Peers(address)
            rank = peers.rank()
            weights, _ = await publish(rank.stub, "s1")
            await asyncio.wait_for(committed(rank.stub, 1), DEADLINE_S)
            prompts = {f"p{i}": 5 for i in range(12)}
            rank.request(prompts, n=4, min_version=0, max_tokens=64)
            await until(lambda: len(rank.samples) >= 5)
            processes[0].send_signal(signal.SIGSTOP)
            await asyncio.sleep(2.0)
            processes[0].send_signal(signal.SIGCONT)
            await rank.finished()
            assert Counter(rank.samples) == Counter(SampleId(p, k) for p in prompts for k in range(4))
            assert rank.failures == [] and rank.overdue == []
            (unit,) = (await rank.stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)).units
            assert unit.finished >= len(rank.samples), "the same attachment all along"
            await weights.stop()
        finally:
            for process in processes:
                process.kill()
                process.wait()
            if peers is not None:
                await peers.close()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_head_that_is_replaced_in_mid_iteration_costs_no_sample(tmp_path):
    async def work():
        async with head_and_peers(lookahead=0) as (server, peers):
            unit = start_unit(unit_config(tmp_path / "unit.yaml", step_s=0.02), peers.address, "unit")
            try:
                rank = peers.rank()
                weights, published = await publish(rank.stub, "s1")
                await asyncio.wait_for(committed(rank.stub, 1), DEADLINE_S)
                prompts = {f"p{i}": 5 for i in range(4)}
                rank.request(prompts, n=4, min_version=0, max_tokens=64)
                await until(lambda: len(rank.samples) >= 3)
                running = {SampleId(p, k) for p in prompts for k in range(4)} - set(rank.samples)
                await server.stop()
                await rank.finished()
                successor = HeadServer(head_config())
                await successor.start("127.0.0.1", int(peers.address.rpartition(":")[2]))
                await until(lambda: "unit" in successor.head.units)
                claimed = {wire.sample_id(m) for m in successor.head.units["unit"].register.running}
                assert claimed <= running
                again = peers.rank()
                await again.stub.PublishWeights(published, timeout=DEADLINE_S)
                again.request(prompts, n=4, min_version=0, max_tokens=64, have=rank.samples)
                await again.finished()
                assert Counter(rank.samples + again.samples) == Counter(
                    SampleId(p, k) for p in prompts for k in range(4)
                )
                assert again.failures == []
                await successor.stop()
                await weights.stop()
            finally:
                unit.kill()
                unit.wait()

    asyncio.run(asyncio.wait_for(work(), 120))
