-- protocol 2
-- parked_messages_end_v2 is parked_messages_end_v1 with the names of the messages' keys. Without them all indexes seem
-- alike to a plan without statistics of a group, and one of them reads all that the group has parked in an LP.

-- End messages of parked keys that are handled, or dead. Note the handled ones for the archive.
CREATE FUNCTION mqlayer.parked_messages_end_v2(p_group_id bigint, p_lps smallint[], p_names bytea[], p_sources bigint[],
                                               p_seqs bigint[], p_handled boolean[], p_given_s double precision,
                                               p_actor text)
    RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_seqs', cardinality(p_seqs));
    WITH gone AS (
        DELETE FROM mqlayer.parked_message m
        USING unnest(p_lps, p_names, p_sources, p_seqs, p_handled) AS given (lp, name, source, seq, handled)
        WHERE m.group_id = p_group_id AND m.lp = given.lp AND m.name = given.name AND m.source = given.source
          AND m.seq = given.seq
        RETURNING m.group_id, m.partition_id, m.log_offset, m.tried, given.handled
    )
    INSERT INTO mqlayer_archive.outcome_queue
        (topic_id, group_id, partition_id, log_offset, outcome, attempts, delivered_at, actor)
    SELECT g.topic_id, e.group_id, e.partition_id, e.log_offset, 'handled', e.tried + 1,
           statement_timestamp() - make_interval(secs => p_given_s), p_actor
    FROM gone e JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
    WHERE e.handled AND t.archived;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer.parked_messages_end_v2 FROM PUBLIC;
