"""`streamrl prepare`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from services import processes
from services.config import Config
from services.launch.prepare import prepare_model
from services.launch.rundir import RunDir
from services.launch.supervisor import Interrupts, reap_all
from services.progress import make_view


def prepare_and_print(config: Config, config_path: Path, overrides: Sequence[str]) -> None:
    """Print the model's directory, alone, on stdout; progress goes to stderr."""
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="streamrl-prepare-") as scratch, Interrupts() as interrupts:
        run = RunDir.open(Path(scratch))
        try:
            with make_view(Console(stderr=True)) as view:
                model = prepare_model(run, config_path, overrides, config, view, interrupts)
        finally:
            reap_all()
    typer.echo(str(model))
