"""Dispatch: never over capacity, versions respected, longest first, the same plan for the same inputs."""

from __future__ import annotations

import copy
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.sgs.backlog import StreamBacklog
from services.sgs.dispatch import POLICIES, Assignment, QueuedGroup, UnitView, least_loaded, longest_first


def unit(unit_id: str, room: int = 8, *, load: float = 0.0, version: int = 0, limit: int = 1000) -> UnitView:
    return UnitView(unit_id, room, load, 8, version, limit, 100_000, 100_000)


def group(prompt_id: str, n: int, prompt: int = 10, arrival: int = 0, **more: str) -> QueuedGroup:
    return QueuedGroup(prompt_id, list(range(n)), prompt, 10, float(prompt + 10), arrival, **more)


def stream(name: str, groups: list[QueuedGroup], min_version: int = 0) -> StreamBacklog:
    backlog = StreamBacklog(name, longest_first)
    backlog.min_version = min_version
    backlog.extend(groups)
    return backlog


def short(plan: list[Assignment]) -> list[tuple[str, str, int]]:
    return [(a.group.prompt_id, a.unit_id, len(a.ks)) for a in plan]


def test_dispatch_longest_group_first_to_the_least_loaded() -> None:
    queue = stream("s", [group("a", 4, 10), group("b", 4, 50), group("c", 4, 30)])
    plan = least_loaded([queue], [unit("u"), unit("v", load=1.0)])
    assert short(plan) == [("b", "u", 4), ("c", "v", 4), ("a", "v", 4)]


def test_dispatch_keeps_siblings_on_a_unit_with_room_for_all() -> None:
    queue = stream("s", [group("a", 4)])
    assert short(least_loaded([queue], [unit("small", 2), unit("large", 4, load=9.0)])) == [("a", "large", 4)]


def test_dispatch_splits_only_when_the_stream_has_nothing_else() -> None:
    queue = stream("s", [group("a", 4, 50), group("b", 1, 10)])
    plan = least_loaded([queue], [unit("u", 2), unit("v", 2, load=1.0)])
    assert short(plan) == [("a", "u", 2), ("b", "v", 1), ("a", "v", 1)]


def test_dispatch_a_rest_waits_for_its_home_while_there_is_other_work() -> None:
    queue = stream("s", [group("a", 4, 50, home="u"), group("b", 1, 10)])
    assert short(least_loaded([queue], [unit("u", 0), unit("v", 1)])) == [("b", "v", 1)]
    assert short(least_loaded([queue], [unit("u", 1), unit("v", 1)])) == [("a", "u", 1), ("b", "v", 1)]
    only = stream("s", [group("a", 4, 50, home="u")])
    assert short(least_loaded([only], [unit("u", 0), unit("v", 1)])) == [("a", "v", 1)]


def test_dispatch_prefers_free_kv_cache() -> None:
    full = UnitView("full", 8, 0.0, 8, 0, 1000, 1000, 10)
    assert short(least_loaded([stream("s", [group("a", 2)])], [full, unit("v", load=5.0)])) == [("a", "v", 2)]
    assert short(least_loaded([stream("s", [group("a", 2)])], [full])) == [("a", "full", 2)]


def test_dispatch_older_stream_first_and_only_new_enough_units() -> None:
    streams = [stream("new", [group("a", 2)], min_version=3), stream("eval", [group("e", 8)])]
    plan = least_loaded(streams, [unit("old", 8, version=2), unit("new", 3, load=9.0, version=3)])
    assert short(plan) == [("a", "new", 2), ("e", "old", 8)]


def test_dispatch_avoids_a_stuck_unit_while_another_could_take_it() -> None:
    queue = stream("s", [group("a", 1, avoid="u")])
    assert least_loaded([queue], [unit("u"), unit("v", 0)]) == []
    assert short(least_loaded([queue], [unit("u"), unit("v", 1, load=99.0)])) == [("a", "v", 1)]
    assert short(least_loaded([queue], [unit("u"), unit("v", limit=15)])) == [("a", "u", 1)]


def test_dispatch_long_samples_do_not_block_short_ones() -> None:
    queue = stream("s", [group("long", 1, 500), group("short", 1, 10)])
    assert short(least_loaded([queue], [unit("small", limit=100)])) == [("short", "small", 1)]


units_strategy = st.lists(
    st.builds(
        lambda room, load, version, limit: (room, load, version, limit),
        st.integers(0, 6), st.integers(0, 5), st.integers(0, 2), st.sampled_from([15, 40, 1000]),
    ),
    max_size=5,
)  # fmt: skip
streams_strategy = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), max_size=8)), max_size=3
)


@given(units_strategy, streams_strategy)
def test_dispatch_properties(
    raw_units: list[tuple[int, int, int, int]], raw_streams: list[tuple[int, list[tuple[int, int]]]]
) -> None:
    units = [unit(f"u{i}", r, load=float(w), version=v, limit=m) for i, (r, w, v, m) in enumerate(raw_units)]
    streams = [
        stream(f"s{i}", [group(f"{i}/{j}", n, p, j) for j, (n, p) in enumerate(groups)], version)
        for i, (version, groups) in enumerate(raw_streams)
    ]
    before = copy.deepcopy(units)
    plan = POLICIES["least_loaded"].plan(streams, units)
    assert plan == POLICIES["least_loaded"].plan(streams, units), "not a function of its inputs"
    assert units == before

    by_id = {u.unit_id: u for u in units}
    taken = Counter((a.group.prompt_id, k) for a in plan for k in a.ks)
    assert not taken or max(taken.values()) == 1
    used: Counter[str] = Counter()
    for a in plan:
        used[a.unit_id] += len(a.ks)
        assert by_id[a.unit_id].version >= next(s.min_version for s in streams if s.name == a.stream)
        assert by_id[a.unit_id].limit >= a.group.tokens
    assert all(used[u.unit_id] <= u.room for u in units)

    for queue in streams:  # no unit with room is left idle while a sample waits that it could start
        for waiting in queue.groups():
            if all((waiting.prompt_id, k) in taken for k in waiting.ks):
                continue
            for u in units:
                able = u.version >= queue.min_version and u.limit >= waiting.tokens
                assert not able or used[u.unit_id] == u.room

    for queue in streams:  # of groups that are equally able to start, a longer one is never left for a shorter
        whole = [g for g in queue.groups() if not any((g.prompt_id, k) in taken for k in g.ks)]
        first = {a.group.prompt_id for a in plan if a.stream == queue.name}
        for left in whole:
            shorter = [g for g in queue.groups() if g.prompt_id in first and g.tokens < left.tokens]
            takers = {a.unit_id for a in plan for g in shorter if a.group.prompt_id == g.prompt_id}
            assert all(by_id[taker].limit < left.tokens for taker in takers)


def test_dispatch_backlog_keeps_order_through_takes_and_returns() -> None:
    queue = stream("s", [group("a", 2, 10, 0), group("b", 2, 50, 1), group("c", 1, 30, 2)])
    (first, *_rest) = least_loaded([queue], [unit("u", 1)])
    queue.take(first)
    assert next((g.prompt_id, g.ks, g.home) for g in queue.groups()) == ("b", [1], "u")
    queue.put_back(first.group, 0)
    queue.put_back(first.group, 7, avoid="u")
    assert [(g.prompt_id, g.ks) for g in queue.groups()] == [("b", [0, 1]), ("b", [7]), ("c", [0]), ("a", [0, 1])]
    queue.discard("b", 7, "u")
    queue.discard("c", 0, "")
    assert [g.prompt_id for g in queue.groups()] == ["b", "a"] and queue.samples == 4
    queue.forget_home("u")
    assert all(g.home == "" for g in queue.groups())
