"""Puts one rank together: data, learner, generation client, weight server, rewards."""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from services.config import Config
from services.errors import GenerationError, ModelError, UsageError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import Credentials, join_address, open_channel
from services.transport.grpc import TRANSPORT, GrpcWeightServer
from services.transport.manifest import Source
from trainer import checkpoint
from trainer.data.dataset import load_data
from trainer.data.loader import Loader
from trainer.learner import Learner
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.loop import Parts
from trainer.publish import Publisher
from trainer.records import Records, earlier_run, truncate_from
from trainer.rewards.scorer import Scorer
from trainer.rollout import RolloutClient
from trainer.scoring import SampleScorer
from trainer.service_loop import ServiceLoop

logger = logging.getLogger(__name__)

_START_S = 180.0
_STOP_S = 10.0


@dataclass
class _Connected:
    channel: grpc.aio.Channel
    scorer: Scorer
    client: RolloutClient
    publisher: Publisher | None = None
    weight_server: GrpcWeightServer | None = None

    async def close(self) -> None:
        """What asks is closed before what answers."""
        await self.client.close()
        if self.publisher is not None:
            await self.publisher.close()
        await self.scorer.close()
        await self.channel.close()
        if self.weight_server is not None:
            await self.weight_server.stop()


class Rank:
    """Everything of one rank that must be closed again; a context manager. Construction is collective."""

    def __init__(
        self, config: Config, sgs: str, run_dir: Path, resume: str | None, rank: int, world: int, stop: threading.Event
    ) -> None:
        """`resume`: "auto" (the newest checkpoint, or the start), a checkpoint directory, or None.

        Raises `UsageError` for a directory that cannot be resumed, or that holds a run when `resume` is None.
        """
        if config.model.path is None:
            raise ModelError("model.path is not set: `streamrl prepare` makes the model that model.init describes")
        left = earlier_run(run_dir)
        if resume is None and left is not None:
            raise UsageError(f"{left} is of an earlier run: go on with it (--resume auto), or give another --run-dir")
        data = load_data(config, config.model.path)
        learner = Learner(config, config.model.path, rank, world)
        exchange = Exchange(rank, world)
        self.first_iteration = _resume(resume, run_dir, learner, data.loader, exchange)
        session = _agree_on_session(exchange)
        records = Records(run_dir, rank)
        self._services = ServiceLoop()
        self._connected = self._services.call(
            _connect(config, sgs, session, rank, records), _START_S, "starting the trainer's services"
        )
        self.parts = Parts(
            config=config,
            learner=learner,
            exchange=exchange,
            services=self._services,
            client=self._connected.client,
            publisher=self._connected.publisher,
            scorer=SampleScorer(self._connected.scorer, data.tokenizer),
            records=records,
            train=data.train,
            held_out=data.held_out,
            loader=data.loader,
            sampling=data.sampling,
            eval_sampling=data.eval_sampling,
            run_dir=run_dir,
            stop=stop,
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._services.call(self._connected.close(), _STOP_S, "closing the trainer's services")
            self._services.close()
        except Exception:
            if value is None:
                raise
            logger.exception("closing after an error")  # that error is the one to tell of


async def _connect(config: Config, sgs: str, session: str, rank: int, records: Records) -> _Connected:
    credentials = Credentials.read(config.security)
    channel = open_channel(sgs, credentials)

    async def announce() -> None:
        if connected.publisher is not None:
            await connected.publisher.announce()

    client = RolloutClient(
        channel,
        config.sgs,
        run_id=config.run.name,
        session=session,
        rank=rank,
        seed=config.run.seed,
        on_reconnect=announce,
    )
    connected = _Connected(channel, Scorer(config.reward), client)
    try:
        await _reach_head(channel, sgs, config.sgs.reconnect_s)
        await connected.scorer.start()
        if rank == 0:
            connected.weight_server = GrpcWeightServer(credentials, config.weights.chunk_bytes)
            port = await connected.weight_server.start(config.trainer.host, config.trainer.port)
            connected.publisher = Publisher(
                channel,
                connected.weight_server,
                Source(TRANSPORT, join_address(config.trainer.advertise or config.trainer.host, port)),
                run_id=config.run.name,
                session=session,
                config=config,
                on_unit=lambda version, unit: _record_unit(records, version, unit),
            )
    except BaseException:
        await connected.close()
        raise
    return connected


async def _reach_head(channel: grpc.aio.Channel, address: str, deadline_s: float) -> None:
    stub: Any = pb_grpc.GenerationStub(channel)
    try:
        await stub.Status(pb.StatusRequest(), timeout=deadline_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise GenerationError(f"head {address}: {error.code().name}: {error.details()}") from None


def _record_unit(records: Records, version: int, unit: pb.UnitWeights) -> None:
    """How one unit took one version, for the timeline."""
    if unit.state == pb.UnitWeights.FAILED:
        logger.warning("weights v%d: %s stays on its old version: %s", version, unit.unit_id, unit.error)
        return
    lane = f"weights/{unit.unit_id}"
    records.span(lane, "stage", unit.stage_started_at, unit.staged_at, version - 1)
    records.span(lane, "commit", unit.committed_at - unit.commit_pause_s, unit.committed_at, version - 1)


def _resume(resume: str | None, run_dir: Path, learner: Learner, loader: Loader, exchange: Exchange) -> int:
    """Load the checkpoint asked for; returns the first iteration to run. Collective."""
    root = run_dir / "checkpoints"
    directory = checkpoint.newest(root) if resume == "auto" else Path(resume) if resume else None
    iteration = 0
    if directory is not None:
        state = checkpoint.read(directory)
        learner.load(directory)
        loader.load_state_dict(state.loader)
        iteration = state.iteration
        logger.info("resumed from %s: iteration %d", directory, iteration)
    exchange.gather_ints([])  # every rank has looked at what is there
    if resume is not None and exchange.rank == 0:
        checkpoint.discard_from(root, iteration, but=directory)
        truncate_from(run_dir, iteration)
    exchange.gather_ints([])  # nobody appends before rank 0 has cut
    return iteration


def _agree_on_session(exchange: Exchange) -> str:
    """One life of the trainer: rank 0's draw, known to all ranks. Collective."""
    drawn = uuid.uuid4().int & ((1 << 62) - 1)
    return f"{exchange.gather_ints([drawn])[0][0]:016x}"
