"""Runs head, units and trainer as one: starts them, replaces services that die, and ends all of them together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from services import processes
from services.errors import EXIT_FAILED, EXIT_USAGE
from services.jsonlines import JsonLines
from services.launch.child import Child, describe_exit, last_error
from services.launch.failures import trainer_failure
from services.launch.restarts import RestartBudget
from services.launch.rundir import RunDir
from services.progress import View

HEAD_READY_S = 60.0
CHECKPOINT_GRACE_S = 20.0
"""For a trainer that its user stopped: it finishes what it is at and saves."""
STOP_GRACE_S = 4.0
"""For everything else, ranks that outlive another one included: there is nothing left to save."""
_POLL_S = 0.1
_EXIT_BY_SIGNAL = 128


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `message` is one line, empty when all went well."""

    exit_code: int
    message: str = ""


class Interrupts:
    """Counts Ctrl-C and SIGTERM instead of dying from them; a context manager."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Interrupts:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[sig] = signal.signal(sig, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def exit_code(self) -> int:
        return _EXIT_BY_SIGNAL + int(self.received[0])


@dataclass
class Service:
    """A child that is started again when it dies."""

    child: Child
    budget: RestartBudget = field(default_factory=RestartBudget)
    start_at: float | None = None
    was_ready: bool = False
    ready: Callable[[], bool] = lambda: True
    arguments: Callable[[], Sequence[str]] = tuple


class Supervisor:
    """`head` and `units` may be absent when they run elsewhere; `trainer` decides when the run is over."""

    def __init__(
        self,
        run: RunDir,
        view: View,
        interrupts: Interrupts,
        trainer: Service,
        head: Service | None = None,
        units: Sequence[Service] = (),
    ) -> None:
        self._run = run
        self._view = view
        self._interrupts = interrupts
        self._trainer = trainer.child
        self._trainer_arguments = trainer.arguments
        self._head = head
        self._units = units
        self._rows = JsonLines(run.metrics)
        self._rows.read()  # an earlier life of this run directory is not news
        self._trained = False

    def supervise(self) -> Outcome:
        """Run to the end; when this returns no process of the run is left."""
        try:
            outcome = self._until_over()
        except BaseException as error:
            self._run.ended.write_text(f"the supervisor failed: {error!r}\n")
            raise
        finally:
            stop_everything(self._children(), self._interrupts)
        self._show()
        return outcome

    def _until_over(self) -> Outcome:
        if self._head is not None:
            if self._head.child.pid is None:
                self._head.child.start()
            outcome = self._await_head(self._head)
            if outcome is not None:
                return self._end(outcome)
        self._trainer.start(*self._trainer_arguments())  # first: it takes longest until it can work
        for unit in self._units:
            unit.child.start(*unit.arguments())
        while True:
            outcome = self._check()
            if outcome is not None:
                return self._end(outcome)
            self._show()
            time.sleep(_POLL_S)

    def _await_head(self, head: Service) -> Outcome | None:
        deadline = time.monotonic() + HEAD_READY_S
        while not head.ready():
            code = head.child.exit_code()
            if code is not None:
                return self._gave_up(head.child, code)
            if self._interrupts.received:
                return self._interrupted()
            if time.monotonic() > deadline:
                return Outcome(EXIT_FAILED, f"head: not ready after {HEAD_READY_S:.0f} s (see {head.child.log})")
            time.sleep(_POLL_S)
        head.was_ready = True
        return None

    def _check(self) -> Outcome | None:
        if self._interrupts.received:
            return self._interrupted()
        code = self._trainer.exit_code()
        if code == 0:
            return Outcome(0)
        if code is not None:
            failure = trainer_failure(self._run, code, self._trainer.log)
            return Outcome(failure.exit_code, failure.message)
        for service in self._units_and_head():
            outcome = self._keep_alive(service)
            if outcome is not None:
                return outcome
        return None

    def _keep_alive(self, service: Service) -> Outcome | None:
        now, child = time.monotonic(), service.child
        if service.start_at is not None:
            if now >= service.start_at:
                service.start_at = None
                child.restarts += 1
                child.start(*service.arguments())
            return None
        code = child.exit_code()
        if code is None:
            service.was_ready = service.was_ready or service.ready()
            return None
        delay = service.budget.next_delay(now)
        if delay is None or (code == EXIT_USAGE and not service.was_ready):
            return self._gave_up(child, code)
        self._view.note(f"{child.name} {describe_exit(code)}; starting it again (restart {child.restarts + 1})")
        service.start_at = now + delay
        return None

    def _gave_up(self, child: Child, code: int) -> Outcome:
        said = last_error(child.log) if code > 0 else None
        often = f" after {child.restarts} restarts" if child.restarts else ""
        message = f"{child.name} {describe_exit(code)}{often} (see {child.log})"
        return Outcome(EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED, said or message)

    def _interrupted(self) -> Outcome:
        name = "Ctrl-C" if self._interrupts.received[0] is signal.SIGINT else self._interrupts.received[0].name
        return Outcome(self._interrupts.exit_code(), f"stopped by {name}")

    def _end(self, outcome: Outcome) -> Outcome:
        self._run.ended.write_text((outcome.message or "the run is complete") + "\n")
        if self._trainer.running() and self._interrupts.received:
            what = "the trainer writes its checkpoint" if self._trained else "nothing is trained yet"
            self._view.note(f"stopping: {what} (Ctrl-C again to kill it)")
            self._ask_ranks_to_stop()
            self._wait_for_checkpoint()
        return outcome

    def _ask_ranks_to_stop(self) -> None:
        """Not through the launcher, which gives its ranks only `STOP_GRACE_S` once it is told to stop."""
        pid = self._trainer.pid
        ranks = processes.children(pid) if pid is not None else []
        if ranks:
            processes.signal_all(ranks, signal.SIGTERM)
        else:
            self._trainer.terminate()

    def _wait_for_checkpoint(self) -> None:
        """The services stay up meanwhile: the trainer may still be publishing or collecting."""
        deadline = time.monotonic() + CHECKPOINT_GRACE_S
        while self._trainer.running() and time.monotonic() < deadline and len(self._interrupts.received) < 2:
            self._show()
            time.sleep(_POLL_S)

    def _units_and_head(self) -> list[Service]:
        return [*self._units, *([self._head] if self._head else [])]

    def _children(self) -> list[Child]:
        return [*(service.child for service in self._units_and_head()), self._trainer]

    def _show(self) -> None:
        for row in self._rows.read():
            self._trained = True
            self._view.row(row)
        self._view.services([(child.name, _state(child)) for child in self._children()])


def _state(child: Child) -> str:
    state = "running" if child.running() else "down"
    return f"{state}, restarted {child.restarts}x" if child.restarts else state


def stop_everything(children: Sequence[Child], interrupts: Interrupts) -> None:
    """End `children` within `STOP_GRACE_S`, and then whatever else lives below this process."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    while any(child.running() for child in children) and time.monotonic() < deadline and len(interrupts.received) < 2:
        time.sleep(_POLL_S / 2)
    reap_all(*children)


def reap_all(*children: Child) -> None:
    """SIGKILL all that is left below this process, and collect it."""
    while left := processes.descendants(os.getpid()):
        processes.signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
    for child in children:
        child.exit_code()
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
