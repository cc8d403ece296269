"""How long emulated samples get: a distribution, or lengths seen in a real run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.config import EmulatedEngine as Profile
from services.errors import ConfigError, EngineError
from services.samples import SampleId

Lengths = Callable[[SampleId, np.random.Generator], int]


def lengths_from(profile: Profile) -> Lengths:
    """A function of the sample and its own generator: completion tokens, at least 1, before any cap.

    Raises `ConfigError` for a trace that is missing or malformed.
    """
    if profile.lengths == "trace":
        return _traced(profile.trace)
    if profile.mean < 1:
        raise ConfigError(f"engine.emulated.mean: {profile.mean:g} tokens is below 1")
    if profile.lengths == "constant":
        return lambda _id, _rng: round(profile.mean)
    if profile.lengths == "uniform":
        return lambda _id, rng: int(rng.integers(1, max(2 * round(profile.mean), 2)))
    mu = math.log(profile.mean) - profile.sigma**2 / 2
    return lambda _id, rng: max(1, round(float(rng.lognormal(mu, profile.sigma))))


def _traced(path: Path | None) -> Lengths:
    if path is None:
        raise ConfigError("engine.emulated.trace: lengths: trace needs a file of {prompt_id, lengths: [..]} lines")
    trace = _read_trace(path)

    def length(sample_id: SampleId, _rng: np.random.Generator) -> int:
        seen = trace.get(sample_id.prompt_id)
        if seen is None:
            raise EngineError(f"sample {sample_id}: {path} has no lengths for its prompt")
        return seen[sample_id.k % len(seen)]

    return length


def _read_trace(path: Path) -> dict[str, list[int]]:
    trace: dict[str, list[int]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"engine.emulated.trace: {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt_id, lengths = str(row["prompt_id"]), [int(length) for length in row["lengths"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}:{number}: expected {{prompt_id, lengths: [..]}}") from None
        if not lengths or min(lengths) < 1:
            raise ConfigError(f"{path}:{number}: lengths must be one or more numbers of tokens, each at least 1")
        trace[prompt_id] = lengths
    return trace
