"""The directory of one run: configuration, logs, metrics, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from services.config import Config
from services.errors import UsageError
from services.processes import ENDED_FILE


@dataclass(frozen=True)
class RunDir:
    path: Path

    @classmethod
    def create(cls, out: Path, name: str, now: float) -> RunDir:
        """Make `<out>/<name>-<time>`; a number is appended when it is taken. Raises `UsageError`."""
        base = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        for number in range(1, 1000):
            path = (out.expanduser() / (base if number == 1 else f"{base}-{number}")).resolve()
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not path.is_dir():
                    raise UsageError(f"{path}: cannot make a run directory there: it is not a directory") from None
                continue
            except OSError as error:
                raise UsageError(f"{path}: cannot make a run directory there: {error.strerror}") from None
            return cls.open(path)
        raise UsageError(f"{out}: a thousand runs named {base}; give another --name")

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Use `path`, made when missing. Raises `UsageError`."""
        run = cls(path.expanduser().resolve())
        try:
            for part in (run.logs, run.services):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot be used as a run directory: {error.strerror}") from None
        run.ended.unlink(missing_ok=True)
        run.error.unlink(missing_ok=True)
        return run

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def services(self) -> Path:
        """Where each service leaves its address once it is bound."""
        return self.path / "services"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def error(self) -> Path:
        """Written by the trainer when it fails on purpose."""
        return self.path / "error.json"

    @property
    def ended(self) -> Path:
        """Why the run ended: written before its processes are stopped, so that each can say so."""
        return self.path / ENDED_FILE

    def write_config(self, config: Config) -> None:
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        partial = self.config.with_name(f"{self.config.name}.partial")
        partial.write_text("# As this run used it: defaults, overrides and the prepared model filled in.\n" + text)
        partial.replace(self.config)


def with_model(config: Config, model: Path) -> Config:
    """`config` with the prepared `model` in place of `model.init` and `warmup`."""
    section = config.model.model_copy(update={"path": model, "init": None})
    return config.model_copy(update={"model": section, "warmup": None})
