from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import DataError
from trainer.data.loader import Loader, fingerprint, prompt_id, shard


@given(count=st.integers(1, 40), seed=st.integers(0, 5), shuffle=st.booleans(), takes=st.lists(st.integers(0, 50)))
def test_positions_never_repeat_and_every_epoch_is_every_row_once(
    count: int, seed: int, shuffle: bool, takes: list[int]
) -> None:
    loader = Loader(count, seed, shuffle)
    taken = [pair for n in takes for pair in loader.take(n)]
    assert [position for position, _ in taken] == list(range(sum(takes)))
    rows = [row for _, row in taken]
    for start in range(0, len(rows) - count + 1, count):
        assert sorted(rows[start : start + count]) == list(range(count))
    assert loader.cursor == sum(takes)


@given(count=st.integers(1, 40), before=st.integers(0, 100), after=st.integers(0, 100), shuffle=st.booleans())
def test_a_resumed_loader_continues(count: int, before: int, after: int, shuffle: bool) -> None:
    whole = Loader(count, 7, shuffle, "data")
    whole.take(before)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = Loader(count, 7, shuffle, "data")
    resumed.load_state_dict(state)
    assert resumed.take(after) == whole.take(after)


def test_epochs_and_seeds_differ_in_order() -> None:
    loader = Loader(50, 0, True)
    first, second = ([row for _, row in loader.take(50)] for _ in range(2))
    assert first != second
    assert first != [row for _, row in Loader(50, 1, True).take(50)]
    assert [row for _, row in Loader(4, 0, False).take(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("changed", [{"count": 9}, {"seed": 1}, {"shuffle": False}, {"fingerprint": "other"}])
def test_a_checkpoint_of_another_dataset_is_refused(changed: dict[str, object]) -> None:
    made = {"count": 10, "seed": 0, "shuffle": True, "fingerprint": "data"}
    state = Loader(**made).state_dict()  # type: ignore[arg-type]
    other = Loader(**{**made, **changed})  # type: ignore[arg-type]
    (key,) = changed
    with pytest.raises(DataError, match=f"{key} was"):
        other.load_state_dict(state)


@given(count=st.integers(0, 30), world=st.integers(1, 8))
def test_shards_are_a_partition_of_even_sizes(count: int, world: int) -> None:
    items = list(range(count))
    shards = [shard(items, rank, world) for rank in range(world)]
    assert sorted(item for one in shards for item in one) == items
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_names() -> None:
    assert prompt_id(12) == "train/12"
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["ab", "c"]) == fingerprint(iter(["ab", "c"]))
    with pytest.raises(DataError, match="no rows"):
        Loader(0, 0, True)
