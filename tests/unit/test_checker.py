"""What the checker calls broken, and what it does not, told in the shortest histories that show it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fixtures.wait import awake_s
from tests.proof.checker import Breach, Verdict, check
from tests.proof.history import (
    Ack,
    Append,
    Deliver,
    Drain,
    Effect,
    FallBack,
    Gate,
    Health,
    Lineage,
    OwnershipEvent,
    Publish,
    Quarantined,
    Seal,
    Settled,
)
from tests.proof.stories import TICK_NS, Story


def about(seq: int, key: str | None = "k", **facts: Any) -> dict[str, Any]:
    """The part of an event that names a message."""
    return {"topic": "t", "key": key, "source": 1, "lp": 0, "seq": seq, "value": f"v{seq}", **facts}


class Tale(Story):
    """A story of one topic, one group, one key, unless said otherwise."""

    def published(self, *seqs: int, **facts: Any) -> None:
        for seq in seqs:
            self.tell(Publish(**about(seq, **facts)))

    def appended(self, *seqs: int, partition: int = 1, first_offset: int = 1, run: str = "") -> None:
        for offset, seq in enumerate(seqs, start=first_offset):
            self.tell(Append(**about(seq), partition=partition, offset=offset, run=run))

    def delivery(self, seq: int, *, epoch: int = 1, partition: int = 1, **facts: Any) -> int:
        return self.begin(Deliver(**about(seq, **facts), group="g", partition=partition, epoch=epoch))

    def handled(self, *seqs: int, epoch: int = 1, partition: int = 1, **facts: Any) -> None:
        for seq in seqs:
            self.end(self.delivery(seq, epoch=epoch, partition=partition, **facts))

    def effect(self, *seqs: int, epoch: int = 1, fenced: bool = True, **facts: Any) -> None:
        for seq in seqs:
            self.tell(Effect(**about(seq, **facts), group="g", partition=1, epoch=epoch, fenced=fenced))

    def acked(self, *seqs: int, epoch: int = 1, phase: Any = "ok") -> None:
        for seq in seqs:
            self.tell(Ack(**about(seq), group="g", partition=1, epoch=epoch), phase)

    def quarantined(self, seq: int, how: Any = "dead") -> None:
        self.tell(Quarantined(**about(seq), group="g", how=how, reason="no attempts left"))

    def assigned(self, change: Any, member: str, epoch: int, until_ns: int | None = None) -> None:
        event = OwnershipEvent(
            topic="t", group="g", partition=1, member=member, epoch=epoch, change=change, until_ns=until_ns
        )
        self.tell(event, process=member)

    def verdict(self, **options: Any) -> Verdict:
        return check(self.records, **options)

    def shows(self, *breaches: Breach, **options: Any) -> None:
        verdict = self.verdict(**options)
        assert verdict.broken == set(breaches), verdict


@pytest.fixture
def tale() -> Tale:
    return Tale()


class TestContents:
    def test_published_appended_handled_and_acknowledged_is_clean(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.appended(1, 2)
        tale.handled(1, 2)
        tale.effect(1, 2)
        tale.acked(1, 2)
        tale.shows()

    def test_an_empty_history_is_clean(self, tale: Tale) -> None:
        tale.shows()

    def test_a_rolled_back_message_must_not_be_seen(self, tale: Tale) -> None:
        tale.tell(Publish(**about(1, value="rolled back")), "fail")
        tale.handled(1, value="rolled back")
        tale.shows(Breach.ABORTED)

    def test_a_rolled_back_seq_is_given_out_again(self, tale: Tale) -> None:
        tale.tell(Publish(**about(1, value="rolled back")), "fail")
        tale.published(1)
        tale.handled(1)
        tale.shows()

    def test_a_retried_transaction_may_publish_the_same_value(self, tale: Tale) -> None:
        tale.tell(Publish(**about(0, value="v1")), "fail")
        tale.published(1)
        tale.handled(1)
        tale.shows()

    def test_a_publish_of_unknown_outcome_may_have_happened(self, tale: Tale) -> None:
        tale.begin(Publish(**about(0, value="v1")))
        tale.handled(1)
        tale.shows()

    def test_a_publish_of_unknown_outcome_need_not_have_happened(self, tale: Tale) -> None:
        tale.tell(Publish(**about(0, value="v1")), "info")
        tale.published(1, value="v2")
        tale.handled(1, value="v2")
        tale.shows()

    def test_a_message_that_nobody_published_is_a_phantom(self, tale: Tale) -> None:
        tale.published(1)
        tale.handled(1, 2)
        tale.shows(Breach.PHANTOM)

    def test_without_recorded_publishes_nothing_is_a_phantom(self, tale: Tale) -> None:
        tale.handled(1, 2)
        tale.shows()

    @pytest.mark.parametrize("facts", [{"value": "other"}, {"key": "other"}])
    def test_one_identity_has_one_content(self, tale: Tale, facts: dict[str, Any]) -> None:
        tale.published(1)
        tale.handled(1)
        tale.effect(1, **facts)
        tale.shows(Breach.INCONSISTENT)


class TestStreams:
    def test_a_message_at_two_offsets_is_a_duplicate(self, tale: Tale) -> None:
        tale.appended(1, 2, 2, 3)
        tale.shows(Breach.DUPLICATE_IN_STREAM)

    def test_a_message_in_two_partitions_is_a_duplicate(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.appended(2, 3, partition=2)
        tale.shows(Breach.DUPLICATE_IN_STREAM)

    def test_two_witnesses_of_one_position_are_no_duplicate(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.appended(1, 2)
        tale.shows()

    def test_what_a_node_lost_is_appended_again(self, tale: Tale) -> None:
        tale.appended(1, 2, 3, run="first")
        tale.appended(2, 3, 4, first_offset=2, run="second")
        tale.shows()

    def test_a_position_holds_one_message(self, tale: Tale) -> None:
        tale.appended(1)
        tale.appended(2)
        tale.shows(Breach.INCONSISTENT, Breach.CHAIN_BREAK)

    def test_a_hole_breaks_the_chain(self, tale: Tale) -> None:
        tale.appended(1, 2, 4)
        tale.shows(Breach.CHAIN_BREAK)

    def test_a_missing_beginning_breaks_the_chain(self, tale: Tale) -> None:
        tale.appended(2, 3)
        tale.shows(Breach.CHAIN_BREAK)

    def test_two_in_wrong_order_break_the_chain(self, tale: Tale) -> None:
        tale.appended(2, 1)
        tale.shows(Breach.CHAIN_BREAK)

    def test_a_chain_goes_on_in_another_partition(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.appended(3, 4, partition=2)
        tale.shows()

    def test_a_hole_between_partitions_breaks_the_chain(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.appended(4, 5, partition=2)
        tale.shows(Breach.CHAIN_BREAK)


class TestDeliveries:
    def test_a_message_never_handled_is_lost(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.handled(1)
        tale.shows(Breach.LOST)

    def test_before_the_end_of_a_run_nothing_is_lost(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.handled(1)
        tale.shows(drained=False)

    def test_a_group_that_saw_nothing_lost_everything(self, tale: Tale) -> None:
        tale.published(1)
        tale.shows(Breach.LOST, flows=[("g", "t")])

    def test_a_handler_that_never_returned_did_not_handle(self, tale: Tale) -> None:
        tale.published(1)
        tale.delivery(1)
        tale.shows(Breach.LOST)

    def test_a_message_passed_over_is_skipped_and_lost(self, tale: Tale) -> None:
        tale.published(1, 2, 3)
        tale.handled(1, 3)
        tale.shows(Breach.SKIP_WITHOUT_RECORD, Breach.LOST)

    def test_a_message_is_passed_over_with_a_record(self, tale: Tale) -> None:
        tale.published(1, 2, 3)
        tale.handled(1)
        tale.quarantined(2)
        tale.handled(3)
        tale.shows()

    def test_a_record_written_too_late_is_an_inversion(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.handled(2)
        tale.quarantined(1)
        tale.shows(Breach.INVERSION)

    def test_a_parked_message_keeps_the_later_ones_waiting(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.quarantined(1, "park")
        tale.handled(2)
        tale.shows(Breach.SKIP_WITHOUT_RECORD)

    def test_parked_messages_may_wait_for_ever_or_be_handled_in_order(self, tale: Tale) -> None:
        tale.published(1, 2, 3)
        for seq in (1, 2, 3):
            tale.quarantined(seq, "park")
        tale.handled(1, 2)
        tale.shows()

    def test_a_swap_is_an_inversion(self, tale: Tale) -> None:
        tale.handled(2, 1)
        tale.shows(Breach.INVERSION)

    def test_two_of_a_key_at_a_time_are_an_inversion(self, tale: Tale) -> None:
        first = tale.delivery(1)
        second = tale.delivery(2)
        tale.end(first)
        tale.end(second)
        tale.shows(Breach.INVERSION)

    def test_a_message_after_a_failed_attempt_of_the_one_before_is_an_inversion(self, tale: Tale) -> None:
        tale.end(tale.delivery(1), "fail")
        tale.handled(2, 1)
        tale.shows(Breach.INVERSION)

    def test_attempts_go_on_until_one_succeeds(self, tale: Tale) -> None:
        tale.end(tale.delivery(1), "fail")
        tale.end(tale.delivery(1), "fail")
        tale.handled(1, 2)
        tale.shows()

    def test_keys_have_no_order_among_each_other(self, tale: Tale) -> None:
        tale.handled(2, key="b")
        tale.handled(1, key="a")
        tale.shows()

    def test_messages_without_a_key_have_no_order(self, tale: Tale) -> None:
        tale.handled(2, 1, key=None)
        tale.shows()


class TestReplays:
    def test_what_was_in_hand_comes_again_in_order(self, tale: Tale) -> None:
        tale.handled(1, 2)
        tale.handled(1, 2, 3, epoch=2)
        tale.acked(1, 2, 3, epoch=2)
        tale.shows()
        assert tale.verdict().redelivered == 2

    def test_a_replay_may_pass_over_what_was_acknowledged(self, tale: Tale) -> None:
        tale.handled(1, 2, 3)
        tale.acked(2)
        tale.handled(1, 3, 4, epoch=2)
        tale.acked(1, 3, 4, epoch=2)
        tale.shows()

    def test_a_replay_that_passes_over_an_unsettled_message_is_out_of_order(self, tale: Tale) -> None:
        tale.handled(1, 2, 3)
        tale.handled(1, 3, epoch=2)
        tale.acked(1, 2, 3, epoch=2)
        tale.shows(Breach.REPLAY_OUT_OF_ORDER)

    def test_a_new_owner_that_begins_behind_an_unsettled_message_is_out_of_order(self, tale: Tale) -> None:
        tale.handled(1, 2)
        tale.handled(2, 3, epoch=2)
        tale.acked(1, 2, 3, epoch=2)
        tale.shows(Breach.REPLAY_OUT_OF_ORDER)

    def test_without_acks_a_replay_may_begin_anywhere(self, tale: Tale) -> None:
        tale.handled(1, 2, 3)
        tale.handled(2, 3, 4, epoch=2)
        tale.shows()

    def test_a_replay_does_not_allow_a_first_delivery_out_of_order(self, tale: Tale) -> None:
        tale.handled(1, 2)
        tale.handled(1, 4, 3, epoch=2)
        tale.shows(Breach.INVERSION)

    def test_what_was_settled_does_not_come_again(self, tale: Tale) -> None:
        tale.handled(1)
        tale.acked(1)
        tale.handled(1, epoch=2)
        tale.shows(Breach.REPLAY_OF_SETTLED)

    def test_what_a_member_knows_to_be_settled_does_not_come_again(self, tale: Tale) -> None:
        tale.handled(1)
        tale.tell(Settled(**about(1), group="g", partition=1, epoch=1))
        tale.handled(1, epoch=2)
        tale.shows(Breach.REPLAY_OF_SETTLED)

    def test_what_its_node_lost_while_a_member_was_told_comes_again(self, tale: Tale) -> None:
        tale.handled(1)
        operation = tale.begin(Settled(**about(1), group="g", partition=1, epoch=1))
        tale.tell(FallBack(topic="t", partition=1))
        tale.end(operation)
        tale.handled(1, epoch=2)
        tale.shows()

    def test_a_refused_ack_settles_nothing(self, tale: Tale) -> None:
        tale.handled(1)
        tale.acked(1, phase="fail")
        tale.handled(1, epoch=2)
        tale.acked(1, epoch=2)
        tale.shows()

    @pytest.mark.parametrize("phase", ["info", "ok"])
    def test_an_ack_of_unknown_outcome_settles_or_not(self, tale: Tale, phase: str) -> None:
        tale.handled(1, 2)
        tale.acked(1, phase="info")
        tale.handled(*([2] if phase == "ok" else [1, 2]), epoch=2)
        tale.acked(2, epoch=2)
        tale.shows()

    def test_what_was_settled_comes_again_after_a_fall_back(self, tale: Tale) -> None:
        tale.handled(1)
        tale.acked(1)
        tale.tell(FallBack(topic="t", partition=1))
        tale.handled(1, epoch=2)
        tale.shows()

    def test_what_a_partition_lost_may_come_again_in_its_successor(self, tale: Tale) -> None:
        tale.handled(1)
        tale.acked(1)
        tale.tell(FallBack(topic="t", partition=1))
        tale.handled(1, epoch=2, partition=2)
        tale.shows()

    def test_a_fall_back_of_another_partition_excuses_nothing(self, tale: Tale) -> None:
        tale.handled(1)
        tale.acked(1)
        tale.tell(FallBack(topic="t", partition=2))
        tale.handled(1, epoch=2)
        tale.shows(Breach.REPLAY_OF_SETTLED)

    def test_a_stopped_owner_that_wakes_up_is_counted(self, tale: Tale) -> None:
        tale.handled(1, epoch=1)
        tale.handled(1, 2, epoch=2)
        tale.acked(1, 2, epoch=2)
        tale.handled(2, epoch=1)
        tale.shows()
        assert tale.verdict().stale_delivered == 1

    def test_a_stopped_owner_that_wakes_up_gets_no_message_out_of_order(self, tale: Tale) -> None:
        tale.handled(1, epoch=2)
        tale.handled(3, epoch=1)
        tale.handled(2, epoch=2)
        tale.shows(Breach.INVERSION)


class TestEffects:
    def test_a_fenced_effect_happens_once(self, tale: Tale) -> None:
        tale.effect(1, 1)
        tale.shows(Breach.DUPLICATE_EFFECT)

    def test_an_effect_without_a_fence_may_come_again(self, tale: Tale) -> None:
        tale.effect(1, 1, fenced=False)
        tale.shows()
        assert tale.verdict().repeated_effects == 1

    def test_fenced_effects_are_in_order(self, tale: Tale) -> None:
        tale.effect(2, 1)
        tale.shows(Breach.INVERSION)

    def test_the_place_in_the_sink_is_the_order(self, tale: Tale) -> None:
        tale.effect(2, place=2)
        tale.effect(1, place=1)
        tale.shows()

    def test_a_group_with_a_sink_is_judged_by_it(self, tale: Tale) -> None:
        tale.published(1, 2)
        tale.handled(1, 2)
        tale.effect(1)
        tale.shows(Breach.LOST)

    def test_epochs_of_effects_never_fall_within_an_lp(self, tale: Tale) -> None:
        tale.effect(1, epoch=2, key="a")
        tale.effect(2, epoch=1, key="b")
        tale.shows(Breach.STALE_EFFECT)

    def test_epochs_of_different_lps_are_independent(self, tale: Tale) -> None:
        tale.effect(1, epoch=2, key="a", lp=0)
        tale.effect(1, epoch=1, key="b", lp=1)
        tale.shows()

    def test_a_late_effect_without_a_fence_is_no_breach(self, tale: Tale) -> None:
        tale.effect(1, epoch=2, fenced=False)
        tale.effect(1, epoch=1, fenced=False)
        tale.shows()


class TestAcks:
    def test_an_ack_before_the_handler_returned_is_a_breach(self, tale: Tale) -> None:
        delivery = tale.delivery(1)
        tale.acked(1)
        tale.end(delivery)
        tale.shows(Breach.ACK_WITHOUT_EFFECT)

    def test_an_ack_of_a_message_quarantined_is_right(self, tale: Tale) -> None:
        tale.end(tale.delivery(1), "fail")
        tale.quarantined(1)
        tale.acked(1)
        tale.shows()

    def test_an_ack_under_an_old_epoch_must_be_refused(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1)
        tale.handled(1)
        tale.assigned("taken", "b", 2)
        tale.acked(1, epoch=1)
        tale.shows(Breach.STALE_ACK)

    def test_an_ack_of_an_old_epoch_may_be_refused(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1)
        tale.handled(1)
        tale.assigned("taken", "b", 2)
        tale.acked(1, epoch=1, phase="fail")
        tale.shows()

    def test_an_ack_that_began_before_the_new_owner_took_over_may_be_accepted(self, tale: Tale) -> None:
        tale.handled(1)
        ack = tale.begin(Ack(**about(1), group="g", partition=1, epoch=1))
        tale.assigned("taken", "b", 2)
        tale.end(ack)
        tale.shows()


class TestOwners:
    def test_one_epoch_has_one_owner(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1)
        tale.assigned("taken", "b", 1)
        tale.shows(Breach.TWO_OWNERS)

    def test_a_lower_epoch_is_not_taken_after_a_higher_one(self, tale: Tale) -> None:
        tale.assigned("taken", "b", 2)
        tale.assigned("taken", "a", 1)
        tale.shows(Breach.TWO_OWNERS)

    def test_a_lease_that_runs_on_when_another_takes_over_makes_two_owners(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**9)
        tale.assigned("taken", "b", 2, until_ns=2 * 10**9)
        tale.shows(Breach.TWO_OWNERS)

    def test_a_lease_that_was_kept_counts_to_its_new_end(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**6)
        tale.assigned("kept", "a", 1, until_ns=10**9)
        tale.assigned("taken", "b", 2, until_ns=2 * 10**9)
        tale.shows(Breach.TWO_OWNERS)

    def test_a_lease_that_ran_out_is_over(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**9)
        tale.pause(2)
        tale.assigned("taken", "b", 2, until_ns=4 * 10**9)
        tale.shows()

    def test_a_lease_that_is_released_under_a_renewed_epoch_is_over(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**12)
        tale.assigned("taken", "a", 2, until_ns=10**12)
        tale.assigned("released", "a", 2)
        tale.assigned("taken", "b", 3, until_ns=2 * 10**12)
        tale.shows()

    def test_a_release_under_an_earlier_epoch_does_not_end_a_lease(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**12)
        tale.assigned("released", "a", 1)
        tale.assigned("taken", "a", 2, until_ns=10**12)
        tale.assigned("taken", "b", 3, until_ns=2 * 10**12)
        tale.shows(Breach.TWO_OWNERS)

    def test_an_answer_that_comes_after_its_lease_ran_out_gives_nothing(self, tale: Tale) -> None:
        event = OwnershipEvent(topic="t", group="g", partition=1, member="a", epoch=1, change="kept", until_ns=TICK_NS)
        operation = tale.begin(event)
        tale.assigned("taken", "b", 2, until_ns=10**12)
        tale.end(operation)
        tale.shows()

    def test_a_released_lease_is_over(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**9)
        tale.assigned("released", "a", 1)
        tale.assigned("taken", "b", 2, until_ns=2 * 10**9)
        tale.shows()

    def test_a_member_may_get_a_new_epoch_while_it_owns(self, tale: Tale) -> None:
        tale.assigned("taken", "a", 1, until_ns=10**9)
        tale.assigned("taken", "a", 2, until_ns=2 * 10**9)
        tale.shows()


class TestGates:
    GATE = Gate(topic="t", group="g", partition=2, parents=(1,))

    def test_a_successor_waits_for_its_gate(self, tale: Tale) -> None:
        tale.handled(1, partition=1)
        tale.acked(1)
        tale.handled(2, partition=2)
        tale.tell(self.GATE)
        tale.shows(Breach.BEFORE_GATE)

    def test_behind_the_gate_all_is_well(self, tale: Tale) -> None:
        tale.handled(1, partition=1)
        tale.acked(1)
        tale.tell(self.GATE)
        tale.handled(2, partition=2)
        tale.shows(drained=False)

    def test_a_gate_that_opens_before_its_parent_is_settled_is_found(self, tale: Tale) -> None:
        tale.handled(1, key="a", partition=1)
        tale.tell(self.GATE)
        tale.handled(2, key="b", partition=2)
        tale.acked(1)
        tale.shows(Breach.BEFORE_GATE)

    def test_a_parent_with_a_message_nobody_settled_keeps_its_successor_closed(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.handled(1, partition=1)
        tale.acked(1)
        tale.tell(self.GATE)
        tale.handled(3, key="b", partition=2)
        tale.shows(Breach.BEFORE_GATE, drained=False)


class TestLineage:
    CHILD = Lineage(topic="t", partition=2, parents=(1,))
    DRAIN = Drain(topic="t", group="g", partition=1)

    def test_a_successor_waits_for_its_parents_drain(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, partition=1)
        tale.handled(2, partition=2)
        tale.tell(self.DRAIN)
        tale.shows(Breach.BEFORE_GATE)

    def test_behind_the_drain_all_is_well(self, tale: Tale) -> None:
        tale.handled(1, partition=1)
        tale.tell(self.DRAIN)
        tale.handled(2, partition=2)
        tale.tell(self.CHILD)
        tale.shows()

    def test_a_drain_that_may_have_been_taken_opens(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, partition=1)
        tale.tell(self.DRAIN, "info")
        tale.handled(2, partition=2)
        tale.shows()

    def test_a_drain_that_was_refused_does_not(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, partition=1)
        tale.tell(self.DRAIN, "fail")
        tale.handled(2, partition=2)
        tale.shows(Breach.BEFORE_GATE)

    def test_a_parent_with_a_message_nobody_handled_keeps_its_successor_closed(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.appended(1, 2)
        tale.handled(1, partition=1)
        tale.tell(self.DRAIN)
        tale.handled(3, key="b", partition=2)
        tale.shows(Breach.BEFORE_GATE, drained=False)

    def test_a_merge_waits_for_all_of_its_parents(self, tale: Tale) -> None:
        tale.tell(Lineage(topic="t", partition=2, parents=(1, 3)))
        tale.handled(1, key="a", partition=1)
        operation = tale.delivery(2, key="c", partition=3)
        tale.handled(3, key="b", partition=2)
        tale.end(operation)
        tale.shows(Breach.BEFORE_GATE)

    def test_what_a_parent_lost_and_a_successor_has_is_not_the_parents(self, tale: Tale) -> None:
        """One group had it before its node fell back; sealed without it, the parent was through for the other one."""
        self.lost_by_the_parent(tale, FallBack(topic="t", partition=1))
        tale.shows()

    @pytest.mark.parametrize("elsewhere", [None, FallBack(topic="t", partition=2)])
    def test_without_a_fall_back_of_it_the_parent_has_it_still(self, tale: Tale, elsewhere: FallBack | None) -> None:
        self.lost_by_the_parent(tale, elsewhere)
        tale.shows(Breach.BEFORE_GATE)

    def test_what_comes_again_in_a_parent_is_the_parents_whatever_it_lost(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.tell(Deliver(**about(1, key="a"), group="other", partition=1, epoch=1))
        tale.tell(FallBack(topic="t", partition=1))
        tale.handled(2, key="b", partition=2, epoch=2)
        tale.handled(1, key="a", partition=1)
        tale.shows(Breach.BEFORE_GATE, flows=[("g", "t")])

    def test_who_read_it_before_may_deliver_what_a_parent_lost(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.tell(FallBack(topic="t", partition=1))
        tale.tell(Deliver(**about(1, key="a"), group="other", partition=1, epoch=1))
        tale.handled(2, key="b", partition=2, epoch=2)
        tale.handled(1, key="a", partition=2, epoch=2)
        tale.tell(Deliver(**about(2, key="b"), group="other", partition=2, epoch=2))
        tale.shows()

    def test_a_later_fall_back_excuses_no_early_gate(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(2, key="b", partition=2, epoch=2)
        tale.handled(1, key="a", partition=1)
        tale.tell(FallBack(topic="t", partition=1))
        tale.shows(Breach.BEFORE_GATE)

    def test_what_may_come_in_a_successor_yet_is_not_judged_before_the_end(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.tell(Deliver(**about(1, key="a"), group="other", partition=1, epoch=1))
        tale.tell(FallBack(topic="t", partition=1))
        tale.handled(2, key="b", partition=2, epoch=2)
        tale.shows(drained=False)
        tale.shows(Breach.LOST, flows=[("g", "t")])

    def lost_by_the_parent(self, tale: Tale, fall_back: FallBack | None) -> None:
        tale.tell(self.CHILD)
        tale.tell(Deliver(**about(1, key="a"), group="other", partition=1, epoch=1))
        if fall_back:
            tale.tell(fall_back)
        tale.handled(2, key="b", partition=2, epoch=2)
        tale.handled(1, key="a", partition=2, epoch=2)
        tale.tell(Deliver(**about(2, key="b"), group="other", partition=2, epoch=2))

    def test_an_earlier_owner_may_go_on_with_the_parent(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, partition=1, epoch=2)
        tale.tell(self.DRAIN)
        tale.handled(1, partition=1, epoch=1)
        tale.handled(2, partition=2, epoch=3)
        tale.shows()

    def test_a_chain_goes_on_from_the_parents_end(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.appended(1, 2, partition=1)
        tale.appended(3, partition=2)
        tale.shows(drained=False)

    def test_what_a_partition_lost_behind_all_groups_is_no_hole(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, 2)
        tale.tell(FallBack(topic="t", partition=1))
        tale.appended(3, partition=2)
        tale.handled(3, partition=2)
        tale.shows()

    @pytest.mark.parametrize("fell_back", [1, 2])
    def test_what_some_group_had_not_handled_or_nobody_lost_is_a_hole(self, tale: Tale, fell_back: int) -> None:
        tale.tell(self.CHILD)
        tale.handled(1, 2)
        tale.tell(FallBack(topic="t", partition=fell_back))
        tale.appended(3, partition=2)
        tale.handled(3, partition=2)
        if fell_back == 1:
            tale.tell(Deliver(**about(3), group="other", partition=2, epoch=1))
        assert Breach.CHAIN_BREAK in tale.verdict().broken

    def test_a_chain_that_goes_back_to_an_ancestor_is_broken(self, tale: Tale) -> None:
        tale.tell(self.CHILD)
        tale.tell(Lineage(topic="t", partition=3, parents=(2,)))
        tale.appended(2, 3, partition=1)
        tale.appended(1, partition=3)
        tale.shows(Breach.CHAIN_BREAK, drained=False)

    def test_nothing_stands_behind_a_command(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.tell(Seal(topic="t", partition=1, offset=1))
        tale.shows(Breach.BEHIND_SEAL, drained=False)

    def test_before_a_command_all_is_well(self, tale: Tale) -> None:
        tale.appended(1, 2)
        tale.tell(Seal(topic="t", partition=1, offset=2))
        tale.shows(drained=False)


class TestRealTime:
    def publish_side_by_side(self, tale: Tale, *seqs: int) -> None:
        operations = [tale.begin(Publish(**about(seq))) for seq in seqs]
        for operation in operations:
            tale.end(operation)

    def test_seqs_against_the_order_of_time_are_an_inversion(self, tale: Tale) -> None:
        tale.published(2)
        tale.published(1)
        tale.handled(1, 2)
        tale.shows(Breach.REAL_TIME_INVERSION)

    def test_publishes_at_the_same_time_have_no_order_of_time(self, tale: Tale) -> None:
        self.publish_side_by_side(tale, 2, 1)
        tale.handled(1, 2)
        tale.shows()

    def test_the_order_of_time_holds_between_sources(self, tale: Tale) -> None:
        tale.published(1, source=1, value="first")
        tale.published(1, source=2, value="second")
        tale.handled(1, source=2, value="second")
        tale.handled(1, source=1, value="first")
        tale.shows(Breach.REAL_TIME_INVERSION)


class TestBacklog:
    def test_a_message_that_waits_too_long_is_seen(self, tale: Tale) -> None:
        tale.published(1)
        tale.pause(3)
        tale.handled(1)
        tale.shows(Breach.UNSEEN_BACKLOG, backlog_limit_s=2)
        tale.shows(backlog_limit_s=4)

    def test_a_message_that_waits_to_the_end_is_seen(self, tale: Tale) -> None:
        tale.published(1)
        tale.pause(3)
        tale.tell(Health(healthy=True))
        tale.pause(3)
        tale.published(1, lp=1)
        tale.shows(Breach.UNSEEN_BACKLOG, backlog_limit_s=2, drained=False, flows=[("g", "t")])

    def test_while_something_is_broken_nobody_counts(self, tale: Tale) -> None:
        tale.published(1)
        tale.tell(Health(healthy=False))
        tale.pause(3)
        tale.tell(Health(healthy=True))
        tale.pause(1)
        tale.handled(1)
        tale.shows(backlog_limit_s=2)

    def test_attempts_are_signs_of_life(self, tale: Tale) -> None:
        tale.published(1, 2)
        for _ in range(3):
            tale.end(tale.delivery(1), "fail")
            tale.pause(1.5)
        tale.handled(1, 2)
        tale.shows(backlog_limit_s=2)

    def test_another_lp_is_no_sign_of_life(self, tale: Tale) -> None:
        tale.published(1)
        tale.published(1, 2, lp=1, key="other")
        tale.handled(1, lp=1, key="other")
        tale.pause(1.5)
        tale.handled(2, lp=1, key="other")
        tale.pause(1.5)
        tale.handled(1)
        tale.shows(Breach.UNSEEN_BACKLOG, backlog_limit_s=2)

    def test_an_empty_topic_may_rest(self, tale: Tale) -> None:
        tale.published(1)
        tale.handled(1)
        tale.pause(100)
        tale.published(2)
        tale.handled(2)
        tale.shows(backlog_limit_s=2)


class TestVerdicts:
    def test_a_verdict_counts_all_and_shows_some(self, tale: Tale) -> None:
        for lp in range(50):
            tale.published(1, lp=lp)
        verdict = tale.verdict(flows=[("g", "t")])
        assert verdict.counts[Breach.LOST] == 50
        assert len(verdict.violations) == 20

    def test_a_verdict_is_one_line_of_json(self, tale: Tale) -> None:
        tale.published(1)
        tale.handled(1, 1)
        text = tale.verdict().as_json()
        verdict = json.loads(text)
        assert "\n" not in text
        assert (verdict["clean"], verdict["messages"], verdict["redelivered"]) == (True, 1, 1)
        assert set(verdict["counts"]) == {str(breach) for breach in Breach}

    def test_a_shared_sequence_decides_where_all_lines_have_one(self, tale: Tale) -> None:
        tale.handled(1, 2)
        records = [
            type(record)(**{**{f: getattr(record, f) for f in record.__struct_fields__}, "sequence": number})
            for number, record in zip((3, 4, 1, 2), tale.records, strict=True)
        ]
        assert check(records).broken == {Breach.INVERSION}

    def test_a_verdict_on_many_messages_is_quick(self, tale: Tale) -> None:
        """Forty thousand lines of one key, the worst case, in seconds; anything quadratic would take minutes."""
        tale.published(*range(1, 10_001))
        tale.handled(*range(1, 10_001))
        began_at = awake_s()
        tale.shows()
        assert awake_s() - began_at < 20
