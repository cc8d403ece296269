"""The version protocol of every unit: none -> staging -> staged -> committed, or failed and tried again. Pure.

A version is known by its session, number and transfer: a trainer restarted from a checkpoint publishes a number again
with other bytes, and what a unit says of the old ones must not count for the new. It counts as committed on a unit only
after the unit's acknowledgement. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Generic, NamedTuple, TypeVar

from services.sgs.records import SessionKey

MAX_ATTEMPTS = 5
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
GRACE_S = 5.0
_REMEMBERED_UNITS = 1024

Body = TypeVar("Body")


class CommitPolicy(Enum):
    """`BOUNDARY`: when the unit holds no samples. `IMMEDIATE`: as soon as it is staged, between two decode steps."""

    BOUNDARY = "boundary"
    IMMEDIATE = "immediate"


class WeightState(IntEnum):
    NONE = 0
    STAGING = 1
    STAGED = 2
    COMMITTED = 3
    FAILED = 4


class Transfer(NamedTuple):
    """Which bytes: the number and the manifest's id."""

    version: int
    id: str


class Tag(NamedTuple):
    session: SessionKey
    transfer: Transfer

    @property
    def version(self) -> int:
        return self.transfer.version


@dataclass(frozen=True)
class Published(Generic[Body]):
    """The newest weights. `body` is what units need to fetch them; `deadline_s` is for one unit's stage or commit."""

    tag: Tag
    body: Body
    policy: CommitPolicy
    deadline_s: float


@dataclass
class UnitVersions:
    """One unit. `state` is about the published version; `committed` is what the unit generates with."""

    committed: Tag | None = None
    committing: Tag | None = None
    state: WeightState = WeightState.NONE
    error: str = ""
    attempts: int = 0
    due: float = 0.0
    stage_started_at: float = 0.0
    staged_at: float = 0.0
    committed_at: float = 0.0
    commit_pause_s: float = 0.0


class Report(NamedTuple):
    """What a unit says of one transfer. Times are the unit's, Unix seconds."""

    transfer: Transfer
    state: WeightState
    error: str = ""
    stage_started_at: float = 0.0
    staged_at: float = 0.0
    committed_at: float = 0.0
    commit_pause_s: float = 0.0


class Command(NamedTuple):
    """Tell `unit_id` to stage or to commit what is published."""

    unit_id: str
    commit: bool
    transfer: Transfer


class Versions(Generic[Body]):
    def __init__(self) -> None:
        self.published: Published[Body] | None = None
        self.units: dict[str, UnitVersions] = {}
        self._remembered: dict[str, Tag] = {}

    @property
    def version(self) -> int:
        """The newest published; -1: none."""
        return self.published.tag.version if self.published else -1

    def publish(self, published: Published[Body]) -> None:
        """Replace what was published before. Publishing the same again only restarts units that failed."""
        again = self.published is not None and self.published.tag == published.tag
        self.published = published
        for unit in self.units.values():
            if not again or unit.state is WeightState.FAILED:
                self._retarget(unit)

    def withdraw(self) -> None:
        """The session that published is gone: nobody serves its weights."""
        self.published = None
        for unit in self.units.values():
            self._retarget(unit)

    def _retarget(self, unit: UnitVersions) -> None:
        done = self.published is not None and unit.committed == self.published.tag
        unit.state = WeightState.COMMITTED if done else WeightState.NONE
        unit.error, unit.attempts, unit.due = "", 0, 0.0

    def attach(self, unit_id: str, transfer: Transfer, session: SessionKey) -> None:
        """A unit registered with `transfer` committed (version -1: none), generated for `session`."""
        unit = UnitVersions()
        remembered = self._remembered.pop(unit_id, None)
        if transfer.version >= 0:
            known = [self.published.tag] if self.published else []
            known += [remembered] if remembered else []
            unit.committed = next((tag for tag in known if tag.transfer == transfer), Tag(session, transfer))
        self._retarget(unit)
        self.units[unit_id] = unit

    def detach(self, unit_id: str) -> None:
        unit = self.units.pop(unit_id)
        if unit.committed is None or unit.committing is not None:
            return
        self._remembered[unit_id] = unit.committed
        while len(self._remembered) > _REMEMBERED_UNITS:
            del self._remembered[next(iter(self._remembered))]

    def usable(self, unit_id: str, session: SessionKey | None) -> int:
        """The version a unit may start samples of `session` with; -1 when its weights belong to none or another."""
        committed = self.units[unit_id].committed
        return committed.version if committed is not None and committed.session == session else -1

    def pausing(self, unit_id: str) -> bool:
        """Whether the unit is between Commit and its acknowledgement at a boundary, and must stay empty."""
        boundary = self.published is not None and self.published.policy is CommitPolicy.BOUNDARY
        return boundary and self.units[unit_id].committing is not None

    def report(self, unit_id: str, report: Report, now: float) -> Tag | None:
        """Take a unit's word; what is not about the published bytes or a commit in flight is ignored.

        Returns the tag that the unit has now committed, when this is an acknowledgement.
        """
        unit = self.units[unit_id]
        if unit.committing is not None and report.transfer == unit.committing.transfer:
            return self._after_commit(unit, report, now)
        current = self.published is not None and report.transfer == self.published.tag.transfer
        if not current or unit.state is not WeightState.STAGING:
            return None
        if report.state is WeightState.STAGED:
            unit.state, unit.error, unit.due = WeightState.STAGED, "", 0.0
            _take_times(unit, report)
        elif report.state is WeightState.FAILED:
            self._failed(unit, report.error, now)
        return None

    def _after_commit(self, unit: UnitVersions, report: Report, now: float) -> Tag | None:
        tag = unit.committing
        current = self.published is not None and self.published.tag == tag
        if report.state is WeightState.COMMITTED:
            unit.committed, unit.committing = tag, None
            if current:
                unit.state, unit.error = WeightState.COMMITTED, ""
                _take_times(unit, report)
            return tag
        if report.state is WeightState.FAILED:
            unit.committing = None
            if current:
                self._failed(unit, report.error, now)
        return None

    def _failed(self, unit: UnitVersions, error: str, now: float) -> None:
        unit.state, unit.error = WeightState.FAILED, error
        unit.attempts += 1
        unit.due = now + min(FIRST_RETRY_S * 2 ** (unit.attempts - 1), LONGEST_RETRY_S)

    def commands(self, now: float, idle: Callable[[str], bool]) -> list[Command]:
        """What to tell units now; `idle` says whether a unit holds no samples. Each command is given once."""
        if self.published is None:
            return []
        transfer, commands = self.published.tag.transfer, []
        for unit_id, unit in self.units.items():
            if unit.due and now >= unit.due and (unit.state is WeightState.STAGING or unit.committing is not None):
                what = "commit" if unit.committing is not None else "stage"
                unit.committing = None
                self._failed(
                    unit, f"no answer to {what} v{transfer.version} within {self.published.deadline_s:g} s", now
                )
            elif unit.state is WeightState.NONE or (
                unit.state is WeightState.FAILED and unit.attempts < MAX_ATTEMPTS and now >= unit.due
            ):
                unit.state, unit.due = WeightState.STAGING, now + self.published.deadline_s + GRACE_S
                commands.append(Command(unit_id, False, transfer))
            elif (
                unit.state is WeightState.STAGED
                and unit.committing is None
                and (self.published.policy is CommitPolicy.IMMEDIATE or idle(unit_id))
            ):
                unit.committing, unit.due = self.published.tag, now + self.published.deadline_s + GRACE_S
                commands.append(Command(unit_id, True, transfer))
        return commands

    def given_up(self, unit_id: str) -> bool:
        unit = self.units[unit_id]
        return unit.state is WeightState.FAILED and unit.attempts >= MAX_ATTEMPTS

    def reached(self, version: int, until: WeightState) -> bool:
        """Whether every attached unit, and at least one, is at `version` in state `until` or beyond, or gave up."""
        if self.published is None or self.published.tag.version < version:
            return False
        return bool(self.units) and all(
            (unit.state is not WeightState.FAILED and unit.state >= until) or self.given_up(unit_id)
            for unit_id, unit in self.units.items()
        )

    def snapshot(self, unit_id: str) -> UnitVersions:
        return replace(self.units[unit_id])


def _take_times(unit: UnitVersions, report: Report) -> None:
    unit.stage_started_at = report.stage_started_at or unit.stage_started_at
    unit.staged_at = report.staged_at or unit.staged_at
    unit.committed_at = report.committed_at or unit.committed_at
    unit.commit_pause_s = report.commit_pause_s or unit.commit_pause_s
