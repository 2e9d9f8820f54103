"""Key queues under any interleaving of readers, workers, acks, failures and changes of owner.

A walk of many weighted random steps from one seed goes deeper here than rules drawn one by one.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proof.dispatch_walk import DispatchWalk


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_key_is_handled_in_order_by_one_worker_at_a_time_and_nothing_is_forgotten(seed: int) -> None:
    walk = DispatchWalk(random.Random(seed))
    for _ in range(300):
        walk.step()
        walk.what_is_in_hand_is_counted()
    walk.end()
