"""Scores completions in worker processes. What cannot be scored is None, not 0: it is left out, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.config import RewardConfig
from services.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_BATCH = 64
TIMEOUT_SLICES = 8


class _Call(NamedTuple):
    request: list[Any]
    result: asyncio.Future[float | None]


class _Gone(Exception):
    """The worker ended or ran past the deadline; `kind` is the reason counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Scorer:
    """`config.workers` processes that run the reward function, each call bounded by `config.timeout_s` seconds.

    `counts` says what became of the calls: `scored`, `timeout`, `crash`, `raised`, `not_a_number`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._queue: deque[_Call] = deque()
        self._arrived = asyncio.Event()
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._reasons: set[tuple[str, str]] = set()
        self._broken: str | None = None
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the workers. Raises `ConfigError` when the reward function cannot be loaded."""
        self._workers = [_Worker(self._config) for _ in range(self._config.workers)]
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    async def score(
        self, prompt_text: str, completion_text: str, answer: Any, row_extra: dict[str, Any]
    ) -> float | None:
        """The reward of one completion, or None when there is none: deadline, crash, exception, no finite number.

        Raises `RewardError` when a worker that ended cannot be started again.
        """
        if self._broken is not None:
            raise RewardError(self._broken)
        if not self._tasks:
            raise RewardError("the scorer is not running")
        result: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Call([prompt_text, completion_text, answer, row_extra], result))
        self._arrived.set()
        return await result

    async def close(self) -> None:
        """Kill the workers; calls still waiting are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers = []
        while self._queue:
            self._queue.popleft().result.cancel()

    async def _serve(self, worker: _Worker) -> None:
        batch: list[_Call] = []
        try:
            while True:
                batch = await self._next_batch()
                await self._run(worker, batch)
        except (RewardError, ConfigError) as error:
            self._fail(str(error), batch)
        except asyncio.CancelledError:
            for call in batch:
                call.result.cancel()
            raise

    async def _next_batch(self) -> list[_Call]:
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        share = -(-len(self._queue) // len(self._workers))
        return [self._queue.popleft() for _ in range(min(share, MAX_BATCH))]

    async def _run(self, worker: _Worker, batch: Sequence[_Call]) -> None:
        """Answer every call of `batch`; when the worker goes, its current call is the culprit and the rest go on."""
        waiting = deque(batch)
        while waiting:
            worker.send([call.request for call in waiting])
            try:
                while waiting:
                    reply = await worker.reply(self._config.timeout_s)
                    self._answer(waiting.popleft(), reply)
            except _Gone as gone:
                self._answer(waiting.popleft(), {"failed": gone.kind, "message": str(gone)})
                await worker.kill()
                await worker.start()

    def _answer(self, call: _Call, reply: dict[str, Any]) -> None:
        score: float | None = reply.get("score")
        kind = "scored" if score is not None else reply["failed"]
        self.counts[kind] += 1
        if score is None and (kind, reply["message"]) not in self._reasons:
            self._reasons.add((kind, reply["message"]))
            logger.warning("a sample is left out, its reward %s: %s", kind.replace("_", " "), reply["message"])
        if not call.result.done():
            call.result.set_result(score)

    def _fail(self, message: str, batch: Sequence[_Call]) -> None:
        self._broken = f"a reward worker ended and cannot be started again: {message}"
        for call in [*batch, *self._queue]:
            if not call.result.done():
                call.result.set_exception(RewardError(self._broken))
        self._queue.clear()


class _Worker:
    """One worker process and its pipes."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises `ConfigError` with the worker's own words, `RewardError` when it does not come up."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # what the function starts dies with the worker; Ctrl-C does not reach it
        )
        self._write(self._config.model_dump(mode="json"))
        try:
            reply = await self.reply(START_TIMEOUT_S)
        except _Gone as gone:
            await self.kill()
            raise RewardError(f"reward worker: {gone} while loading the reward function") from None
        if "error" in reply:
            await self.kill()
            raise ConfigError(reply["error"])

    def send(self, calls: list[list[Any]]) -> None:
        """Hand over a batch; one reply per call will come, in order."""
        self._write({"calls": calls})

    async def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next reply. Raises `_Gone` when the worker ends, or is silent for `timeout_s` seconds.

        Time is counted in slices, so that a stall of this process's own event loop does not count as the worker's.
        """
        process = self._running()
        assert process.stdout is not None
        line = asyncio.ensure_future(process.stdout.readline())
        try:
            for _ in range(TIMEOUT_SLICES):
                done, _pending = await asyncio.wait({line}, timeout=timeout_s / TIMEOUT_SLICES)
                if done:
                    break
            else:
                raise _Gone("timeout", f"no result within {timeout_s:g} s")
        finally:
            line.cancel()
        data = line.result()
        if not data.endswith(b"\n"):
            code = await process.wait()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise _Gone("crash", f"the worker ended ({how})")
        reply: dict[str, Any] = json.loads(data)
        return reply

    async def kill(self) -> None:
        """End the process and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _write(self, message: dict[str, Any]) -> None:
        # Not drained: one batch is out at a time, and a worker that is gone shows where replies are read.
        stdin = self._running().stdin
        assert stdin is not None
        stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RewardError("the reward worker is not running")
        return self._process


def _environment() -> dict[str, str]:
    """Ours, one thread, and the directory of our packages where they are not installed."""
    environment = dict(os.environ, PYTHONSAFEPATH="1", OMP_NUM_THREADS="1")
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
