"""The daemon thread that owns the model, and the mailbox through which the event loop talks to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from services.config import Config
from services.errors import ModelError, StreamRLError
from services.unit.engines.base import EngineStats, SampleRequest
from services.unit.engines.embedded import lean
from services.unit.engines.embedded.core import Core, Outcome
from services.unit.engines.embedded.forward import Forward
from services.unit.engines.embedded.generic import GenericForward
from services.unit.engines.embedded.lean import LeanForward

log = logging.getLogger(__name__)

RATE_SECONDS = 1.0


class Submit(NamedTuple):
    ticket: int
    request: SampleRequest


class Cancel(NamedTuple):
    ticket: int


class Commit(NamedTuple):
    """`done` gets the seconds that decoding paused."""

    version: int
    staged: dict[str, torch.Tensor]
    done: Future[float]


class Close(NamedTuple):
    pass


Command = Submit | Cancel | Commit | Close


def load_model(path: Path | None, dtype: str, device: str) -> Any:
    """The causal LM of a Hugging Face directory, for inference. `device`: cpu, cuda or auto. Raises `ModelError`."""
    if path is None or not (path / "config.json").is_file():
        raise ModelError(f"model.path: {path} is not a Hugging Face model directory (no config.json)")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
        return model.to(device).eval().requires_grad_(False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model.path: {path} cannot be loaded as a causal LM: {reason}") from error


def build_forward(model: Any, rows: int, positions: int, generic: bool) -> Forward:
    """The lean forward where it computes this model, the generic one elsewhere or when asked for."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and positions > limit:
        raise ModelError(f"engine.max_sequence_tokens is {positions}, the model's max_position_embeddings {limit}")
    if not generic and lean.supports(model):
        return LeanForward(model, rows, positions)
    return GenericForward(model, rows, positions)


class DecodeThread(threading.Thread):
    """Runs commands between decode steps, and decodes while there are samples.

    `deliver` and `failed` are called on this thread; `ready` gets the model once it is loaded.
    """

    def __init__(
        self,
        config: Config,
        generic: bool,
        deliver: Callable[[list[Outcome]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="embedded-engine", daemon=True)
        self.ready: Future[Any] = Future()
        self._config, self._generic, self._deliver, self._failed = config, generic, deliver, failed
        self._arrived = threading.Condition()
        self._inbox: list[Command] = []
        self._dead: BaseException | None = None
        self._stats = EngineStats(0, 0, 0, 0.0)
        self._rate, self._counted, self._counted_from = 0.0, 0, time.monotonic()

    def send(self, command: Command) -> None:
        with self._arrived:
            if self._dead is not None and isinstance(command, Commit):
                command.done.set_exception(self._dead)
            self._inbox.append(command)
            self._arrived.notify()

    def stats(self) -> EngineStats:
        with self._arrived:
            queued = sum(isinstance(command, Submit) for command in self._inbox)
        seen = self._stats
        return EngineStats(seen.running, seen.waiting + queued, seen.kv_tokens_used, seen.tokens_per_s)

    def run(self) -> None:
        try:
            core = self._build()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        try:
            with torch.inference_mode():
                while self._turn(core):
                    pass
        except BaseException as error:
            log.exception("the decode loop failed")
            with self._arrived:
                self._dead = error
                left, self._inbox = self._inbox, []
            for command in left:
                if isinstance(command, Commit):
                    command.done.set_exception(error)
            self._failed(error)

    def _build(self) -> Core:
        engine = self._config.engine
        torch.set_num_threads(engine.threads)
        model = load_model(self._config.model.path, self._config.model.dtype, engine.device)
        with torch.inference_mode():
            forward = build_forward(model, engine.slots, engine.max_sequence_tokens, self._generic)
        log.info("model %s on %s, %s", type(model).__name__, model.device, type(forward).__name__)
        core = Core(model, forward, engine.slots, engine.max_sequence_tokens, time.time)
        self.ready.set_result(model)
        return core

    def _turn(self, core: Core) -> bool:
        """Commands first, then one decode step; False after `Close`."""
        with self._arrived:
            while not self._inbox and core.idle:
                self._note(core)
                self._arrived.wait()
            commands, self._inbox = self._inbox, []
        for position, command in enumerate(commands):
            if isinstance(command, Close):
                return False
            try:
                self._obey(core, command)
            except BaseException:
                with self._arrived:
                    self._inbox = commands[position + 1 :] + self._inbox
                raise
        outcomes = core.step()
        self._counted += core.running + len(outcomes)
        self._note(core)
        if outcomes:
            self._deliver(outcomes)
        return True

    def _obey(self, core: Core, command: Command) -> None:
        if isinstance(command, Submit):
            core.submit(command.ticket, command.request)
        elif isinstance(command, Cancel):
            core.cancel(command.ticket)
        elif isinstance(command, Commit):
            begun = time.perf_counter()
            try:
                core.commit(command.version, command.staged)
            except BaseException as error:
                command.done.set_exception(error)
                raise
            command.done.set_result(time.perf_counter() - begun)

    def _note(self, core: Core) -> None:
        now = time.monotonic()
        if core.idle:
            self._rate, self._counted, self._counted_from = 0.0, 0, now
        elif now - self._counted_from >= RATE_SECONDS:
            self._rate = self._counted / (now - self._counted_from)
            self._counted, self._counted_from = 0, now
        self._stats = EngineStats(core.running, len(core.waiting), core.kv_tokens(), self._rate)


def one_line(error: BaseException) -> str:
    """An error as one line, with its class unless it is one of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, StreamRLError) else f"{type(error).__name__}: {text}"
