"""Slots that move as a whole, as Valkey has it from 9 on: run by the matrix, on servers that can."""

from __future__ import annotations

import pytest

from mqlayer.topics import find_node
from tests.fixtures.cluster_load import await_more, move_each_slot, publishing
from tests.fixtures.clusters import StartCluster
from tests.fixtures.consumers import Recorder, StartStage
from tests.fixtures.shared_members import share
from tests.fixtures.wait import wait_until

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("replicas", [0, 1])
def test_slots_that_move_as_a_whole_under_load_keep_their_order(
    start_cluster: StartCluster, start_stage: StartStage, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, no key is handled by two at a time or out of order, and nothing has to be armed.

    No script meets a part of a partition's keys: the slot is at one shard all the time.
    """
    cluster = start_cluster(replicas=replicas)
    stage = start_stage(cluster.url, partitions=3)
    armed = find_node(stage.database, "node-1").armed_run_id
    recorder, shared = Recorder(), Recorder()
    stage.consume(recorder)
    share(stage, shared, group="s")
    with publishing(stage) as sent:
        for _ in range(2):
            move_each_slot(cluster, stage.partitions, recorder, cluster.move_slot_at_once)
        await_more(recorder, 20)
    wait_until(lambda: recorder.count() == shared.count() == len(sent), timeout_s=30, what="all handled")
    recorder.assert_in_order()
    stage.wait_settled()
    assert find_node(stage.database, "node-1").armed_run_id == armed
    assert not [record for record in caplog.records if "during rehashing" in str(getattr(record, "reason", ""))]
