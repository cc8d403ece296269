"""The version protocol of units as a state machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sgs.records import SessionKey
from services.sgs.versions import (
    MAX_ATTEMPTS,
    CommitPolicy,
    Published,
    Report,
    Tag,
    Transfer,
    Versions,
    WeightState,
)

S1, S2 = SessionKey("run", "s1"), SessionKey("run", "s2")
NOBODY = SessionKey("", "")
NOTHING = Transfer(-1, "")
STAGE, COMMIT = False, True


def of(version: int, session: SessionKey = S1) -> Transfer:
    return Transfer(version, f"{session}-{version}")


def tag(version: int, session: SessionKey = S1) -> Tag:
    return Tag(session, of(version, session))


def published(version: int, session: SessionKey = S1, policy: CommitPolicy = CommitPolicy.BOUNDARY) -> Published[str]:
    return Published(tag(version, session), f"body {version}", policy, 60.0)


def fresh(*units: str) -> Versions[str]:
    book: Versions[str] = Versions()
    for unit in units:
        book.attach(unit, NOTHING, NOBODY)
    return book


def commands(book: Versions[str], now: float = 0.0, idle: bool = True) -> list[tuple[str, bool, int]]:
    given = book.commands(now, lambda _unit: idle)
    assert all(book.published and command.transfer == book.published.tag.transfer for command in given)
    return [(command.unit_id, command.commit, command.transfer.version) for command in given]


def say(
    book: Versions[str],
    version: int,
    state: WeightState,
    now: float = 0.0,
    error: str = "",
    session: SessionKey = S1,
) -> Tag | None:
    return book.report("u", Report(of(version, session), state, error), now)


def committed(book: Versions[str], version: int, session: SessionKey = S1) -> None:
    commands(book)
    say(book, version, WeightState.STAGED, session=session)
    commands(book)
    say(book, version, WeightState.COMMITTED, session=session)


def test_versions_count_only_after_the_acknowledgement() -> None:
    book = fresh("u")
    book.publish(published(3))
    assert commands(book) == [("u", STAGE, 3)]
    assert commands(book) == []
    say(book, 3, WeightState.STAGED)
    assert commands(book, idle=False) == [] and not book.pausing("u")
    assert commands(book) == [("u", COMMIT, 3)]
    assert book.pausing("u") and book.usable("u", S1) == -1
    assert say(book, 3, WeightState.COMMITTED) == tag(3)
    assert not book.pausing("u") and book.usable("u", S1) == 3 and book.usable("u", S2) == -1
    assert commands(book) == []


def test_versions_immediate_commits_busy_units_without_a_pause() -> None:
    book = fresh("u")
    book.publish(published(3, policy=CommitPolicy.IMMEDIATE))
    commands(book)
    say(book, 3, WeightState.STAGED)
    assert commands(book, idle=False) == [("u", COMMIT, 3)]
    assert not book.pausing("u")


def test_versions_newer_publish_replaces_one_on_its_way() -> None:
    book = fresh("u")
    book.publish(published(3))
    commands(book)
    say(book, 3, WeightState.STAGED)
    commands(book)
    book.publish(published(4))
    assert commands(book) == [("u", STAGE, 4)]
    assert say(book, 3, WeightState.COMMITTED) == tag(3)
    assert book.usable("u", S1) == 3 and book.units["u"].state is WeightState.STAGING
    say(book, 4, WeightState.STAGED)
    assert commands(book) == [("u", COMMIT, 4)]


def test_versions_failures_are_retried_with_growing_pauses_and_given_up() -> None:
    book = fresh("u")
    book.publish(published(3))
    now, waits = 0.0, []
    for _ in range(MAX_ATTEMPTS):
        assert commands(book, now) == [("u", STAGE, 3)]
        say(book, 3, WeightState.FAILED, now, "digest")
        assert commands(book, now) == []
        waits.append(book.units["u"].due - now)
        now = book.units["u"].due
    assert waits == sorted(waits) and waits[0] < waits[1]
    assert commands(book, now + 1000) == [] and book.given_up("u")
    assert book.reached(3, WeightState.COMMITTED) and book.units["u"].error == "digest"
    book.publish(published(4))
    assert commands(book, now) == [("u", STAGE, 4)]


@pytest.mark.parametrize("stage_answered", [False, True])
def test_versions_silence_counts_as_failure(stage_answered: bool) -> None:
    book = fresh("u")
    book.publish(published(3))
    commands(book)
    if stage_answered:
        say(book, 3, WeightState.STAGED)
        commands(book)
    assert commands(book, 59.0) == []
    assert commands(book, 66.0) == []
    assert book.units["u"].state is WeightState.FAILED and "no answer to" in book.units["u"].error
    assert commands(book, 80.0) == [("u", STAGE, 3)]


def test_versions_new_session_with_the_same_number_stages_again() -> None:
    book = fresh("u")
    book.publish(published(3))
    committed(book, 3)
    book.publish(published(3, S2))
    assert book.usable("u", S2) == -1
    assert say(book, 3, WeightState.COMMITTED) is None, "word about the older session's weights"
    assert book.usable("u", S2) == -1
    committed(book, 3, S2)
    assert book.usable("u", S2) == 3


@pytest.mark.parametrize("old_word", [WeightState.STAGED, WeightState.COMMITTED, WeightState.FAILED])
def test_versions_late_word_about_the_same_number_of_an_older_session_does_not_count(old_word: WeightState) -> None:
    book = fresh("u")
    book.publish(published(3))
    commands(book)
    book.publish(published(3, S2))
    assert commands(book) == [("u", STAGE, 3)]
    say(book, 3, old_word)
    assert book.units["u"].state is WeightState.STAGING and commands(book) == []
    say(book, 3, WeightState.STAGED, session=S2)
    assert commands(book) == [("u", COMMIT, 3)]
    assert say(book, 3, old_word) is None and book.pausing("u")
    assert say(book, 3, WeightState.COMMITTED, session=S2) == tag(3, S2)


def test_versions_of_a_gone_session_are_withdrawn() -> None:
    book = fresh("u")
    book.publish(published(3))
    book.withdraw()
    assert book.version == -1 and commands(book) == []


def test_versions_reattached_and_late_units() -> None:
    book = fresh()
    book.publish(published(3))
    book.attach("late", NOTHING, NOBODY)
    book.attach("current", of(3), S1)
    book.attach("behind", of(2), S1)
    book.attach("foreign", of(3, S2), S2)
    assert commands(book) == [("late", STAGE, 3), ("behind", STAGE, 3), ("foreign", STAGE, 3)]
    assert book.usable("behind", S1) == 2 and book.usable("foreign", S1) == -1
    book.detach("current")
    book.attach("current", of(3), NOBODY)
    assert book.usable("current", S1) == 3


def test_versions_a_commit_cut_off_by_a_lost_stream_is_not_assumed() -> None:
    book = fresh("u")
    book.publish(published(3))
    committed(book, 3)
    book.publish(published(3, S2))
    commands(book)
    say(book, 3, WeightState.STAGED, session=S2)
    assert commands(book) == [("u", COMMIT, 3)]
    book.detach("u")
    book.attach("u", of(3), NOBODY)
    assert book.usable("u", S1) == book.usable("u", S2) == -1
    assert commands(book) == [("u", STAGE, 3)]


def test_versions_reached_needs_a_unit_and_the_version() -> None:
    book = fresh()
    book.publish(published(3))
    assert not book.reached(3, WeightState.STAGED)
    book.attach("u", NOTHING, NOBODY)
    assert not book.reached(3, WeightState.STAGED)
    commands(book)
    say(book, 3, WeightState.STAGED)
    assert book.reached(3, WeightState.STAGED) and not book.reached(3, WeightState.COMMITTED)
    assert not book.reached(4, WeightState.STAGED)


words = st.sampled_from([WeightState.STAGING, WeightState.STAGED, WeightState.COMMITTED, WeightState.FAILED])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 3), st.sampled_from([S1, S2])),
        st.tuples(st.just("say"), st.integers(0, 3), st.tuples(words, st.sampled_from([S1, S2]))),
        st.tuples(st.just("commands"), st.booleans(), st.just(None)),
    ),
    max_size=30,
)


@given(steps)
def test_versions_never_commit_what_was_not_staged_for_it(script: list[tuple[str, int, object]]) -> None:
    book, now, told_to_commit = fresh("u"), 0.0, set()
    for what, number, more in script:
        now += 1.0
        if what == "publish":
            assert isinstance(more, SessionKey)
            book.publish(published(number, more))
        elif what == "say":
            assert isinstance(more, tuple)
            done = say(book, number, more[0], now, session=more[1])
            assert done is None or done in told_to_commit
        else:
            for _unit, commit, _version in commands(book, now, bool(number)):
                if commit:
                    assert book.published is not None
                    assert number, "committed a busy unit"
                    told_to_commit.add(book.published.tag)
        has = book.units["u"].committed
        assert has is None or has in told_to_commit
