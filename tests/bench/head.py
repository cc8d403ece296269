"""Samples per second through one head process, what a sample costs it, and what it holds per sample in flight.

Run `python tests/bench/head.py`. Units are scripted: they answer every sample at once with `TOKENS` tokens, so that
the head and the wire are all there is. The head, the units and the rank each have a process of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from peers import ScriptedRank, ScriptedUnit, head_config  # type: ignore[attr-defined,unused-ignore]

from services.pb import streamrl_pb2 as pb
from services.samples import SampleId
from services.sgs.server import serve

TOKENS = 128
PROMPT_TOKENS = 64
N = 8
PROMPTS = 500
ROUNDS = 3
SLOTS = 64
HELD_PROMPTS = 2500


class FastUnit(ScriptedUnit):
    """Answers each sample with a message of its own, as samples finish one by one."""

    async def finish(self, ids: Iterable[SampleId]) -> None:
        run_id, session = self.session
        for sample_id in ids:
            sample = pb.Sample(
                id=pb.SampleId(prompt_id=sample_id.prompt_id, k=sample_id.k),
                token_ids=range(1000, 1000 + TOKENS),
                logprobs=[-0.5] * TOKENS,
                finish_reason=pb.FINISH_REASON_STOP,
                spans=[pb.VersionSpan(version=0, start=0, end=TOKENS)],
                unit_id=self.unit_id,
            )
            await self.send(finished=pb.Finished(run_id=run_id, session=session, samples=[sample]))


def run_head(pipe: Connection) -> None:
    logging.disable(logging.WARNING)
    asyncio.run(serve(head_config(lookahead=2, unit_timeout_s=600.0), "127.0.0.1", 0, pipe.send, asyncio.Event()))


def run_units(address: str, count: int, answer: bool, pipe: Connection) -> None:
    async def main() -> None:
        units = [FastUnit(address, f"u{i:02}", slots=SLOTS, auto=answer) for i in range(count)]
        for unit in units:
            await unit.attach()
        pipe.send(count)
        await asyncio.to_thread(pipe.recv)
        for unit in units:
            await unit.close()

    asyncio.run(main())


async def measure(address: str, name: str, head: psutil.Process) -> tuple[float, float]:
    """Samples per second and head CPU milliseconds per sample, acknowledged as a trainer does."""
    rank = ScriptedRank(address)
    prompts = {f"{name}/{i}": PROMPT_TOKENS for i in range(PROMPTS)}
    cpu, began, acknowledged = sum(head.cpu_times()[:2]), time.monotonic(), 0
    rank.request(prompts, n=N, stream=name)
    while acknowledged < PROMPTS * N:
        await asyncio.sleep(0.05)
        ids = rank.samples[acknowledged:]
        if ids:
            await rank.acknowledge(ids, stream=name)
            acknowledged += len(ids)
    await rank.finished()
    seconds, spent = time.monotonic() - began, sum(head.cpu_times()[:2]) - cpu
    await rank.close()
    return PROMPTS * N / seconds, 1000 * spent / (PROMPTS * N)


async def hold(address: str, head: psutil.Process) -> float:
    """Resident bytes of the head per sample that is queued or running."""
    rank, before = ScriptedRank(address), head.memory_info().rss
    rank.request({f"held/{i}": PROMPT_TOKENS for i in range(HELD_PROMPTS)}, n=N, stream="held")
    await asyncio.sleep(3.0)
    held = head.memory_info().rss - before
    await rank.break_stream()
    await rank.close()
    return held / (HELD_PROMPTS * N)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    result: dict[str, float] = {}
    print(f"{'units':>6} {'samples/s':>12} {'head CPU ms/sample':>20}   ({PROMPTS * N} samples of {TOKENS} tokens)")
    for count in (1, 8, 64, 0):
        head_pipe, head_end = spawn.Pipe()
        head = spawn.Process(target=run_head, args=(head_end,), daemon=True)
        head.start()
        address = f"127.0.0.1:{head_pipe.recv()}"
        units_pipe, units_end = spawn.Pipe()
        units = spawn.Process(target=run_units, args=(address, count or 4, count > 0, units_end), daemon=True)
        units.start()
        units_pipe.recv()
        watched = psutil.Process(head.pid)
        if count:
            runs = [asyncio.run(measure(address, f"warm{count}/{i}", watched)) for i in range(ROUNDS)][1:]
            rate, cost = max(run[0] for run in runs), min(run[1] for run in runs)
            print(f"{count:>6} {rate:>12.0f} {cost:>20.3f}")
            result[f"samples_per_s_{count}"] = round(rate, 1)
            result["cpu_ms_per_sample"] = round(cost, 4)
        else:
            result["bytes_per_sample"] = round(asyncio.run(hold(address, watched)))
            print(f"held: {result['bytes_per_sample']} bytes per sample in flight ({HELD_PROMPTS} prompts x {N})")
        units_pipe.send("end")
        units.join(10)
        head.terminate()
        head.join(10)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
