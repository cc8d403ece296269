"""When generation of an iteration may start, in every mode: pure rules over iteration numbers.

Iteration `i` (from 0) trains at version `i` and publishes version `i + 1`.
"""

from __future__ import annotations

from services.config import PipelineConfig


def staleness_bound(pipeline: PipelineConfig) -> int:
    """Versions that a sample may be behind when it is used: 0 in the synchronous modes."""
    return pipeline.staleness if pipeline.mode == "async" else 0


def min_version(iteration: int, pipeline: PipelineConfig) -> int:
    """The oldest weights that may start samples of `iteration` (StreamRL section 4: one-step asynchronous)."""
    return max(0, iteration - staleness_bound(pipeline))


def open_until(iteration: int, pipeline: PipelineConfig) -> int:
    """While `iteration` trains, streams of all iterations below this are open.

    One more than the bound allows to start: its prompts wait at the head for the coming version, which saves a
    round trip and the planning window at the boundary.
    """
    return min(iteration + staleness_bound(pipeline) + 2, pipeline.iterations)


def group_quotas(groups: int, steps: int) -> list[int]:
    """How many of a rank's `groups` have been used after each of `steps` optimizer steps (cumulative)."""
    return [-(-groups * (step + 1) // steps) for step in range(steps)]
