from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.config import PipelineConfig
from trainer.pipeline.schedule import group_quotas, min_version, open_until, staleness_bound


def test_synchronous_modes_generate_with_the_weights_they_train() -> None:
    for mode in ("batch", "stream"):
        pipeline = PipelineConfig(mode=mode, iterations=10, staleness=3)
        assert staleness_bound(pipeline) == 0
        assert [min_version(i, pipeline) for i in range(4)] == [0, 1, 2, 3]


@given(iteration=st.integers(0, 50), bound=st.integers(1, 5))
def test_async_never_waits_for_the_training_that_runs(iteration: int, bound: int) -> None:
    pipeline = PipelineConfig(mode="async", iterations=100, staleness=bound)
    # While `iteration` trains the newest version is `iteration`: the next iterations up to the bound may start.
    assert all(min_version(iteration + ahead, pipeline) <= iteration for ahead in range(bound + 1))
    assert min_version(iteration + bound + 1, pipeline) == iteration + 1
    # And they are open by then.
    assert open_until(iteration, pipeline) > iteration + bound


def test_nothing_opens_past_the_last_iteration() -> None:
    pipeline = PipelineConfig(mode="async", iterations=5)
    assert open_until(4, pipeline) == 5


@given(groups=st.integers(0, 100), steps=st.integers(1, 10))
def test_quotas_use_every_group_and_grow_evenly(groups: int, steps: int) -> None:
    quotas = group_quotas(groups, steps)
    assert len(quotas) == steps and quotas[-1] == groups
    sizes = [after - before for before, after in zip([0, *quotas], quotas, strict=False)]
    assert max(sizes) - min(sizes) <= 1
