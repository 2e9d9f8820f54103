-- protocol 2
-- parked_messages_end_v2 is parked_messages_end_v1 with the names of the messages' keys, and looks each message up by
-- itself. Postgres has no statistics of a group, and late ones of its LPs: a join then reads all that the group has parked,
-- and a look-up without a name all that it has parked in an LP.

-- End messages of parked keys that are handled, or dead. Note the handled ones for the archive.
CREATE FUNCTION mqlayer.parked_messages_end_v2(p_group_id bigint, p_lps smallint[], p_names bytea[], p_sources bigint[],
                                               p_seqs bigint[], p_handled boolean[], p_given_s double precision,
                                               p_actor text)
    RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_rows tid[];
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_seqs', cardinality(p_seqs));
    -- Locked, so that no row moves before it is deleted.
    SELECT array_agg(m.ctid) INTO v_rows
        FROM unnest(p_lps, p_names, p_sources, p_seqs) AS given (lp, name, source, seq)
        CROSS JOIN LATERAL (SELECT k.ctid FROM mqlayer.parked_message k
                            WHERE k.group_id = p_group_id AND k.lp = given.lp AND k.name = given.name
                              AND k.source = given.source AND k.seq = given.seq
                            FOR UPDATE) AS m;
    WITH gone AS (
        DELETE FROM mqlayer.parked_message m WHERE m.ctid = ANY(v_rows)
        RETURNING m.lp, m.source, m.seq, m.partition_id, m.log_offset, m.tried
    )
    INSERT INTO mqlayer_archive.outcome_queue
        (topic_id, group_id, partition_id, log_offset, outcome, attempts, delivered_at, actor)
    SELECT g.topic_id, p_group_id, e.partition_id, e.log_offset, 'handled', e.tried + 1,
           statement_timestamp() - make_interval(secs => p_given_s), p_actor
    FROM gone e
    JOIN unnest(p_lps, p_sources, p_seqs, p_handled) AS given (lp, source, seq, handled) USING (lp, source, seq)
    JOIN mqlayer.consumer_group g ON g.group_id = p_group_id
    JOIN mqlayer.topic t USING (topic_id)
    WHERE given.handled AND t.archived;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer.parked_messages_end_v2 FROM PUBLIC;
