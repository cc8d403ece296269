"""The command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer

from services.errors import EXIT_USAGE, StreamRLError

_ClickException: type[Any] = typer.BadParameter.__mro__[2]
_INTERRUPTED = 130

app = typer.Typer(
    name="streamrl",
    help="Reinforcement learning for language models as disaggregated streaming services.\n\n"
    "Example: streamrl run deploy/configs/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration file")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time, also on Python 3.10
    typer.Option("--set", metavar="KEY=VALUE", help="override one value, for example --set pipeline.mode=async"),
]
HeadAddress = Annotated[str, typer.Option("--sgs", metavar="HOST:PORT", help="address of the SGS head")]
ReadyFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--ready-file", help="write {address, port, metrics, pid} there as JSON once bound"),
]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks instead of one-line errors")] = False,
) -> None:
    """Options before any command; `--debug` is read by `main`."""


@app.command()
def run(
    config: ConfigPath,
    out: Annotated[Optional[Path], typer.Option(help="where run directories are made; default run.out")] = None,  # noqa: UP045
    name: Annotated[Optional[str], typer.Option(help="name of the run; default run.name")] = None,  # noqa: UP045
    set_: Overrides = None,
) -> None:
    """Train from end to end on this host: head, DP units and trainer, with live progress and a report.

    Example: streamrl run deploy/configs/quickstart.yaml --set pipeline.mode=async --out runs

    Ctrl-C lets the trainer write a checkpoint first; a second Ctrl-C kills.
    Logs, metrics and report.html lie in the run directory.
    """
    from services.config import load_config
    from services.launch.run import check_addresses, run_all
    from services.launch.rundir import RunDir

    named = [f"run.name={json.dumps(name)}"] if name else []
    overrides = [*(set_ or []), *named]
    loaded = load_config(config, overrides)
    check_addresses(loaded)
    outcome = run_all(loaded, config, overrides, RunDir.create(out or loaded.run.out, loaded.run.name, time.time()))
    _finish(outcome.exit_code, outcome.message)


@app.command()
def sgs(
    config: ConfigPath,
    host: Annotated[Optional[str], typer.Option(help="listen here; default sgs.host")] = None,  # noqa: UP045
    port: Annotated[Optional[int], typer.Option(help="listen here, 0: a free port; default sgs.port")] = None,  # noqa: UP045
    ready_file: ReadyFile = None,
    set_: Overrides = None,
) -> None:
    """Serve the SGS head. Its address is printed as one JSON line once it is bound.

    Example: streamrl sgs run.yaml --host 127.0.0.1 --port 7070
    """
    from services.commands.serve import serve_head
    from services.config import load_config

    loaded = load_config(config, set_ or [])
    serve_head(loaded, loaded.sgs.host if host is None else host, loaded.sgs.port if port is None else port, ready_file)


@app.command()
def unit(
    config: ConfigPath,
    sgs: HeadAddress,
    unit_id: Annotated[Optional[str], typer.Option("--id", help="name of this unit; default host-pid")] = None,  # noqa: UP045
    model: Annotated[Optional[Path], typer.Option(help="model directory, in place of the configuration's")] = None,  # noqa: UP045
    ready_file: ReadyFile = None,
    set_: Overrides = None,
) -> None:
    """Serve one DP unit: an engine that takes its work from the head. Start as many as there are devices.

    Example: streamrl unit run.yaml --sgs 127.0.0.1:7070 --model /models/warm
    """
    from services.commands.serve import serve_unit
    from services.config import load_config

    given = [f"model={json.dumps({'path': str(model)})}", "warmup=null"] if model else []
    serve_unit(load_config(config, [*given, *(set_ or [])]), _address(sgs), unit_id, ready_file)


@app.command()
def trainer(
    config: ConfigPath,
    sgs: HeadAddress,
    run_dir: Annotated[Optional[Path], typer.Option(help="run directory; default a new one below run.out")] = None,  # noqa: UP045
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="auto|DIR", help="continue from a checkpoint; auto: the newest whole one of --run-dir"),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run the trainer's ranks (torchrun) against a head that runs elsewhere.

    Example: streamrl trainer run.yaml --sgs 127.0.0.1:7070 --run-dir runs/mine --resume auto
    """
    from services.config import load_config
    from services.launch.run import check_addresses, run_trainer
    from services.launch.rundir import RunDir

    overrides = set_ or []
    loaded = load_config(config, overrides)
    address = _address(sgs)
    check_addresses(loaded)
    run = RunDir.open(run_dir) if run_dir else RunDir.create(loaded.run.out, loaded.run.name, time.time())
    outcome = run_trainer(loaded, config, overrides, run, address, resume)
    _finish(outcome.exit_code, outcome.message)


@app.command()
def prepare(config: ConfigPath, set_: Overrides = None) -> None:
    """Make the warmed-up model (or find it in the cache) and print its directory.

    Units on other hosts are then given it: streamrl unit run.yaml --sgs HOST:PORT --model DIR

    Example: streamrl prepare deploy/configs/quickstart.yaml
    """
    from services.commands.prepare import prepare_and_print
    from services.config import load_config

    overrides = set_ or []
    prepare_and_print(load_config(config, overrides), config, overrides)


@app.command()
def status(
    sgs: HeadAddress,
    watch: Annotated[bool, typer.Option("--watch", help="refresh every second until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    token_file: Annotated[Optional[Path], typer.Option(help="bearer token; default $STREAMRL_TOKEN")] = None,  # noqa: UP045
    config: Annotated[Optional[Path], typer.Option(help="read security (token, TLS) from this configuration")] = None,  # noqa: UP045
) -> None:
    """Show a head's units, weight versions, queues and samples in flight.

    Example: streamrl status --sgs 127.0.0.1:7070 --watch
    """
    from services.commands.status import show_status

    show_status(_address(sgs), watch, as_json, _security(config, token_file))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory of a run")]) -> None:
    """Write report.html and plots/ from a run's metrics, also of one that was cut short.

    Example: streamrl report runs/quickstart-20260101-120000
    """
    from services.report import write_report

    typer.echo(str(write_report(run_dir)))


def _security(config: Path | None, token_file: Path | None) -> Any:
    from services.config import SecurityConfig, load_config

    security = load_config(config).security if config else SecurityConfig()
    return security.model_copy(update={"token_file": token_file}) if token_file else security


def _address(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 65536):
        raise typer.BadParameter(f"--sgs {text}: expected HOST:PORT, for example 127.0.0.1:7070")
    return text


def _finish(exit_code: int, message: str) -> NoReturn:
    if exit_code and message:
        typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The `streamrl` command: errors are one line on stderr and an exit code (2: something the user gave is wrong)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said by our own errors
    sys.exit(_run(given, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        return int(app(arguments, standalone_mode=False, prog_name="streamrl") or 0)
    except StreamRLError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except _ClickException as error:
        if debug:
            raise
        hint = "" if "--help" in arguments else " (streamrl --help shows the commands and options)"
        return _fail(error.format_message() + hint, EXIT_USAGE) if arguments else EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED


def _fail(message: str, exit_code: int) -> int:
    typer.echo("error: " + " ".join(message.split()), err=True)
    return exit_code


if __name__ == "__main__":
    main()
