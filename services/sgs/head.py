"""The head: registry of units, planning, weights. Glues the pure ledger, dispatch and version protocol to links.

Everything here runs on one event loop and never waits; `services.sgs.server` does the talking.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from services import metrics, wire
from services.config import Config
from services.pb import streamrl_pb2 as pb
from services.samples import SampleId
from services.sgs.dispatch import POLICIES, Assignment, UnitView
from services.sgs.ledger import Ledger
from services.sgs.records import Delivery, Orders, RankRecord, Request, SessionKey
from services.sgs.unit_link import AssignBatch, UnitLink
from services.sgs.versions import Command, CommitPolicy, Published, Report, Tag, Transfer, Versions, WeightState

log = logging.getLogger(__name__)

Rank = RankRecord[pb.Sample]

# A message costs far more than a sample in it: under load this long a pause makes batches, and an idle head answers
# at once. Units' lookahead covers it.
_STEP_EVERY_S = 0.005


class UnitRefusedError(Exception):
    """A unit that cannot be used; the message tells it why."""


class Clock:
    """Unix seconds that never go back."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


class Head:
    """The state of one SGS front process; it is soft, and a successor rebuilds it from units and ranks."""

    def __init__(self, config: Config) -> None:
        sgs = config.sgs
        self.config = sgs
        self.clock = Clock()
        self.started_at = self.clock()
        self.batch_bytes = config.security.max_message_bytes // 2
        self.ledger: Ledger[pb.Sample] = Ledger(
            POLICIES[sgs.dispatch].order,
            max_attempts=sgs.max_attempts,
            window_s=sgs.window_s,
            reconnect_s=sgs.reconnect_s,
        )
        self.versions: Versions[pb.WeightManifest] = Versions()
        self.units: dict[str, UnitLink] = {}
        self.weights_changed = asyncio.Event()
        self._plan = POLICIES[sgs.dispatch].plan
        self._limits: dict[str, tuple[int, float]] = {}
        self._signals: dict[Rank, asyncio.Event] = {}
        self._scheduled = False
        self._stepped_at = 0.0
        self._ticked_at = self.clock()
        self._counted_duplicates = 0

    # ------------------------------------------------------------------ ranks

    def open(self, request: Request) -> tuple[Rank, asyncio.Event]:
        """Take a rank's request; the event is set whenever it has something to read. Raises what the ledger raises."""
        new_session = request.session != self.ledger.session
        rank = self.ledger.open(request, self.clock())
        if new_session:
            self._session_began(request.session)
        previous = self._signals.get(rank)
        if previous is not None:
            previous.set()
        signal = self._signals[rank] = asyncio.Event()
        log.info(
            "stream %s rank %d opened: %d prompts x %d, version >= %d, %d already there",
            request.stream, request.rank, len(request.prompts), request.n, request.min_version, len(request.have),
        )  # fmt: skip
        self.schedule()
        asyncio.get_running_loop().call_later(self.config.window_s, self.schedule)
        return rank, signal

    def _session_began(self, session: SessionKey) -> None:
        published = self.versions.published
        if published is not None and published.tag.session != session:
            self.versions.withdraw()
            self._notify_weights()
        log.info("session %s began", session)

    def deliver(self, rank: Rank) -> Delivery[pb.Sample]:
        delivery = rank.deliver(pb.Sample.ByteSize, self.batch_bytes)
        metrics.HEAD_DELIVERED.inc(delivery.first)
        return delivery

    def close(self, rank: Rank, connection: int, complete: bool) -> None:
        """A rank's stream is over: `complete` after its last sample, else it broke."""
        if rank.connection != connection:
            return
        self._signals.pop(rank, None)
        if rank.dropped:
            return
        if complete:
            self.ledger.end(rank, self.clock())
        else:
            self.ledger.disconnect(rank, connection, self.clock())
        log.info("stream %s rank %d %s", rank.stream, rank.rank, "finished" if complete else "broke")
        self.schedule()

    def acknowledge(self, session: SessionKey, ids: Iterable[SampleId]) -> None:
        self.ledger.acknowledge(session, ids)
        self.schedule()

    # ------------------------------------------------------------------ units

    def attach(self, register: pb.Register) -> UnitLink:
        """Admit a unit. Raises `UnitRefusedError`."""
        if not register.unit_id or min(register.slots, register.kv_tokens, register.max_sequence) <= 0:
            raise UnitRefusedError("a registration needs unit_id, slots, kv_tokens and max_sequence")
        now = self.clock()
        previous = self.units.get(register.unit_id)
        if previous is not None:
            self.lose(previous, "it registered again")
        link = UnitLink(register, now)
        session = SessionKey(register.run_id, register.session)
        link.send(pb.HeadCommand(welcome=pb.Welcome(heartbeat_s=self.config.heartbeat_s)))
        self.units[link.unit_id] = link
        self.versions.attach(link.unit_id, Transfer(register.version, register.transfer_id), session)
        kept = self.ledger.claim(link.unit_id, session, map(wire.sample_id, register.running), now)
        self._notify_weights()
        log.info(
            "unit %s attached: %s on %s, %d slots, version %d, goes on with %d samples",
            link.unit_id, register.engine, register.host, register.slots, register.version, kept,
        )  # fmt: skip
        self.schedule()
        return link

    def lose(self, link: UnitLink, reason: str) -> None:
        """A unit is gone, in whatever way; only the first call for a link counts."""
        if self.units.get(link.unit_id) is not link:
            return
        del self.units[link.unit_id]
        self.versions.detach(link.unit_id)
        self._limits[link.unit_id] = (link.limit, self.clock())
        requeued = self.ledger.unit_lost(link.unit_id)
        metrics.HEAD_REQUEUED.labels("unit_lost").inc(requeued)
        link.lose(reason)
        log.warning("unit %s lost (%s): %d samples queued again", link.unit_id, reason, requeued)
        self._notify_weights()
        self.schedule()

    def receive(self, link: UnitLink, event: pb.UnitEvent) -> None:
        """Take what a unit says. From one that counts as lost, only samples do: they are as good as any copy."""
        link.last_seen = now = self.clock()
        kind = event.WhichOneof("event")
        if kind == "finished":
            self._finished(link, event.finished, now)
        elif self.units.get(link.unit_id) is not link:
            return
        elif kind == "heartbeat":
            link.heartbeat, link.heartbeat_at = event.heartbeat, now
        elif kind == "weights":
            self._weights(link, event.weights, now)
        elif kind == "leaving":
            self.lose(link, f"it leaves: {event.leaving.reason}")
        else:
            log.warning("unit %s sent an unexpected %s", link.unit_id, kind)

    def _finished(self, link: UnitLink, finished: pb.Finished, now: float) -> None:
        session = SessionKey(finished.run_id, finished.session)
        link.finished += len(finished.samples)
        results = [(SampleId(message.id.prompt_id, message.id.k), message) for message in finished.samples]
        self.ledger.finish(link.unit_id, session, results, now)
        if finished.failures:
            again = self.ledger.unit_failed(link.unit_id, session, map(wire.failure, finished.failures))
            metrics.HEAD_REQUEUED.labels("engine").inc(again)
            log.warning("unit %s gave up %d samples, %d tried again", link.unit_id, len(finished.failures), again)
        self.schedule()

    # ------------------------------------------------------------------ weights

    def publish(self, session: SessionKey, manifest: pb.WeightManifest, policy: CommitPolicy, deadline_s: float) -> int:
        """Make a version current; returns the attached units. Raises what `Ledger.enter` raises."""
        if self.ledger.enter(session):
            self._session_began(session)
        tag = Tag(session, Transfer(manifest.version, manifest.transfer_id))
        current = self.versions.published
        if current is not None and current.tag.session == session and current.tag.version > tag.version:
            log.info("weights v%d: ignored, v%d is out", tag.version, current.tag.version)
            return len(self.units)
        self.versions.publish(Published(tag, manifest, policy, deadline_s))
        metrics.HEAD_VERSION.set(tag.version)
        log.info("weights v%d published, %d bytes, for %d units", tag.version, manifest.total_bytes, len(self.units))
        self._notify_weights()
        self.schedule()
        return len(self.units)

    def _weights(self, link: UnitLink, message: pb.UnitWeights, now: float) -> None:
        report = Report(
            Transfer(message.version, message.transfer_id), WeightState(message.state), message.error,
            message.stage_started_at, message.staged_at, message.committed_at, message.commit_pause_s,
        )  # fmt: skip
        tag = self.versions.report(link.unit_id, report, now)
        if tag is not None:
            log.info("unit %s committed v%d, paused %.3f s", link.unit_id, tag.version, report.commit_pause_s)
        elif report.state is WeightState.FAILED:
            log.warning("unit %s: weights v%d failed: %s", link.unit_id, message.version, report.error)
        self._notify_weights()
        self.schedule()

    def _notify_weights(self) -> None:
        self.weights_changed.set()
        self.weights_changed = asyncio.Event()

    # ------------------------------------------------------------------ planning

    def schedule(self) -> None:
        """Plan once what is being handled now is done, and not right after the last time."""
        if not self._scheduled:
            self._scheduled = True
            wait_s = self._stepped_at + _STEP_EVERY_S - self.clock()
            asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._step)

    def tick(self) -> None:
        """What only time brings: silent units, overdue samples, ranks that stayed away, streams nobody can serve."""
        now = self.clock()
        frozen = now - self._ticked_at > self.config.unit_timeout_s / 2
        self._ticked_at = now
        for link in list(self.units.values()):
            if frozen:  # this process stood still: what units said meanwhile is yet to be read
                link.last_seen = now
            elif now - link.last_seen > self.config.unit_timeout_s:
                self.lose(link, f"silent for {self.config.unit_timeout_s:g} s")
        overdue = self.ledger.expired(now)
        metrics.HEAD_REQUEUED.labels("deadline").inc(len(overdue))
        for notice in overdue:
            log.warning("sample %s overdue on unit %s, attempt %d", notice.id, notice.unit_id, notice.attempt)
        for rank in self.ledger.reap(now):
            log.warning("stream %s: dropped, %s", rank.stream, rank.dropped)
        self._give_up_unserved(now)
        self._limits = {
            unit_id: (limit, at) for unit_id, (limit, at) in self._limits.items() if now - at < self.config.reconnect_s
        }
        self._step()
        metrics.HEAD_UNITS.set(len(self.units))
        metrics.HEAD_QUEUED.set(self.ledger.all_queued())
        metrics.HEAD_RUNNING.set(self.ledger.running())
        metrics.HEAD_DUPLICATES.inc(self.ledger.duplicates - self._counted_duplicates)
        self._counted_duplicates = self.ledger.duplicates

    def _step(self) -> None:
        self._scheduled = False
        now = self._stepped_at = self.clock()
        self._carry_out(self.ledger.take_orders())
        for command in self.versions.commands(now, lambda unit_id: self.ledger.load(unit_id).samples == 0):
            self._send_weights(self.units[command.unit_id], command)
        if self.units:
            self.ledger.fail_unfit(max([u.limit for u in self.units.values()] + [x for x, _ in self._limits.values()]))
        streams = self.ledger.plannable(now)
        if streams and self.units:
            self._assign(now, self._plan(streams, [self._view(link) for link in self.units.values()]))
        self._carry_out(self.ledger.take_orders())

    def _view(self, link: UnitLink) -> UnitView:
        register, load = link.register, self.ledger.load(link.unit_id)
        room = 0 if self.versions.pausing(link.unit_id) else register.slots + self.config.lookahead - load.samples
        return UnitView(
            unit_id=link.unit_id,
            room=room,
            load=load.work / register.slots,
            slots=register.slots,
            version=self.versions.usable(link.unit_id, self.ledger.session),
            max_sequence=register.max_sequence,
            kv_tokens=register.kv_tokens,
            kv_free=register.kv_tokens - load.tokens,
        )

    def _assign(self, now: float, plan: list[Assignment]) -> None:
        batches: dict[tuple[str, Rank], AssignBatch] = {}
        for assignment, entries in zip(plan, self.ledger.start(plan, now), strict=True):
            rank = entries[0].owner
            batch = batches.get((assignment.unit_id, rank))
            if batch is None:
                head = rank.request.body
                assert isinstance(head, pb.Assign)
                batch = AssignBatch(self.units[assignment.unit_id], head, self.batch_bytes)
                batches[assignment.unit_id, rank] = batch
            prompt = rank.prompts[assignment.group.prompt_id].body
            assert isinstance(prompt, pb.Prompt)
            batch.add(prompt, list(assignment.ks), entries[0].queued_at)
        for batch in batches.values():
            batch.flush()

    def _send_weights(self, link: UnitLink, command: Command) -> None:
        published = self.versions.published
        assert published is not None
        if command.commit:
            version, transfer_id = command.transfer
            link.send(pb.HeadCommand(commit=pb.Commit(version=version, transfer_id=transfer_id)))
        else:
            link.send(pb.HeadCommand(stage=pb.Stage(manifest=published.body, deadline_s=published.deadline_s)))
        self._notify_weights()

    def _carry_out(self, orders: Orders[pb.Sample]) -> None:
        for unit_id, ids in orders.cancel.items():
            if unit_id in self.units:
                cancel = pb.Cancel(ids=map(wire.sample_id_pb, ids))
                self.units[unit_id].send(pb.HeadCommand(cancel=cancel))
        for unit_id, ids in orders.forget.items():
            if unit_id in self.units:
                forget = pb.Forget(ids=map(wire.sample_id_pb, ids))
                self.units[unit_id].send(pb.HeadCommand(forget=forget))
        for failure in orders.failures:
            log.warning("%s", failure.message)
            metrics.HEAD_FAILED.labels(failure.code.value).inc()
        for rank in orders.wake.values():
            if rank in self._signals:
                self._signals[rank].set()

    def _give_up_unserved(self, now: float) -> None:
        for stream in list(self.ledger.streams.values()):
            versions = [self.versions.usable(unit_id, self.ledger.session) for unit_id in self.units]
            if not self.ledger.queued(stream.name) or any(version >= stream.min_version for version in versions):
                stream.unserved_since = None
            elif stream.unserved_since is None:
                stream.unserved_since = now
            elif now - stream.unserved_since > self.config.no_unit_timeout_s:
                reason = (
                    f"stream {stream.name}: no unit could start its samples for {self.config.no_unit_timeout_s:g} s: "
                    f"{self._what_is_missing(stream.min_version)}"
                )
                log.error("%s", reason)
                self.ledger.give_up(stream.name, reason)

    def _what_is_missing(self, min_version: int) -> str:
        if not self.units:
            return "no unit is attached"
        units = []
        for unit_id in self.units:
            unit = self.versions.units[unit_id]
            at = "no weights" if unit.committed is None else f"v{unit.committed.version}"
            if unit.committed is not None and unit.committed.session != self.ledger.session:
                at += " of another session"
            units.append(f"{unit_id} at {at}" + (f" ({unit.error})" if unit.error else f" ({unit.state.name.lower()})"))
        published = f"v{self.versions.version} is published" if self.versions.published else "nothing is published"
        return f"version {min_version} is needed, {published}, units: {', '.join(units)}"
