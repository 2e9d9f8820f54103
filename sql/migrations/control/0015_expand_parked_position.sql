-- Where a message lay in its log, by key: what comes again of a parked key goes in front of what lies behind it there, also
-- of other sources.
CREATE INDEX parked_message_position ON mqlayer.parked_message (group_id, lp, name, partition_id, log_offset);
