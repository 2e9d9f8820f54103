"""Rules of the autopilot: never out of bounds, never back and forth under a constant load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqlayer.autopilot import (
    AutoCluster,
    AutoNode,
    AutoPartition,
    AutoTopic,
    HotKey,
    LoadFigures,
    LoadSample,
    LpLoads,
    PastChange,
    PolicyState,
    Proposal,
    RoutePolicy,
    Times,
    decide,
)
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.judging import ChangeToJudge, facts_before, judge
from mqlayer.autopilot.loads import load_figures
from mqlayer.autopilot.policy import check_policy, format_quiet, is_quiet, parse_quiet
from mqlayer.autopilot.rules import MERGE_BELOW, SPLIT_ABOVE, partitions_to_sample
from mqlayer.autopilot.why import report_of
from mqlayer.domain.routing import LP_COUNT, NodeId, even_ranges
from mqlayer.errors import InvalidInput

NODE = NodeId(1)
CLUSTER = AutoCluster([AutoNode(NODE, "n1")])
CAPACITY = 1000.0
OLD_S = 100_000.0


def figures(per_s: float, *, lag: int = 0, served_per_s: float | None = None) -> LoadFigures:
    return LoadFigures(per_s, per_s, True, lag, per_s if served_per_s is None else served_per_s)


def part(number: int, lp_from: int, lp_to: int, loads: Mapping[int, int]) -> AutoPartition:
    """A partition that was measured for long under a constant load, in messages per second and LP."""
    own = {lp: count for lp, count in loads.items() if lp_from <= lp < lp_to}
    hot = max(own, key=lambda lp: own[lp], default=None)
    key = None if hot is None else HotKey(f"key-{hot}", hot, own[hot] / sum(own.values()))
    return AutoPartition(
        number, NODE, lp_from, lp_to, OLD_S, False, None, figures(sum(own.values())), LpLoads(own, key)
    )


def topic_of(*parts: AutoPartition, changes: tuple[PastChange, ...] = (), **policy: object) -> AutoTopic:
    made = RoutePolicy(**({"mode": "on", "capacity_per_s": CAPACITY, "max_partitions": 1024} | policy))  # type: ignore[arg-type]
    return AutoTopic(1, "orders", 1, made, PolicyState(), parts, changes)


def tiled(count: int, loads: Mapping[int, int], **policy: Any) -> AutoTopic:
    return topic_of(*(part(n, *r, loads) for n, r in enumerate(even_ranges(count), start=1)), **policy)


LOADS = st.dictionaries(st.integers(0, LP_COUNT - 1), st.integers(1, 900), max_size=40)
PAST = st.builds(
    PastChange,
    change_id=st.integers(1, 9),
    kind=st.sampled_from(["split", "merge", "move"]),
    state=st.sampled_from(["planned", "sealing", "sealed", "done", "dropped"]),
    actor=st.sampled_from([ACTOR, "ann"]),
    ago_s=st.floats(0, 8000),
)


@given(
    loads=LOADS,
    count=st.integers(1, 12),
    changes=st.lists(PAST, max_size=6),
    fewest=st.integers(1, 12),
    most=st.integers(12, 14),
    budget=st.integers(1, 4),
    cool_down_s=st.floats(5, 3600),
    quiet=st.none() | st.tuples(st.integers(0, 1439), st.integers(0, 1439)),
    minute=st.integers(0, 1439),
    stopped=st.booleans(),
)
def test_no_change_is_out_of_bounds_or_out_of_budget(
    loads: dict[int, int], count: int, changes: list[PastChange], fewest: int, most: int, budget: int,
    cool_down_s: float, quiet: tuple[int, int] | None, minute: int, stopped: bool,
) -> None:  # fmt: skip
    topic = tiled(
        count, loads, min_partitions=fewest, max_partitions=most, changes_per_hour=budget, cool_down_s=cool_down_s,
        quiet=quiet,
    )  # fmt: skip
    state = PolicyState(stopped_at=datetime.now(UTC), stopped_because="r") if stopped else PolicyState()
    topic = replace(topic, changes=tuple(changes), minute=minute, state=state)
    chosen = decide(topic, CLUSTER).chosen
    if chosen is None:
        return
    after = count + chosen.grows_by
    assert after <= most or chosen.grows_by < 0
    assert after >= fewest or chosen.grows_by > 0
    assert not stopped
    assert not is_quiet(quiet, minute)
    assert not any(one.is_open for one in changes)
    counted = [one for one in changes if one.state == "done"]
    assert all(one.ago_s >= cool_down_s for one in counted)
    assert sum(one.actor == ACTOR and one.ago_s < 3600 for one in counted) < budget


def changed(topic: AutoTopic, chosen: Proposal, loads: Mapping[int, int], number: int) -> AutoTopic:
    """Return the topic behind a change, long after."""
    ended = [one for one in topic.partitions if one.partition in chosen.partitions]
    bounds = [ended[0].lp_from, *chosen.points, ended[-1].lp_to]
    made = [part(number + n, lo, hi, loads) for n, (lo, hi) in enumerate(pairwise(bounds))]
    kept = [one for one in topic.partitions if one not in ended]
    return replace(topic, partitions=tuple(sorted([*kept, *made], key=lambda one: one.lp_from)))


@given(loads=LOADS, count=st.integers(1, 16))
@example(loads={0: 701}, count=1)
@example(loads={0: 349, 1023: 352}, count=1)
@example(loads={5: 900, 6: 80}, count=2)
@example(loads={0: 657, 1: 73}, count=1)
def test_a_constant_load_comes_to_rest_without_going_back_and_forth(loads: dict[int, int], count: int) -> None:
    topic = tiled(count, loads)
    seen = [_bounds(topic)]
    while (chosen := decide(topic, CLUSTER).chosen) is not None:
        topic = changed(topic, chosen, loads, 100 * (len(seen) + 1))
        assert _bounds(topic) not in seen, "it goes back to where it was"
        seen.append(_bounds(topic))
    assert len(seen) <= count + 3 * len(loads) + 1, "it takes its time"
    for one in topic.partitions:
        single = one.lp_to - one.lp_from == 1
        hottest = max(one.loads.per_lp.values(), default=0) if one.loads else 0
        assert one.per_s <= SPLIT_ABOVE * CAPACITY or single or 10 * hottest > 9 * one.per_s


def _bounds(topic: AutoTopic) -> list[int]:
    return [one.lp_from for one in topic.partitions]


def test_a_hot_partition_is_split_where_its_load_halves() -> None:
    topic = tiled(1, {10: 200, 20: 200, 700: 201, 800: 200})
    chosen = decide(topic, CLUSTER).chosen
    assert chosen is not None
    assert (chosen.kind, chosen.partitions) == ("split", (1,))
    assert 20 < chosen.points[0] <= 700
    assert chosen.share == pytest.approx(401 / 801)
    assert "80% of its capacity" in chosen.reason
    calm = decide(tiled(1, {10: 350, 700: 350}), CLUSTER)
    assert calm.chosen is None
    assert calm.wanted is None


def test_a_key_with_most_of_the_load_is_isolated_where_that_frees_others() -> None:
    decision = decide(tiled(1, {9: 600, 10: 100, 500: 200}), CLUSTER)
    assert decision.chosen is not None
    assert decision.chosen.points == (9, 10)
    assert "key 'key-9' of LP 9 has 67%" in decision.chosen.reason
    at_the_edge = decide(tiled(1, {0: 600, 500: 300}), CLUSTER).chosen
    assert at_the_edge is not None
    assert at_the_edge.points == (1,)
    alone = decide(tiled(1, {9: 900, 500: 20}), CLUSTER)
    assert alone.chosen is None
    (refused,) = alone.refused
    assert (refused.key, refused.lp, refused.alarm) == ("key-9", 9, True)
    assert "no split helps" in refused.reason
    single = decide(topic_of(part(1, 0, 1, {0: 800}), part(2, 1, 1024, {5: 400})), CLUSTER)
    assert single.refused[0].lp == 0
    assert "divide the key" in single.refused[0].reason


def test_what_is_not_sampled_is_not_split() -> None:
    bare = replace(part(1, 0, 1024, {5: 900}), loads=None)
    decision = decide(topic_of(bare), CLUSTER)
    assert decision.chosen is None
    assert decision.waits == "its LPs are not sampled yet"
    assert partitions_to_sample(topic_of(bare)) == [bare]
    cooling = topic_of(bare, changes=(PastChange(1, "split", "done", "ann", 5.0),))
    assert partitions_to_sample(cooling) == [], "no sample is taken for a change that has to wait"
    assert decide(cooling, CLUSTER).waits == "cool-down, 55 s more"


@pytest.mark.parametrize(
    "spoil",
    [
        {"figures": figures(100, lag=500)},
        {"draining": True},
        {"node": NodeId(2)},
        {"figures": LoadFigures(100, 100, False)},
        {"figures": LoadFigures(100, 300, True)},
    ],
)
def test_neighbours_are_merged_only_where_they_are_cold_for_long_and_drained(spoil: dict[str, object]) -> None:
    cold = (part(1, 0, 512, {5: 100}), part(2, 512, 1024, {700: 100}))
    chosen = decide(topic_of(*cold), CLUSTER).chosen
    assert chosen is not None
    assert (chosen.kind, chosen.partitions) == ("merge", (1, 2))
    assert decide(topic_of(cold[0], replace(cold[1], **spoil)), CLUSTER).chosen is None  # type: ignore[arg-type]
    assert decide(topic_of(*cold, min_partitions=2), CLUSTER).waits.endswith("it keeps at least 2")


def test_a_split_is_preferred_to_a_merge() -> None:
    parts = [part(1, 0, 100, {}), part(2, 100, 200, {}), part(3, 200, 1024, {300: 400, 900: 400})]
    chosen = decide(topic_of(*parts), CLUSTER).chosen
    assert chosen is not None
    assert chosen.partitions == (3,)


@pytest.mark.parametrize(
    ("text", "minute", "quiet"),
    [("22:00-06:00", 0, True), ("22:00-06:00", 360, False), ("09:00-10:00", 599, True), ("09:00-10:00", 600, False)],
)
def test_quiet_hours_may_span_midnight(text: str, minute: int, quiet: bool) -> None:
    assert is_quiet(parse_quiet(text), minute) is quiet
    assert format_quiet(parse_quiet(text)) == text
    with pytest.raises(InvalidInput, match="say 22:00-06:00"):
        parse_quiet("night")


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "auto"}, {"min_partitions": 9, "max_partitions": 3}, {"max_partitions": 1025}, {"capacity_per_s": 0.1},
        {"changes_per_hour": 0}, {"cool_down_s": 1.0}, {"rest_s": float("nan")}, {"quiet": (60, 60)},
    ],
)  # fmt: skip
def test_a_policy_out_of_its_bounds_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        check_policy(RoutePolicy(**wrong))  # type: ignore[arg-type]


# -- loads -----------------------------------------------------------------------------------------------------------


def samples(
    per_s: float, *, over_s: float, every_s: float = 5.0, served_per_s: float | None = None
) -> list[LoadSample]:
    served = per_s if served_per_s is None else served_per_s
    times = [at * every_s for at in range(int(over_s / every_s) + 1)]
    return [LoadSample(at, int(1 + per_s * at), int(1 + served * at)) for at in reversed(times)]


def test_the_load_is_of_the_last_window_the_peak_of_all() -> None:
    busy = samples(500, over_s=60)
    end = busy[0]
    calm = [LoadSample(end.at + n, end.next_offset, end.next_offset) for n in (15, 10, 5)]
    found = load_figures([*calm, *busy], Times())
    assert found.per_s == 0
    assert found.peak_per_s == pytest.approx(500)
    assert not found.is_whole
    assert load_figures(samples(5, over_s=300), Times()).is_whole
    assert load_figures(samples(5, over_s=5), Times()).per_s is None, "no window is full"
    fell = [LoadSample(20, 1, 1), LoadSample(10, 900, 900), LoadSample(0, 800, 800)]
    assert load_figures(fell, Times()).per_s == 0, "offsets that a node gave out again are no load"


def test_a_hole_ends_the_history() -> None:
    late = [LoadSample(one.at + 1000, one.next_offset, one.settled) for one in samples(5, over_s=20)]
    found = load_figures([*late, *samples(9_000, over_s=300)], Times())
    assert (found.per_s, found.peak_per_s, found.is_whole) == (5, 5, False)


def test_only_a_group_with_a_backlog_all_along_shows_its_limit() -> None:
    assert load_figures(samples(500, over_s=60), Times()).limit_per_s is None
    behind = load_figures(samples(500, over_s=60, served_per_s=300), Times())
    assert behind.limit_per_s == pytest.approx(300)
    assert behind.lag == 12_000
    assert load_figures(samples(500, over_s=60, served_per_s=0), Times()).limit_per_s is None, "it is away"


# -- judgements ------------------------------------------------------------------------------------------------------


def judged(
    before: AutoTopic, *after: AutoPartition, share: float = 0.5, state: str = "done", ago_s: float = 60.0,
    drained: bool = True, kind: str = "split", successors: tuple[int, ...] = (2, 3),
) -> tuple[bool | None, str] | None:  # fmt: skip
    facts = facts_before(before, before.partitions[:1], share)
    change = ChangeToJudge(1, 1, kind, facts, state, ago_s, drained, successors)
    found = judge(topic_of(*after), change, Times())
    return None if found is None else (found.helped, found.reason)


HOT = topic_of(part(1, 0, 1024, {5: 400, 700: 400}))
LEFT, RIGHT = part(2, 0, 512, {5: 500}), part(3, 512, 1024, {700: 500})
BEHIND = topic_of(replace(part(1, 0, 1024, {5: 800}), figures=figures(800, lag=5_000, served_per_s=600)))


def test_a_split_is_compared_with_the_share_that_was_foretold() -> None:
    assert judged(HOT, LEFT, RIGHT) == (True, "the heaviest successor has 50% of the load")
    heavy = replace(LEFT, figures=figures(5_000))
    assert judged(HOT, heavy, RIGHT) == (False, "one successor has 91% of the load, 50% were foretold")
    assert judged(HOT, heavy, RIGHT, share=0.9)[0], "as foretold"  # type: ignore[index]
    gone = [replace(one, figures=figures(1)) for one in (LEFT, RIGHT)]
    assert judged(HOT, *gone) == (None, "the load went away by itself")
    assert judged(HOT, LEFT) == (None, "its partitions changed again")
    assert judged(HOT, LEFT, RIGHT, ago_s=5) is None
    assert judged(HOT, LEFT, RIGHT, state="sealed") is None
    assert judged(HOT, LEFT, RIGHT, state="dropped") == (None, "it was dropped")


def test_a_lag_has_to_fall_or_more_has_to_be_handled() -> None:
    def parts(lag: int, served: float) -> list[AutoPartition]:
        return [replace(one, figures=figures(400, lag=lag // 2, served_per_s=served / 2)) for one in (LEFT, RIGHT)]

    assert judged(BEHIND, *parts(4_000, 600))[0] is True  # type: ignore[index]
    assert judged(BEHIND, *parts(9_000, 900))[0] is True  # type: ignore[index]
    helped, reason = judged(BEHIND, *parts(9_000, 620))  # type: ignore[misc]
    assert helped is False
    assert "members or handlers are missing" in reason
    assert judged(BEHIND, *parts(9_000, 620), drained=False) is None, "its successors wait for their parents"
    assert judged(BEHIND, *parts(9_000, 620), drained=False, ago_s=700)[0] is False  # type: ignore[index]


def test_the_report_has_a_verdict_and_a_reason_of_each_partition() -> None:
    parts = [part(1, 0, 1, {0: 800}), part(2, 1, 500, {5: 400, 300: 400}), part(3, 500, 1024, {700: 500})]
    unknown = replace(part(4, 1023, 1024, {}), figures=LoadFigures())
    found = report_of(topic_of(*parts, unknown), CLUSTER)
    assert [one.verdict for one in found.partitions] == ["split refused", "split wanted", "fine", "unknown"]
    assert all(one.reason for one in found.partitions)
    assert MERGE_BELOW * 2 <= SPLIT_ABOVE
