"""`streamrl run` from end to end: prepare the model, start everything, follow it, report."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services import processes
from services.config import Config
from services.errors import StreamRLError
from services.launch.child import Child, child_environment, python_module, read_json
from services.launch.prepare import prepare_model
from services.launch.rundir import RunDir, with_model
from services.launch.supervisor import STOP_GRACE_S, Interrupts, Outcome, Service, Supervisor, stop_everything
from services.metrics import require_safe_metrics
from services.progress import View, make_view
from services.rpc import Credentials, require_safe_address

logger = logging.getLogger(__name__)


def run_all(config: Config, config_path: Path, overrides: Sequence[str], run: RunDir) -> Outcome:
    """Head, units and trainer on this host. No process is left when it returns."""
    check_addresses(config)
    processes.adopt_orphans()
    console = Console(stderr=True)
    with Interrupts() as interrupts:
        with make_view(console) as view:
            view.note(f"run directory: {run.path}")
            run.write_config(config)
            head = head_service(run, config)
            head.child.start()  # beside the preparation: it needs no model, and units can attach at once afterwards
            try:
                config = _prepared(config, config_path, overrides, run, view, interrupts, head.child)
            except BaseException as error:
                run.ended.write_text(f"{error}\n")
                stop_everything([head.child], interrupts)
                raise
            trainer = trainer_service(run, config, None, single_host=True)
            units = [unit_service(run, config, f"unit-{index}") for index in range(config.sgs.units)]
            outcome = Supervisor(run, view, interrupts, trainer, head, units).supervise()
        conclude(run, console)
    return outcome


def run_trainer(
    config: Config, config_path: Path, overrides: Sequence[str], run: RunDir, sgs: str, resume: str | None
) -> Outcome:
    """Only the trainer's ranks, for a head that runs elsewhere; `resume` is "auto", a checkpoint directory or None."""
    processes.adopt_orphans()
    console = Console(stderr=True)
    with Interrupts() as interrupts:
        with make_view(console) as view:
            view.note(f"run directory: {run.path}")
            config = _prepared(config, config_path, overrides, run, view, interrupts)
            outcome = Supervisor(
                run, view, interrupts, trainer_service(run, config, sgs, single_host=False, resume=resume)
            ).supervise()
        conclude(run, console)
    return outcome


def check_addresses(config: Config) -> None:
    """Refuse an address that nobody may bind before anything is started. Raises `InsecureAddressError`."""
    credentials = Credentials.read(config.security)
    require_safe_address(config.sgs.host, credentials, "head (sgs.host)")
    require_safe_address(config.trainer.host, credentials, "trainer (trainer.host)")
    require_safe_metrics(config.metrics.host, config.security.tls, "metrics (metrics.host)")


def conclude(run: RunDir, console: Console) -> None:
    """Write the report and say in a few lines how it went; a run without data has neither."""
    from services.report import has_data, write_report

    if not has_data(run.path):
        return
    try:
        report = write_report(run.path)
    except StreamRLError as error:
        logger.warning("no report: %s", error)
        return
    summary = read_json(run.path / "summary.json") or {}
    lines = [
        _change("held-out accuracy", summary.get("accuracy_start"), summary.get("accuracy_end"), ".1%"),
        _change("mean reward", summary.get("reward_start"), summary.get("reward_end"), ".3f"),
        _value("wall time", summary.get("wall_s"), ".1f", " s"),
        _value("speed", summary.get("samples_per_s"), ".1f", " samples/s"),
        f"report: {report}",
    ]
    for line in filter(None, lines):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _change(name: str, start: object, end: object, form: str) -> str:
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)):
        return ""
    return f"{name}: {start:{form}} -> {end:{form}}"


def _value(name: str, value: object, form: str, unit: str) -> str:
    return f"{name}: {value:{form}}{unit}" if isinstance(value, (int, float)) else ""


def _prepared(
    config: Config,
    config_path: Path,
    overrides: Sequence[str],
    run: RunDir,
    view: View,
    interrupts: Interrupts,
    head: Child | None = None,
) -> Config:
    """`config` with the prepared model, written to the run directory for every child to read."""
    model = prepare_model(run, config_path, overrides, config, view, interrupts, head)
    config = with_model(config, model)
    run.write_config(config)
    return config


def head_service(run: RunDir, config: Config) -> Service:
    ready = run.services / "head.json"
    ready.unlink(missing_ok=True)
    command = python_module("services.cli", "sgs", str(run.config), "--ready-file", str(ready))
    child = Child("head", command, child_environment(run.path, 1), run.logs / "head.log")

    def same_port() -> Sequence[str]:
        announced = read_json(ready)
        return ("--port", str(announced["port"])) if announced else ()

    return Service(child, ready=ready.exists, arguments=same_port)


def unit_service(run: RunDir, config: Config, name: str) -> Service:
    ready = run.services / f"{name}.json"
    ready.unlink(missing_ok=True)
    command = python_module("services.cli", "unit", str(run.config), "--id", name, "--ready-file", str(ready))
    child = Child(name, command, child_environment(run.path, config.engine.threads), run.logs / f"{name}.log")
    return Service(child, ready=ready.exists, arguments=lambda: ("--sgs", _announced_head(run)))


def _announced_head(run: RunDir) -> str:
    announced = read_json(run.services / "head.json")
    if announced is None:
        raise StreamRLError("head: no address announced")
    return str(announced["address"])


def trainer_service(
    run: RunDir, config: Config, sgs: str | None, single_host: bool, resume: str | None = None
) -> Service:
    """torchrun with the trainer's ranks."""
    env = child_environment(run.path, config.trainer.threads)
    # torchrun and the ranks meet in files: a TCP store would listen on every address of the host.
    meeting, store = run.services / "rendezvous", run.services / "store"
    for path in (meeting, store):
        path.unlink(missing_ok=True)
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "STREAMRL_STORE": str(store)}
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{STOP_GRACE_S:.0f}"  # its own half minute is for ranks that can save
    if single_host:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [
        *python_module("services.processes", *python_module("torch.distributed.run")),
        *("--nnodes", "1", "--nproc-per-node", str(config.trainer.ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-conf", "store_type=file"),
        *("--rdzv-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1"),
        *("-m", "trainer", str(run.config), "--run-dir", str(run.path)),
        *(("--resume", resume) if resume else ()),
    ]
    child = Child("trainer", command, env, run.logs / "trainer.log")
    return Service(child, arguments=lambda: ("--sgs", sgs or _announced_head(run)))
